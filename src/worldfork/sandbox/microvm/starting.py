"""A machine that goes on from a saved memory, and a sandbox inside it."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from worldfork.core.errors import LaunchFailed, SandboxError
from worldfork.records.sandbox import SandboxFacts
from worldfork.sandbox import wire as sandbox_wire
from worldfork.sandbox.cgroups import CgroupLayout
from worldfork.sandbox.command import CommandSpec
from worldfork.sandbox.connection import IN_MACHINE, Connection
from worldfork.sandbox.driver import StartPlan
from worldfork.sandbox.microvm import inside, qmp, wire
from worldfork.sandbox.microvm.control import Control, control, exactly, open_stream, reach
from worldfork.sandbox.microvm.disks import (
    POINTS_NAME,
    bound_paths,
    has_trees,
    open_chains,
    points_of,
    shown_paths,
    with_top,
    write_top,
)
from worldfork.sandbox.microvm.host import Host, plug
from worldfork.sandbox.microvm.keep import RAM_FD, STATE_FD, Kept, base_items, new_generation, start_keep, walls
from worldfork.sandbox.microvm.machine import Network, Restore
from worldfork.sandbox.microvm.manifest import DiskChain, Running, Saved, open_state, write_running
from worldfork.sandbox.microvm.sizes import file_bytes
from worldfork.sandbox.microvm.template import continue_from
from worldfork.sandbox.microvm.wire import Op, Target
from worldfork.sandbox.program import encode_plan
from worldfork.sandbox.remedies import explain

ENTROPY_BYTES: Final = 64
HOOK_S: Final = 10.0
_LAUNCHED: Final = 110
_ADDRESS: Final = "eth0\t10.0.2.15/24\t10.0.2.2"
_NAME_SERVER: Final = "nameserver 10.0.2.3"
_RESOLV_CONF: Final = "/etc/resolv.conf"
_HEADER: Final = struct.Struct("<IHHI")


@dataclass(frozen=True)
class Origin:
    """What a machine goes on from."""

    directory: Path
    saved: Saved
    ram_fd: int
    """Of its sealed memory; this one's own."""
    disks: tuple[DiskChain, ...]
    """What its disks stand on, with absolute paths; what it writes comes on top of the last one."""
    network: Network = "none"
    """What is behind the machine's card."""


def restore(
    host: Host, plan: StartPlan, origin: Origin, cgroups: list[tuple[str, str]], *, waits: bool = False
) -> tuple[Kept, int]:
    """Start a machine that goes on from a saved memory. Blocking, for about a millisecond.

    Args:
        host: this machine.
        plan: of the sandbox.
        origin: what it goes on from.
        cgroups: items of its groups.
        waits: whether it goes on only when it is told to, by `release`.

    Returns:
        Its keep, and the generation of its wire.

    Raises:
        NotFound, Corrupt: a file is gone or damaged.
        LaunchFailed: the host is at a limit.
    """
    facts, saved = plan.facts, origin.saved
    run, generation = Path(facts.run), new_generation()
    write_top(run)
    chains = with_top(run, origin.disks)
    state = open_state(origin.directory, saved)
    opened: dict[str, int] = {}
    try:
        opened = dict(open_chains(chains))
        disks, numbers = plug(chains, opened)
        start = Restore(saved.saved_by, STATE_FD, waits=waits)
        machine = host.machine(saved.build, start, disks, network=origin.network)
        items = base_items(facts.sandbox_id, run, plan.lock)
        if facts.detached:
            items.append(("detached", "1"))
        if facts.timeout_s:
            items.append(("lifetime_ms", str(int(facts.timeout_s * 1000))))
        fds = {RAM_FD: origin.ram_fd, STATE_FD: state, **numbers}
        items += [*cgroups, ("file_bytes", str(file_bytes(facts.limits, saved.build)))]
        items += walls(facts.sandbox_id, saved.build.accel, network=origin.network == "host")
        return start_keep(items, machine.arguments(), fds, generation), generation
    finally:
        for fd in (state, *opened.values()):
            os.close(fd)


