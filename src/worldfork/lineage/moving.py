"""Making a live sandbox's upper a layer and moving the sandbox onto a new one, in steps that others can finish.

Whoever does this may be killed at any instant while the sandbox lives on. So its facts say beforehand which layer its
upper is becoming, and the next one who comes looks on which upper it stands, and finishes the change or undoes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from worldfork.core.errors import Corrupt, Locked, NotFound, SandboxDied, WorldforkError
from worldfork.lineage.deaths import cleared
from worldfork.lineage.live import Live
from worldfork.lineage.stacks import TRIES, next_layers_of
from worldfork.lineage.starting import ground_of, holder_of, make_upper, may_take_long
from worldfork.lineage.upper import move_upper
from worldfork.records.sandbox import SandboxFacts
from worldfork.sandbox.connection import Connection
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault

_DYING_S = 2.0
"""How long the processes of a sandbox may take to be gone after its connection is."""
_PAUSE_S = 0.002
"""Between two looks at a lock that somebody else has."""
_NAME_BYTES = 64
"""What whoever has the lock writes into its file; the rest is blank."""


@contextlib.asynccontextmanager
async def turn(live: Live) -> AsyncIterator[int]:
    """Be the only one who changes what the sandbox stands on; yields a descriptor of the lock.

    A change whose caller was killed goes on for a moment: the program that makes it keeps the lock open.

    Raises:
        SandboxDied: it is gone.
        Locked: somebody else has been at it for the time that a lease lasts; `holders` has its owner id.
    """
    try:
        fd = os.open(Path(live.facts.run) / "turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:
        raise live.gone("its directory was cleared away") from error
    except OSError:
        with typed(f"{live.sandbox_id} cannot be locked"):
            raise
    try:
        await _wait_for(fd, live)
        yield fd
    finally:
        # Not by closing: the program that drops the old root's caches has a copy for some time.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


async def _wait_for(fd: int, live: Live) -> None:
    limit_s = live.place.settings.lease_ttl_s
    end_s = time.monotonic() + limit_s
    while not _is_ours(fd):
        if time.monotonic() >= end_s:
            pid, _, owner_id = os.pread(fd, _NAME_BYTES, 0).decode(errors="replace").strip().partition(" ")
            raise Locked(
                f"process {pid or 'unknown'} has been taking a checkpoint of {live.sandbox_id} for {limit_s:g} s",
                remedy="try again; if that process was stopped or hangs, continue or end it",
                holders=[owner_id] if owner_id else [],
            )
        await asyncio.sleep(_PAUSE_S)
    with contextlib.suppress(OSError):  # on a full disk nobody learns who it is
        os.pwrite(fd, f"{os.getpid()} {live.place.store.owner_id}".encode().ljust(_NAME_BYTES), 0)


def _is_ours(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def present_facts(live: Live, connection: Connection) -> SandboxFacts:
    """Return what is true of a sandbox now, after other handles' checkpoints, whole or broken off; in one's turn.

    Raises:
        SandboxDied: it is gone.
        Corrupt: what the store knows of it is damaged; it goes on.
        StoreError, OutOfSpace: a change that was broken off could not be finished.
    """
    place = live.place

    facts = place.quick(lambda: _known_facts(live))
    if not facts.moving:
        return facts
    async with _namespaces(connection) as namespaces:
        upper = await place.driver.upper_of(facts, namespaces)
    return await place.work(lambda: _finish(live, facts, upper))


def _known_facts(live: Live) -> SandboxFacts:
    try:
        text = live.place.store.holder(live.sandbox_id).facts
    except NotFound as error:
        raise live.gone("somebody ended it") from error
    try:
        return SandboxFacts.from_json(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Corrupt(
            f"what is known of {live.sandbox_id} cannot be read: {error!r}",
            remedy="its files can still be read and copied; then end it",
            expected="the facts of a sandbox",
            actual=text[:200],
        ) from error


def _finish(live: Live, facts: SandboxFacts, upper: str) -> SandboxFacts:
    """Finish or undo a change that was broken off, by what the sandbox stands on."""
    place = live.place
    before = replace(facts, moving="", next_layers=())
    after = _moved(facts)
    old, new = ground_of(place, before), ground_of(place, after)
    if upper == os.path.basename(new.upper):
        place.store.adopt_layer(facts.moving)
        _hold_on(live, after)
        return after
    with typed(f"{facts.sandbox_id} cannot be put back"):
        if not os.path.lexists(old.upper):
            move_upper(place.store.layer_path(facts.moving), old.upper)
    for path in (new.upper, new.work):
        place.store.trash(Path(path))
    _hold_on(live, before)
    place.store.abandon_layer(facts.moving)
    return before


async def move(
    live: Live, connection: Connection, turn_fd: int, onto: tuple[str, ...] = ()
) -> tuple[SandboxFacts, asyncio.Future[None]]:
    """Make the upper of an idle, held sandbox a layer's content and move the sandbox onto a new upper over it.

    What lies below that layer stays what it was, or becomes the layers `onto`: of another state, for an upper in which
    nothing is.

    Returns the facts to be held once the layer is published, whose first layer it is, and a future that is done when
    the old root is gone for good.

    Raises:
        NotCapturable: something still uses the old root. OutOfSpace, StoreError, LaunchFailed: the disk or the host
        failed. The sandbox is as before then.
        SandboxDied: it is gone.
    """
    place, before = live.place, live.facts
    upper = ground_of(place, before).upper

    def rename() -> None:
        with typed(f"the upper of {before.sandbox_id} cannot be taken"):
            move_upper(upper, place.store.layer_path(moving.moving))
            fault("checkpoint:renamed")
            make_upper(ground_of(place, _moved(moving)), before.form, before.ids)
            fault("checkpoint:made")

    moving = await _announce(live, before, onto)
    try:
        if may_take_long(upper, before.ids):
            await place.work(rename)
        else:
            place.quick(rename)
        async with _namespaces(connection) as namespaces:
            kept = (turn_fd, connection.descriptor)
            dropped = await place.driver.reroot(before, ground_of(place, _moved(moving)), namespaces, kept)
    except SandboxDied:
        # Half-way between two roots nobody could say any more what it writes to.
        await live.kill(cleared())
        await put_right(live, connection, moving.moving)
        raise
    except BaseException:
        await put_right(live, connection, moving.moving)
        raise
    fault("checkpoint:rerooted")
    return _moved(moving), dropped


async def _announce(live: Live, before: SandboxFacts, onto: tuple[str, ...]) -> SandboxFacts:
    """Write down which layer a sandbox's upper is becoming, and hold what will lie below it."""
    place = live.place

    def begin(next_layers: tuple[str, ...]) -> SandboxFacts:
        draft = place.store.begin_layer(form=before.form, ids=before.ids)
        try:
            moving = replace(before, moving=draft.layer_id, next_layers=next_layers)
            _hold_on(live, moving)
        except BaseException:
            place.store.abandon_layer(draft.layer_id)
            raise
        return moving

    for left in reversed(range(TRIES)):
        try:
            next_layers = onto or await next_layers_of(place, before.layers)
            return place.quick(lambda: begin(next_layers))  # noqa: B023
        except NotFound:
            # A merge that nobody held yet was collected.
            if onto or not left:
                raise
    raise AssertionError("the last try returns or raises")


