"""Which sandboxes there are: those that live, and those that rest in a snapshot."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from worldfork.core.errors import NotFound, WorldforkError
from worldfork.lineage.place import Place
from worldfork.records.sandbox import SandboxFacts, SandboxInfo, SandboxStatus
from worldfork.store.store import Holder

_log = logging.getLogger("worldfork")


@dataclass(frozen=True)
class Suspended:
    """A sandbox that rests."""

    snapshot_id: str
    facts: SandboxFacts


def all_infos(here: Place) -> Sequence[SandboxInfo]:
    """Return the live sandboxes of all processes, oldest first; then those that are suspended. Blocking."""
    living = [info_of(SandboxFacts.from_json(holder.facts)) for holder in _living(here)]
    known = {info.sandbox_id for info in living}
    resting = [one.facts for one in all_suspended(here) if one.facts.sandbox_id not in known]
    return [*living, *(info_of(facts, SandboxStatus.SUSPENDED) for facts in resting)]


def find_live(here: Place, wanted: str) -> Holder:
    """Return the holder of the live sandbox of this id or name. Blocking.

    Raises:
        NotFound: there is none.
    """
    for holder in _living(here):
        if wanted in (holder.holder_id, SandboxFacts.from_json(holder.facts).name):
            return holder
    for one in all_suspended(here):
        if wanted in (one.facts.sandbox_id, one.facts.name):
            raise NotFound(
                f"{wanted!r} is suspended",
                remedy=f"worldfork resume {wanted}; or, to have it gone, worldfork snapshots rm {one.snapshot_id}",
                sandbox_id=wanted,
            )
    raise NotFound(f"no live sandbox is called {wanted!r}", remedy="see `worldfork ls`", sandbox_id=wanted)


def is_suspended(here: Place, sandbox_id: str) -> bool:
    """Whether a sandbox rests in a snapshot. Blocking."""
    return any(one.facts.sandbox_id == sandbox_id for one in all_suspended(here))


def all_suspended(here: Place) -> list[Suspended]:
    """Return the sandboxes that rest, the one that was suspended first first; damaged ones are left out. Blocking."""
    query = (
        "SELECT snapshot_id, json_extract(record, '$.facts.suspended') FROM snapshots"
        " WHERE instr(record, '\"suspended\":') > 0 ORDER BY number"
    )
    with here.store.database.read() as db:
        rows = db.execute(query).fetchall()
    found = []
    for snapshot_id, text in rows:
        try:
            if text is not None:
                found.append(Suspended(snapshot_id, SandboxFacts.from_json(text)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            # All others are to be found all the same, and the snapshot itself can be forked.
            _log.warning("what %s knows of its sandbox cannot be read: %r", snapshot_id, error)
    return found


def _living(here: Place) -> Iterator[Holder]:
    return (one for one in here.store.holders() if one.kind == "sandbox" and here.store.is_alive(one.holder_id))


def info_of(facts: SandboxFacts, status: SandboxStatus = SandboxStatus.RUNNING, **now: int) -> SandboxInfo:
    """Return what is shown of a sandbox.

    Args:
        facts: what it is.
        status: of its life.
        now: what it said of itself: `commands`, `processes`.
    """
    return SandboxInfo(
        sandbox_id=facts.sandbox_id,
        name=facts.name,
        status=status,
        driver=facts.driver,
        base=f"dir:{facts.base.path}" if facts.base.kind == "dir" else facts.base.kind,
        network=facts.network,
        limits=facts.limits,
        snapshot_id=facts.snapshot_id,
        created_at=facts.created_s,
        detached=facts.detached,
        fork_index=facts.fork_index,
        seed=facts.seed,
        layers=len(facts.layers),
        timeout_secs=facts.timeout_s,
        isolation=_isolation(facts),
        **now,
    )


def _isolation(facts: SandboxFacts) -> str:
    if facts.driver == "namespace":
        return "namespaces"
    from worldfork.sandbox.microvm.manifest import read_running

    try:
        return read_running(Path(facts.run)).isolation
    except WorldforkError:
        return "unknown"  # it rests, or has just ended
