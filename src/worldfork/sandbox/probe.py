"""What this machine can do, found by really starting a sandbox each way."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from worldfork.core import mapped
from worldfork.core.clock import boot_id
from worldfork.core.errors import DriverUnavailable, SandboxDied, WorldforkError
from worldfork.core.idmap import IdMap, Lacking, find_id_map, tool
from worldfork.core.ids import new_id
from worldfork.core.remove import remove_tree
from worldfork.core.settings import Settings
from worldfork.records.sandbox import Limits, SandboxFacts
from worldfork.sandbox.bases import host_base, write_ground
from worldfork.sandbox.cgroups import remove_groups
from worldfork.sandbox.command import CommandResult, CommandSpec, Reason
from worldfork.sandbox.driver import Ground, Started, StartPlan
from worldfork.sandbox.namespace import NamespaceDriver
from worldfork.sandbox.remedies import in_docker

_MEMORY_MB = 32
_COMMAND_S = 30.0
_UNLIMITED = Limits(None, None, None, None)
_GIVES_AWAY = "cd /tmp && : >given && chown 12:34 given && stat -c %u:%g given"
_GIVEN = "12:34"
_log = logging.getLogger("worldfork")


@dataclass(frozen=True)
class ProbeResult:
    """One way of starting a sandbox, tried."""

    name: str
    ok: bool
    detail: str
    """What was seen."""
    remedy: str = ""
    """The one thing that would mend it; empty where it works or nothing can be done."""


async def probe(settings: Settings) -> list[ProbeResult]:
    """Start a sandbox as root and in a user namespace, with each way of mounting, network and limits.

    Everything happens in a temporary directory below the settings' home (or scratch), and nothing of it is left.
    """
    place = settings.scratch or settings.home
    place.mkdir(parents=True, exist_ok=True)
    top = Path(tempfile.mkdtemp(prefix="doctor-", dir=place))
    results = []
    try:
        for form in ("trusted", "user") if os.geteuid() == 0 else ("user",):
            for overlay in ("new", "legacy"):
                chosen = replace(settings, form=form, overlay=overlay)
                name = f"{'root' if form == 'trusted' else 'user namespace'}, overlay mounted the {overlay} way"
                results.append(await _try(name, top, chosen, _UNLIMITED, "none", _says_hello))
        natural = replace(settings, form="auto", overlay="auto")
        results.append(await _try("network none", top, natural, _UNLIMITED, "none", _has_only_loopback))
        results.append(await _try("network host", top, natural, _UNLIMITED, "host", _shares_network))
        results.append(await _try_limits(top, natural))
        if os.geteuid() != 0:
            results.append(await _try_id_range(top, natural))
    finally:
        remove_tree(top)
    return results


def _says_hello(result: CommandResult) -> str:
    return "a command ran" if result.ok else ""


def _has_only_loopback(result: CommandResult) -> str:
    lines = [line.split(":")[0].strip() for line in result.stdout.splitlines() if ":" in line]
    return "only the loopback interface is there" if lines == ["lo"] else ""


def _shares_network(result: CommandResult) -> str:
    with open("/proc/net/dev") as own:
        names = {line.split(":")[0].strip() for line in own if ":" in line}
    seen = {line.split(":")[0].strip() for line in result.stdout.splitlines() if ":" in line}
    return "the host's interfaces are there" if seen == names else ""


async def _try(name: str, top: Path, settings: Settings, limits: Limits, network: str, judge: object) -> ProbeResult:
    try:
        result = await _start_and_run(top, settings, limits, network, ("cat", "/proc/net/dev"))
    except (WorldforkError, OSError) as error:
        remedy = error.remedy if isinstance(error, DriverUnavailable) else ""
        text = error.message if isinstance(error, WorldforkError) else str(error)
        return ProbeResult(name, False, text, remedy)
    detail = judge(result)  # type: ignore[operator]  # one of the functions above
    return ProbeResult(name, bool(detail), detail or f"unexpected: {(result.stderr or result.stdout).strip()[-200:]}")


async def _try_limits(top: Path, settings: Settings) -> ProbeResult:
    name = "limits by cgroups"
    limits = Limits(cpus=1.0, memory_mb=_MEMORY_MB, pids=64)
    hungry = ("tail", "/dev/zero")  # keeps a line without an end in memory
    try:
        result = await _start_and_run(top, settings, limits, "none", hungry)
    except (WorldforkError, OSError) as error:
        return ProbeResult(name, False, str(error), _cgroup_remedy())
    if result.reason is Reason.OOM_KILLED or result.signal == signal.SIGKILL:
        return ProbeResult(name, True, f"a command that took more than {_MEMORY_MB} MiB was ended")
    return ProbeResult(name, False, f"a command could take more than {_MEMORY_MB} MiB", _cgroup_remedy())


async def _try_id_range(top: Path, settings: Settings) -> ProbeResult:
    """Start a sandbox with this user's range of ids, and give a file away in it."""
    name = "range of ids by newuidmap"
    found = find_id_map()
    if isinstance(found, Lacking):
        return ProbeResult(name, False, f"{found.reason}; files inside belong to root alone", found.remedy)
    try:
        ids = await asyncio.to_thread(mapped.present_map)
        argv = ("sh", "-c", _GIVES_AWAY)
        result = await _start_and_run(top, replace(settings, form="user"), _UNLIMITED, "none", argv, ids.text)
    except (WorldforkError, OSError) as error:
        remedy = error.remedy if isinstance(error, WorldforkError) else ""
        return ProbeResult(name, False, error.message if isinstance(error, WorldforkError) else str(error), remedy)
    if not result.ok or result.stdout.strip() != _GIVEN:
        return ProbeResult(name, False, f"a file could not be given away: {(result.stderr or result.stdout).strip()}")
    used = "used" if settings.id_range == "auto" else "not used: WORLDFORK_ID_RANGE is off"
    return ProbeResult(name, True, f"{_in_words(ids)}; {used}")


