"""Base snapshots: the state that a fresh sandbox starts from, made once for each base and kept by name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from worldfork.core.errors import FormatUnsupported, LaunchFailed, NotFound
from worldfork.core.ids import new_id
from worldfork.lineage.checkpoint import checkpoint
from worldfork.lineage.fitting import check_ids
from worldfork.lineage.place import Place
from worldfork.lineage.starting import StartOptions, start
from worldfork.records.sandbox import Base
from worldfork.records.snapshot import SnapshotRecord
from worldfork.sandbox.bases import VENV, host_python, parse_base, write_ground
from worldfork.sandbox.command import CommandSpec
from worldfork.sandbox.remedies import explain
from worldfork.store.faultpoints import fault

_VENV_S = 300.0
_FORMAT = "2"
"""Part of a base's name; another one when what `write_ground` writes changes."""


async def base_snapshot(place: Place, text: str) -> SnapshotRecord:
    """Return the snapshot of a base (`host` or `dir:PATH`), made now if this home has none.

    Several processes that ask at the same time make it once.

    Raises:
        ConfigError: no such base.
        LaunchFailed: the host's Python could not make a virtual environment.
    """
    base = parse_base(text)
    name = _name_of(place, base)
    found = await place.work(lambda: _known(place, name))
    if found is not None:
        return found
    async with place.single_flight(name):
        found = await place.work(lambda: _known(place, name))
        return found if found is not None else await _make(place, base, name)


async def _make(place: Place, base: Base, name: str) -> SnapshotRecord:
    with place.store.watching_disk() as disk:
        record = await place.work(lambda: _write(place, base))
        if base.kind == "host":
            record = await _add_venv(place, record)
        await place.work(lambda: place.store.make_durable(record.snapshot_id, [disk]))
    await place.work(lambda: place.store.set_name(name, record.snapshot_id))
    return record


def _write_ground(root: Path, base: Base) -> None:
    """Write the lowest layer; what the kernel refuses, as in a directory closed to this user, is a typed error."""
    try:
        write_ground(root, base)
    except OSError as error:
        raise explain(f"laying out the base at {error.filename}", error.errno or 0, "") from error


def _write(place: Place, base: Base) -> SnapshotRecord:
    # The directory below may hold files of the range too.
    ids = place.driver.ids if base.kind == "dir" else ""
    draft = place.store.begin_layer(form=place.driver.form, ids=ids)
    try:
        _write_ground(draft.path, base)
        fault("base:written")
        record = SnapshotRecord(
            snapshot_id=new_id("sn"),
            parent_id=None,
            sandbox_id=None,
            created_s=place.clock.now_s(),
            kind="filesystem",
            state="ready",
            form=place.driver.form,
            base=base.to_json(),
            layers=(draft.layer_id,),
            facts={"ids": ids} if ids else {},
            made_by="base",
            label=_label_of(base),
        )
        place.store.publish(record, [draft.layer_id])
    except BaseException:
        place.store.abandon_layer(draft.layer_id)
        raise
    return record


async def _add_venv(place: Place, ground: SnapshotRecord) -> SnapshotRecord:
    """Make the virtual environment in a sandbox on the ground; a world has it first on PATH."""
    unlimited = {"cpus": None, "memory_mb": None, "pids": None}
    live = await start(place, ground, StartOptions(name="venv", limits=unlimited))
    try:
        connection = await live.connection()
        argv = (host_python(), "-m", "venv", VENV)
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
        spec = CommandSpec(argv, env=env, working_dir="/", timeout_s=_VENV_S)
        result = await connection.run(spec, max_output_bytes=1 << 20, keep_tail=True)
        if not result.ok:
            words = (result.stderr or result.stdout).strip()[-500:]
            raise LaunchFailed(
                f"{host_python()} could not make a virtual environment: {words}",
                remedy="install the package that has the module venv (Debian, Ubuntu: python3-venv)",
            )
        record, _ = await checkpoint(live, stop=True, label=ground.label)
    finally:
        await live.end()
    return record


def _known(place: Place, name: str) -> SnapshotRecord | None:
    snapshot_id = place.store.named(name)
    if snapshot_id is None:
        return None
    try:
        record = place.store.snapshot(snapshot_id)
        check_ids(record, place.driver.ids)
    except (NotFound, FormatUnsupported):
        return None
    return record


def _label_of(base: Base) -> str:
    path = os.fsencode(base.path).decode("utf-8", "backslashreplace")
    return f"base {base.kind}:{path}" if path else f"base {base.kind}"


def _name_of(place: Place, base: Base) -> str:
    parts = (_FORMAT, place.driver.form, base.kind, base.path, base.fingerprint, repr(base.binds))
    digest = hashlib.sha256(os.fsencode("\0".join(str(part) for part in parts))).hexdigest()
    return f"base:{base.kind}:{digest[:32]}"
