"""States at the end of rollouts, which nobody needs once they are read, and what dead processes left of them."""

from __future__ import annotations

import contextlib
import weakref

from worldfork.core.errors import WorldforkError
from worldfork.lineage.place import Place, place

_LABEL = "end of a rollout of "
_swept: weakref.WeakSet[Place] = weakref.WeakSet()


def end_label() -> str:
    """Return the label of a state that is for throwing away: it says whose it is."""
    return f"{_LABEL}{place().store.owner_id}"


async def sweep_once(here: Place) -> None:
    """Do as `sweep_ends`, the first time that this process asks for a place."""
    if here not in _swept:
        _swept.add(here)
        await here.work(lambda: sweep_ends(here))


def sweep_ends(here: Place) -> int:
    """Delete the ends of rollouts whose process died before it did so, and return how many. Blocking."""
    gone = 0
    for record in here.store.snapshots():
        label = record.label or ""
        if record.level != "volatile" or not label.startswith(_LABEL):
            continue
        with contextlib.suppress(WorldforkError):
            if not here.store.is_alive(label.removeprefix(_LABEL)):
                here.store.delete_snapshot(record.snapshot_id)
                gone += 1
    if gone:
        here.store.collect()
        here.tidy_soon()
    return gone
