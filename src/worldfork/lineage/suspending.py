"""Sandboxes that rest on disk: a suspended one is a memory snapshot that knows who it was, and goes on as that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from worldfork.core.errors import Locked, NotFound, WorldforkError
from worldfork.lineage.listing import Suspended, all_suspended
from worldfork.lineage.live import Live
from worldfork.lineage.machines import expect_memory
from worldfork.lineage.memory import checkpoint_memory
from worldfork.lineage.place import Place
from worldfork.lineage.starting import StartOptions, prepare, start_prepared, unprepare, with_network
from worldfork.records.sandbox import SandboxFacts
from worldfork.records.snapshot import SnapshotRecord
from worldfork.sandbox.network import HostNetwork

_log = logging.getLogger("worldfork")


async def suspend(
    live: Live, *, outside: str = "refuse", label: str | None = None, ending: Callable[[], None] = lambda: None
) -> SnapshotRecord:
    """Save a machine with its memory and end it; `resume` lets it go on as the sandbox that it was.

    What it does between the moment that is saved and its end, a fraction of a second later, is lost.

    Args:
        live: the sandbox.
        outside, label, ending: as of `checkpoint_memory`.

    Raises:
        As `checkpoint_memory`; the sandbox goes on then.
    """
    record, _ = await checkpoint_memory(
        live, outside=outside, stop=True, label=label or f"suspended: {live.facts.name}", suspends=True, ending=ending
    )
    return record


async def resume(place: Place, wanted: str, *, detached: bool | None = None) -> Live:
    """Let a suspended sandbox go on, under its own id, name and seed; its snapshot goes when somebody ends it.

    Several processes that ask at the same time start it once.

    Args:
        place: where.
        wanted: its id or its name.
        detached: whether it outlives this process; as it was by default.

    Raises:
        NotFound: no suspended sandbox is called so. Locked: it has been resumed.
        DriverUnavailable, LaunchFailed, OutOfSpace, Corrupt: it rests on.
    """
    found = await place.work(lambda: find_suspended(place, wanted))
    async with place.single_flight(f"resume:{found.facts.sandbox_id}"):
        await place.work(lambda: _expect_resting(place, found))
        facts, network = await place.work(lambda: _again(place, found, detached))
        since_s = place.clock.monotonic_s()
        await place.work(lambda: prepare(place, [facts]), undo=lambda _: unprepare(place, [facts]))
        live = await start_prepared(place, facts, network, since_s=since_s)
        try:
            # Only from here on: a start that fails takes nothing of what it rests in along.
            live.facts = replace(live.facts, resumed=True)
            await place.work(lambda: _wake(place, live.facts))
        except BaseException:
            live.facts = replace(live.facts, resumed=False)
            await live.end()
            raise
        return live


def _again(place: Place, found: Suspended, detached: bool | None) -> tuple[SandboxFacts, HostNetwork | None]:
    """Return the facts of a sandbox that goes on. Blocking.

    Raises:
        OutOfSpace: the host has less memory than it takes at least.
    """
    facts = found.facts
    driver = place.driver_of(facts)
    # Those of the snapshot: it may have come to stand on others of the same content meanwhile.
    record = place.store.snapshot(found.snapshot_id)
    expect_memory(1, int(record.facts.get("memory", {}).get("stored_bytes", 0)))
    facts = replace(
        facts,
        run=str(place.home.run / facts.sandbox_id),
        snapshot_id=found.snapshot_id,
        layers=record.layers,
        checkpoint_id=None,
        generation=0,
        cgroups=driver.cgroups_of(facts.sandbox_id),
        detached=facts.detached if detached is None else detached,
        owner_id=place.store.owner_id,
        # They are in its memory; nothing of theirs is mounted again.
        mounts=tuple(replace(shown, layers=(), below="") for shown in facts.mounts),
        woken=True,
        resumed=False,
    )
    # As many of the host's settings as it had, as they are here and now.
    return with_network(facts, StartOptions(host_settings=tuple(facts.network_env)))


def _expect_resting(place: Place, found: Suspended) -> None:
    """Make sure, in one's turn, that nobody has resumed it since it was found."""
    sandbox_id = found.facts.sandbox_id
    if place.store.is_alive(sandbox_id):
        raise Locked(f"{sandbox_id} has been resumed", remedy="connect to it", holders=[sandbox_id])
    place.store.snapshot(found.snapshot_id)
    try:
        stale = place.store.holder(sandbox_id)
    except NotFound:
        return
    # Of a start that was killed half-way; its directory would be in the way.
    place.dispose(SandboxFacts.from_json(stale.facts))


def find_suspended(place: Place, wanted: str) -> Suspended:
    """Return the sandbox that rests and has this id or name, or whose snapshot it is; of several the last.

    Raises:
        NotFound: there is none.
    """
    for one in reversed(all_suspended(place)):
        if wanted in (one.facts.sandbox_id, one.facts.name, one.snapshot_id):
            return one
    raise NotFound(f"no suspended sandbox is called {wanted!r}", remedy="see `worldfork ls`", sandbox_id=wanted)


def _wake(place: Place, facts: SandboxFacts) -> None:
    """Let the snapshot be nobody's rest any more, for who rested in it goes on."""
    place.store.update_facts(facts.sandbox_id, facts.to_json())
    with place.store.database.write() as db:
        db.execute(
            "UPDATE snapshots SET record = json_remove(record, '$.facts.suspended') WHERE snapshot_id = ?",
            (facts.snapshot_id,),
        )


def drop_resumed(place: Place, facts: SandboxFacts) -> None:
    """Delete the snapshot of a sandbox that had been resumed and has ended, unless others need it or it has a name."""
    if facts.snapshot_id is None:
        return
    try:
        if facts.snapshot_id in place.store.names().values():
            return
        place.store.delete_snapshot(facts.snapshot_id)
    except (Locked, NotFound):
        return
    except (WorldforkError, OSError) as error:
        _log.warning("%s is left of %s: %s", facts.snapshot_id, facts.sandbox_id, error)
        return
    place.collect_soon()