def _hold_on(live: Live, facts: SandboxFacts) -> None:
    """Change what a sandbox is known to stand on. One that somebody ended meanwhile must not hold anything again."""
    try:
        live.place.store.hold_on(holder_of(facts))
    except NotFound as error:
        if error.fields.get("holder_id"):
            raise live.gone("somebody ended it") from error
        raise


async def put_right(live: Live, connection: Connection, layer_id: str) -> None:
    """After a failure: finish or undo the change now if possible, else whoever takes the next checkpoint does.

    Args:
        live: the sandbox.
        connection: to its init.
        layer_id: the layer that its upper was becoming; a sandbox that is dead gives it up.
    """
    with contextlib.suppress(WorldforkError, OSError):
        with contextlib.suppress(SandboxDied):
            live.facts = await present_facts(live, connection)
            return
        # A dead connection is not yet a dead sandbox, whose upper nobody may take.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DYING_S):
                await live.wait_ended()
            await live.place.work(lambda: live.place.store.abandon_layer(layer_id))


def _moved(facts: SandboxFacts) -> SandboxFacts:
    layers = (facts.moving, *(facts.next_layers or facts.layers))
    return replace(facts, layers=layers, generation=facts.generation + 1, moving="", next_layers=())


@contextlib.asynccontextmanager
async def _namespaces(connection: Connection) -> AsyncIterator[list[int]]:
    namespaces = await connection.nsfds()
    try:
        yield namespaces
    finally:
        for fd in namespaces:
            os.close(fd)
