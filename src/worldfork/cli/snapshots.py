"""The verbs for frozen state: checkpoint, snapshots, fork."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Annotated, Any

import typer

from worldfork import CheckpointType, ForkResult, ForkResults, NotFound, Sandbox, SnapshotLevel
from worldfork.cli.boundary import OK, PARTIAL, exit_code, verb
from worldfork.cli.lookup import open_store
from worldfork.cli.printing import (
    human_bytes,
    human_seconds,
    note,
    print_error,
    print_json,
    print_line,
    print_table,
    progress,
)
from worldfork.cli.sandboxes import AsJson, remove_each, snapshot_id
from worldfork.cli.shapes import error_shape, typed, when
from worldfork.core.errors import ConfigError
from worldfork.keeping.family import family, state_of
from worldfork.keeping.keep_rules import by_snapshot
from worldfork.lineage.snapshots import snapshot_info
from worldfork.records.snapshot import SnapshotRecord

Outside = Annotated[
    str, typer.Option(help="Of connections that leave a machine whose memory is saved: refuse, close or keep.")
]


@verb
def checkpoint(
    sandbox_id: Annotated[str, typer.Argument(metavar="ID", help="Id or name of a live sandbox.")],
    stop: Annotated[bool, typer.Option("--stop", help="End the sandbox once it is stored.")] = False,
    durable: Annotated[
        bool, typer.Option("--durable", help="Wait until a crash of the machine cannot lose it.")
    ] = False,
    label: Annotated[str | None, typer.Option(help="A note kept with the snapshot.")] = None,
    level: Annotated[
        SnapshotLevel, typer.Option(help="volatile: a throw-away; exported: copied to WORLDFORK_REMOTE too.")
    ] = SnapshotLevel.LOCAL,
    verify: Annotated[
        str | None, typer.Option(metavar="LINE", help="Keep it only if this line for the shell passes in a fork of it.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="With its processes, each where it is. Of machines only.")
    ] = False,
    outside: Outside = "refuse",
    explain: Annotated[
        bool, typer.Option("--explain", help="Take none: print what one of either kind would take now.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Give up after this many seconds.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Freeze a sandbox's disk into a snapshot, with --memory its processes too; print its id. The sandbox goes on."""
    if explain:
        _explain(sandbox_id, as_json)
        return
    more = _of_memory(memory, outside)
    if more.pop("memory", False):
        more["checkpoint_type"] = CheckpointType.MEMORY
    with progress("checkpointing", quiet=as_json):
        info = Sandbox.connect(sandbox_id).checkpoint(
            stop=stop,
            label=label,
            level=level,
            timeout=timeout,
            wait_until="completed" if durable else "local_ready",
            verify=verify,
            **more,
        )
    for warning in info.warnings:
        note(f"worldfork: {warning}")
    if as_json:
        print_json(info.to_json())
    else:
        print_line(info.snapshot_id)


def _explain(sandbox_id: str, as_json: bool) -> None:
    costs = Sandbox.connect(sandbox_id).explain()
    if as_json:
        print_json(costs.to_json())
        return
    pause = "nothing stands still" if costs.filesystem_pause_s is None else _stands_still(costs.filesystem_pause_s)
    rows = [("filesystem", human_bytes(costs.filesystem_bytes), "-", pause, "the disk")]
    if costs.memory_bytes is None or costs.memory_pause_s is None:
        rows.append(("memory", "-", "-", f"the {costs.driver} driver saves none", "-"))
    else:
        shared = human_bytes(costs.memory_shared_bytes)
        rows.append(
            ("memory", human_bytes(costs.memory_bytes), shared, _stands_still(costs.memory_pause_s), "disk, processes")
        )
    print_table(("kind", "adds", "shares", "pause", "holds"), rows)


def _of_memory(memory: bool, outside: str) -> dict[str, Any]:
    if memory:
        return {"memory": True, "outside": outside}
    if outside != "refuse":
        raise ConfigError("--outside is about checkpoints with memory", remedy="give --memory too")
    return {}


def _stands_still(pause_s: float) -> str:
    return f"about {human_seconds(pause_s)}"


snapshots = typer.Typer(help="List snapshots, or remove them with `rm`.", invoke_without_command=True)