def _in_words(ids: IdMap) -> str:
    return "uids " + ", ".join(
        f"{one.inside} to {one.inside + one.size - 1} are {one.outside} to {one.outside + one.size - 1} here"
        for one in ids.uids[1:]
    )


def proved_ids(settings: Settings, form: str, proof: Path, top: Path) -> str:
    """Return the map of ids that sandboxes are to have, as text; empty for root alone. Blocking.

    A range is used only if a sandbox that was really started could give a file away. Once for each boot and map.

    Args:
        form: of the sandboxes.
        proof: the file that says that it was tried.
        top: a directory to try it in.
    """
    found = mapped.likely_map() if settings.id_range == "auto" and form == "user" else None
    if not isinstance(found, IdMap):
        return ""
    try:
        tools = [os.stat(tool(name) or "/").st_mtime_ns for name in ("newuidmap", "newgidmap")]
        word = f"{boot_id()} {tools} {found.text}\n"
        if proof.exists() and proof.read_text() == word:
            return found.text
        result = _try_in_thread(top, settings)
        if result.ok:
            draft = proof.with_name(f"{proof.name}.{os.getpid()}")
            draft.write_text(word)
            draft.replace(proof)
            return found.text
        why = result.detail
    except (WorldforkError, OSError) as error:
        why = str(error)
    _log.warning("sandboxes get no range of ids: %s; see `worldfork doctor`", why)
    return ""


def _try_in_thread(top: Path, settings: Settings) -> ProbeResult:
    directory = Path(tempfile.mkdtemp(prefix="ids-", dir=top))
    try:
        # This thread may have an event loop that runs.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(_try_id_range(directory, settings))).result()
    finally:
        remove_tree(directory)


def _cgroup_remedy() -> str:
    if in_docker():
        return "start the container with --cgroupns=private -v /sys/fs/cgroup:/sys/fs/cgroup:rw"
    return "systemd-run --user --scope -p Delegate=yes <your program>"


async def _start_and_run(
    top: Path, settings: Settings, limits: Limits, network: str, argv: tuple[str, ...], ids: str = ""
) -> CommandResult:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a missing limit is a line of the report
        driver = NamespaceDriver(settings)
    driver.ids = ids
    facts = _make_facts(top, driver, limits, network)
    run = Path(facts.run)
    for name in ("scratch", "upper.0", "work.0"):
        (run / name).mkdir(parents=True)
    ground = run / "ground"
    write_ground(ground, facts.base)
    plan = StartPlan(
        facts=facts,
        ground=Ground((str(ground),), f"{run}/upper.0", f"{run}/work.0"),
        lock=str(run / "lock"),
        hostname="doctor",
    )
    started: Started | None = None
    try:
        started = await driver.start(plan)
        if limits.memory_mb is not None and not driver.capabilities().limits:
            raise SandboxDied("no cgroup of this host can be written")
        spec = CommandSpec(argv, env={"PATH": "/usr/bin:/bin"}, timeout_s=_COMMAND_S)
        return await started.connection.run(spec, max_output_bytes=1 << 20)
    finally:
        if started is not None:
            await _end(started)
        remove_groups(facts.cgroups)


async def _end(started: Started) -> None:
    pidfd = os.pidfd_open(started.pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, started.pid, 0)
    finally:
        os.close(pidfd)
        started.connection.close()
        os.close(started.leash)


def _make_facts(top: Path, driver: NamespaceDriver, limits: Limits, network: str) -> SandboxFacts:
    sandbox_id = new_id("sb")
    return SandboxFacts(
        sandbox_id=sandbox_id,
        name="doctor",
        run=str(top / sandbox_id),
        form=driver.form,
        driver=driver.name,
        base=host_base(),
        snapshot_id=None,
        layers=(),
        cgroups=driver.cgroups_of(sandbox_id),
        network=network,
        limits=limits,
    )