async def come_up(
    kept: Kept, plan: StartPlan, host: Host, origin: Origin, generation: int, *, stopped: bool = False
) -> Connection:
    """Wait for a restored guest, make it this sandbox's own, and connect to the init inside.

    Args:
        kept: of its machine, which is launched.
        plan: of the sandbox.
        host: this machine.
        origin: what it goes on from.
        generation: of its wire.
        stopped: whether its guest has answered before, and stands still since.

    Raises:
        LaunchFailed, OutOfSpace: with what QEMU or the guest said.
        SandboxDied: the machine has ended.
    """
    run = Path(plan.facts.run)
    write_running(run, _running(kept, plan, host, origin, generation))
    if stopped:
        async with qmp.connect(run / "qmp") as monitor:
            await monitor.execute("cont")
    elif origin.saved.saved_by == "migration":
        async with qmp.connect(run / "qmp") as monitor:
            await continue_from(monitor, STATE_FD, origin.saved.saved_by)
    async with control(run) as guest:
        if not stopped:
            await kept.ready()
        if plan.memory is not None:
            return await _enter_fork(guest, plan, generation)
        await resume(guest, generation)
        await mount(guest, plan)
        await launch(run, plan)
        return await _connect(plan)


def _running(kept: Kept, plan: StartPlan, host: Host, origin: Origin, generation: int) -> Running:
    """Return what others need to know of a machine."""
    return Running(
        qemu_pid=kept.qemu_pid,
        ram_fd=RAM_FD,
        memory=str(origin.directory),
        generation=generation,
        isolation=host.decision.isolation,
        build=origin.saved.build,
        disks=with_top(Path(plan.facts.run), origin.disks),
        network="none" if origin.network == "none" else "host",
        below=plan.ground.layers[0] if plan.ground.layers else "",
    )


async def _enter_fork(guest: Control, plan: StartPlan, generation: int) -> Connection:
    """Renew what siblings must not share, connect to the init inside meanwhile, and let the fork's hook run."""
    items = [("hostname", plan.hostname), *identity_items(plan), ("program", inside.HOOK)]
    opening = asyncio.ensure_future(_connect(plan))
    try:
        missing = await resume(guest, generation, *items)
        connection = await opening
        if inside.HOOK.encode() not in missing.split(b"\0"):
            await _run_hook(connection, plan)
    except BaseException:
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            opening.result().close()
        raise
    return connection


async def _connect(plan: StartPlan) -> Connection:
    return await Connection.open(reach(Path(plan.facts.run) / "sock"), sandbox_id=plan.facts.sandbox_id)


async def _run_hook(connection: Connection, plan: StartPlan) -> None:
    """Let a memory fork renew what only its own programs know of.

    Raises:
        LaunchFailed: the hook failed, or did not end in time.
    """
    spec = CommandSpec((inside.HOOK,), env=plan.env, timeout_s=HOOK_S, user="0")
    result = await connection.run(spec, max_output_bytes=64 << 10, keep_tail=True)
    if result.ok:
        return
    how = f"did not end within {HOOK_S:g} s" if result.timed_out else f"ended with {result.exit_code}"
    raise LaunchFailed(
        f"{inside.HOOK} {how} in a fork: {result.stderr[-500:].strip()}",
        remedy="mend it in the sandbox, and take the memory checkpoint again",
        sandbox_id=plan.facts.sandbox_id,
        step="hook",
    )


async def resume(guest: Control, generation: int, *items: tuple[str, str]) -> bytes:
    """Give a restored guest randomness of its own, the time of day, and a name.

    Raises:
        LaunchFailed: it did not take them; it must not go on as a twin.
    """
    body = wire.resume_body(generation, time.time_ns(), os.urandom(ENTROPY_BYTES), *items)
    try:
        return await guest.ask(Op.RESUME, body)
    except SandboxError as error:
        raise LaunchFailed(f"the guest did not become one of its own: {error.message}", step="resume") from error


async def mount(guest: Control, plan: StartPlan) -> None:
    """Let a fresh guest mount what its sandbox stands on.

    Raises:
        LaunchFailed: it could not.
    """
    try:
        await guest.ask(Op.PREPARE, wire.items(*_mounts(plan)))
    except SandboxError as error:
        raise LaunchFailed(f"the guest could not mount its disks: {error.message}", step="prepare") from error


def _mounts(plan: StartPlan) -> Iterator[tuple[str, str]]:
    if plan.facts.base.path:
        yield "mount", f"/dev/vda\t{inside.BASE}\terofs\tro\t"
    if has_trees(plan):
        yield "mount", f"/dev/vdb\t{inside.LAYERS}\terofs\tro\t"
    # Its tables of inodes are zero already, and what is free is looked up when it is needed: a thread that sees to
    # either would go on in each fork.
    yield "mount", f"/dev/vdc\t{inside.SCRATCH}\text4\tnodev,noatime\tnoinit_itable,no_prefetch_block_bitmaps"
    yield "mkdir", inside.UPPER
    yield "mkdir", inside.WORK
    # The root of a world is that of its topmost layer.
    yield "like", f"{next(_layers(plan))}\t{inside.UPPER}"
    if plan.facts.network == "host":
        yield "address", _ADDRESS