@snapshots.callback()
@verb
def list_snapshots(
    context: typer.Context,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Ids only.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the snapshots of this home, newest first; `snapshots rm ID...` removes some."""
    if context.invoked_subcommand is not None:
        return
    with open_store() as store:
        records, names = store.snapshots(), by_snapshot(store.names())
        added_bytes = {each.snapshot_id: each.added_bytes for each in family(store)}
    found = [
        {
            **snapshot_info(_with_size(record, added_bytes.get(record.snapshot_id))).to_json(),
            "state": state_of(record.state, record.exported),
            "level": record.level,
            "names": names.get(record.snapshot_id, []),
        }
        for record in reversed(records)
    ]
    if as_json:
        print_json(found)
    elif quiet:
        for facts in found:
            print_line(facts["snapshot_id"])
    else:
        rows = [
            (
                facts["snapshot_id"],
                ", ".join(facts["names"]) or None,
                facts["label"],
                facts["state"],
                facts["level"],
                facts["snapshot_type"],
                facts["layers"],
                human_bytes(facts["size_bytes"]),
                facts["sandbox_id"],
                when(facts["created_at"]),
            )
            for facts in found
        ]
        columns = ("snapshot", "names", "label", "state", "level", "kind", "layers", "changed", "taken of", "created")
        print_table(columns, rows, empty="There is no snapshot.")


def _with_size(record: SnapshotRecord, added_bytes: int | None) -> SnapshotRecord:
    # Most checkpoints do not count what they add: it is known once its layer is sealed.
    return record if record.size_bytes is not None else replace(record, size_bytes=added_bytes)


@snapshots.command("rm")
@verb
def remove_snapshots(
    snapshot_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of snapshots.")],
    as_json: AsJson = False,
) -> int:
    """Remove snapshots. One that a live sandbox still uses stays, and the error names the sandbox."""
    return remove_each(snapshot_ids, _delete, as_json=as_json)


def _delete(snapshot_id: str) -> str:
    Sandbox.delete_snapshot(snapshot_id)
    return snapshot_id


@verb
def fork(
    source: Annotated[str, typer.Argument(metavar="ID", help="A snapshot, or a live sandbox (its state now).")],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many sandboxes.")] = 1,
    seed: Annotated[list[int] | None, typer.Option(help="Seed of one fork; give it once per fork.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="How many start at once.")] = None,
    driver: Annotated[
        str | None,
        typer.Option(help="namespace or microvm. Default: that of a live sandbox; of a snapshot WORLDFORK_DRIVER."),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Of a live machine: with its processes, each where it is.")
    ] = False,
    outside: Outside = "refuse",
    as_json: AsJson = False,
) -> int:
    """Make sandboxes that share one state and go on after this command, and print their ids."""
    options: dict[str, Any] = {"seeds": seed or None, "max_concurrency": concurrency, "detached": True}
    if driver is not None:
        options["driver"] = driver
    with progress(f"forking {count}", quiet=as_json):
        results = _fork(source, count, options, _of_memory(memory, outside))
    if as_json:
        print_json([_shape(result) for result in results])
    for result in results:
        if result.error is not None:
            print_error(typed(result.error), as_json=as_json)
        elif not as_json:
            print_line(result.unwrap().sandbox_id)
    if not results.errors:
        return OK
    return PARTIAL if results.sandboxes else exit_code(typed(results.errors[0]))


def _fork(source: str, count: int, options: dict[str, Any], live_options: dict[str, Any]) -> ForkResults[Sandbox]:
    """Fork what an argument means: a snapshot's id, a live sandbox, or a snapshot's name.

    Args:
        source, count: as of the verb.
        options: of every fork.
        live_options: of that of a live sandbox; a snapshot is what it is.
    """
    live = None
    if not source.startswith("sn-"):
        with contextlib.suppress(NotFound):
            live = Sandbox.connect(source)
    if live is not None:
        return live.fork(count, **live_options, **options)
    found = snapshot_id(source)
    if live_options:
        raise ConfigError(
            "--memory is about a live sandbox: a snapshot has its memory, or has none", remedy="leave --memory out"
        )
    return Sandbox.fork_snapshot(found, count, **options)


def _shape(result: ForkResult[Sandbox]) -> dict[str, Any]:
    return {
        "index": result.index,
        "sandbox_id": None if result.sandbox is None else result.sandbox.sandbox_id,
        "error": None if result.error is None else error_shape(typed(result.error)),
    }
