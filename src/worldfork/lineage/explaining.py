"""What a checkpoint of a live sandbox would take now, of either kind, so that one is chosen knowingly."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from worldfork.core import mapped
from worldfork.lineage.live import Live
from worldfork.lineage.measuring import tree_bytes
from worldfork.lineage.starting import ground_of

_COPIED_BYTES_PER_S = 250e6
"""Measured where the disk's file system cannot share blocks between files; where it can the copy takes less."""


@dataclass(frozen=True)
class CheckpointCosts:
    """Estimates; what a checkpoint took is told by its snapshot."""

    driver: str
    filesystem_bytes: int
    """What the disk has changed since the sandbox started, or since its last checkpoint where that took it along."""
    filesystem_pause_s: float | None
    """How long what runs would stand still at most; None where nothing has to: nothing runs, or all is only moved."""
    memory_bytes: int | None
    """What a memory snapshot would add to the store; None where the driver saves no memory, as are those below."""
    memory_shared_bytes: int | None
    """What of it lies there already: of the snapshot that the sandbox started from, or of its machine's template."""
    memory_pause_s: float | None
    """How long everything would stand still for it."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


async def explain(live: Live) -> CheckpointCosts:
    """Return what checkpoints of a sandbox would take; it goes on meanwhile.

    Raises:
        SandboxDied: it is gone. SandboxError: it gave no answer.
    """
    told = await (await live.connection()).info()
    runs = bool(told.running_commands or told.processes)
    place, facts = live.place, live.facts
    if place.disk_on_host(facts):
        upper = ground_of(place, facts).upper
        size_bytes = await place.work(lambda: mapped.run(tree_bytes, upper) if facts.ids else tree_bytes(upper))
        # Beside processes the difference is copied while they stand still; without any it is moved.
        pause_s = size_bytes / _COPIED_BYTES_PER_S if runs else None
        return CheckpointCosts(facts.driver, size_bytes, pause_s, None, None, None)
    found = await place.machines(facts.driver).costs(facts)
    return CheckpointCosts(
        driver=facts.driver,
        filesystem_bytes=found.filesystem_bytes,
        filesystem_pause_s=found.filesystem_s if runs else None,
        memory_bytes=found.memory_bytes,
        memory_shared_bytes=found.shared_bytes,
        memory_pause_s=found.pause_s,
    )