async def launch(run: Path, plan: StartPlan) -> None:
    """Start the sandbox inside a guest that has mounted its disks.

    Raises:
        LaunchFailed, OutOfSpace: with what the guest said.
    """
    facts = plan.facts
    # Both plans at once: nothing of the second takes time to make.
    plans = encode_plan([*_form_items(facts), ("net", facts.network)]) + encode_plan(launch_items(plan))
    with await open_stream(run, Target.LAUNCH) as sock:
        try:
            await asyncio.get_running_loop().sock_sendall(sock, plans)
            for wanted in (_LAUNCHED, sandbox_wire.HELLO):
                size, kind, _, _ = _HEADER.unpack(await exactly(sock, _HEADER.size))
                payload = await exactly(sock, min(size, sandbox_wire.MAX_PAYLOAD_BYTES))
                if kind == sandbox_wire.ERROR:
                    number, text = sandbox_wire.read_error(payload)
                    raise explain(text, number, facts.sandbox_id)
                if kind != wanted:
                    raise LaunchFailed(f"launch said {kind} where {wanted} was expected", sandbox_id=facts.sandbox_id)
        except (EOFError, OSError) as error:
            raise LaunchFailed("launch ended without a word in the guest", sandbox_id=facts.sandbox_id) from error


def _form_items(facts: SandboxFacts) -> list[tuple[str, str]]:
    """Return the items of a sandbox's form in its guest, whose root is the machine's own.

    Where a user has a range of ids, the files in the machine belong to the ids that they have inside: only the marks of
    its layers are those of a user.
    """
    if facts.form == "user" and facts.ids:
        return [("form", "trusted"), ("marks", "user")]
    return [("form", facts.form)]


def launch_items(plan: StartPlan) -> Iterator[tuple[str, str]]:
    """Yield the second plan of a launch in a guest."""
    facts = plan.facts
    yield "id", IN_MACHINE
    yield "hostname", plan.hostname
    yield "run", inside.RUN
    yield "root", inside.RUN
    yield "lock", f"{inside.RUN}/lock"
    yield "net", facts.network
    yield "shm_bytes", str(plan.shm_bytes)
    for number, tree in enumerate(plan.shown):
        paths = shown_paths(tree, number)
        if tree.layers:
            yield "mount", f"{tree.target}\t{tree.path}"
            yield from (("shown", path) for path in paths)
        else:
            yield "bind", f"{paths[0]}\t{tree.target}"
    for source, target in bound_paths(plan):
        yield "bind", f"{source}\t{target}"
    yield from identity_items(plan)
    yield from guest_cgroup(facts)
    yield from _ground_items(plan)


def identity_items(plan: StartPlan) -> Iterator[tuple[str, str]]:
    """Yield the files that are this sandbox's own, as LAUNCH and RESUME take them."""
    for path, content in plan.identity:
        if path == _RESOLV_CONF and plan.facts.network == "host":
            # The host's servers may be at its loopback; QEMU's own asks them.
            rest = [line for line in content.splitlines() if line.startswith(("search", "domain", "options"))]
            content = "".join(f"{line}\n" for line in (_NAME_SERVER, *rest))
        yield "idfile", f"{path}\t{content}"


def guest_cgroup(facts: SandboxFacts) -> list[tuple[str, str]]:
    """Return the items of the one group that a sandbox has in its guest."""
    limits = facts.limits
    if limits.cpus is not None and float(limits.cpus).is_integer():
        limits = replace(limits, cpus=None)  # its machine has just so many
    return CgroupLayout(v1={}, v2=Path(inside.CGROUPS)).items(facts.sandbox_id, limits)


def _ground_items(plan: StartPlan) -> Iterator[tuple[str, str]]:
    yield from _form_items(plan.facts)
    yield "overlay", "legacy"
    yield "scratch", inside.LINKS
    for path in _layers(plan):
        yield "layer", path
    yield "upper", inside.UPPER
    yield "work", inside.WORK


def _layers(plan: StartPlan) -> Iterator[str]:
    """Yield the directories of the guest that a sandbox's overlay is made of, the topmost first."""
    for number in range(len(plan.layer_ids)):
        yield f"{inside.LAYERS}/{number}"
    if plan.facts.base.path:
        yield f"{inside.BASE}/{inside.BASE_NAME}"
    if points_of(plan):
        yield f"{inside.LAYERS}/{POINTS_NAME}"
