"""Collection: layers that nothing uses any more go, in two phases.

First they are condemned, which must be on disk before any file is touched: a crash of the machine could otherwise
bring a deleted snapshot back without its files. Then, a few at a time, each is moved to the trash and forgotten in one
transaction, if it is still condemned: whoever claimed it in between has made it ready again. So a collector that
stops for long between two steps finds out, when it goes on, what was reused meanwhile.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from worldfork.core.errors import Corrupt, StoreError, WorldforkError
from worldfork.store.faultpoints import fault
from worldfork.store.owner import frees_space
from worldfork.store.sweep import Sweeping

_CONDEMNED_AT_ONCE = 500
"""Layers marked in one transaction, which takes about 10 ms and a wait for the disk."""
_YOUNG_S = 60.0
"""Seconds that a new merge stays although nothing uses it, while whoever made it is alive."""
_BATCH = 16
"""Layers moved in one transaction, about 20 us each: a fork waits for it."""


@dataclass
class CollectReport:
    """What a collection has removed."""

    layers: list[str] = field(default_factory=list)
    """Ids of the layers that are gone."""
    memories: list[str] = field(default_factory=list)
    """Directories of memory that are gone with their snapshots."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """What could not be removed, and why; the next collection tries again."""


class Collecting(Sweeping):
    """How a store forgets layers. Any number of processes may collect at once."""

    @frees_space
    def collect(self) -> CollectReport:
        """Remove the layers that no snapshot and no holder uses. Safe beside writers, and to be killed at any instant.

        Raises:
            Corrupt: a snapshot lists a layer that is not there: then nothing is removed, for what else is wrong?
            StoreError: the metadata failed; what was condemned goes with the next collection.
        """
        report = CollectReport()
        condemned = self._condemn()
        for start in range(0, len(condemned), _BATCH):
            self._remove(condemned[start : start + _BATCH], report)
            fault("collect:moved")
        report.memories, failures = self._clear_memories()
        report.failures += failures + self._empty_trash()
        try:
            self.database.checkpoint()
        except WorldforkError as error:
            report.failures.append(("checkpoint", str(error)))
        return report

    def _remove(self, layer_ids: Sequence[str], report: CollectReport) -> None:
        gone = []
        with self.database.write() as db:
            for layer_id in layer_ids:
                found = db.execute("SELECT state FROM layers WHERE layer_id = ?", (layer_id,)).fetchone()
                if found is None or found[0] != "condemned":
                    continue
                try:
                    self._discard(db, layer_id)
                except StoreError as error:
                    report.failures.append((layer_id, str(error)))
                else:
                    gone.append(layer_id)
            fault("collect:forgotten")
        report.layers += gone

    def unused_layers(self) -> set[str]:
        """Return the settled layers that no snapshot and no holder uses now.

        Raises:
            Corrupt: as `collect`.
        """
        return self._look()[0]

    def _condemn(self) -> list[str]:
        found, seen, rewrites = self._look()
        fault("collect:looked")
        unused = sorted(found)
        for start in range(0, len(unused), _CONDEMNED_AT_ONCE):
            some = set(unused[start : start + _CONDEMNED_AT_ONCE])
            with self.database.write_lasting() as db:
                if _rewrites(db) != rewrites:
                    # Old snapshots stand on other layers now: look once more, while nobody can change that.
                    some &= _unused(db)
                # What has been published or held since then; the rest could only have lost users.
                some -= _used(db, after=seen)
                db.executemany(
                    "UPDATE layers SET state = 'condemned' WHERE layer_id = ? AND state IN ('ready', 'durable')",
                    [(layer_id,) for layer_id in sorted(some)],
                )
                fault("collect:condemned")
            fault("collect:committed")
        with self.database.read() as db:
            rows = db.execute("SELECT layer_id FROM layers WHERE state = 'condemned' ORDER BY layer_id").fetchall()
        return [row[0] for row in rows]

    def _look(self) -> tuple[set[str], int, int]:
        """Return the layers without a user, the number of the last snapshot looked at, and of rewrites until then.

        Reads one moment of the metadata while writers go on.
        """
        with self.database.view() as db:
            seen = int(db.execute("SELECT ifnull(max(number), 0) FROM snapshots").fetchone()[0])
            return _unused(db) - self._just_merged(db), seen, _rewrites(db)

    def _just_merged(self, db: sqlite3.Connection) -> set[str]:
        """Return the merges that whoever made them is about to stand on."""
        since_s = self._clock.monotonic_s() - _YOUNG_S
        rows = db.execute(
            "SELECT layer_id, owner_id FROM layers WHERE covers IS NOT NULL AND state = 'ready' AND renewed_s > ?",
            (since_s,),
        ).fetchall()
        return {layer_id for layer_id, owner_id in rows if self.is_alive(owner_id)}


def _rewrites(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT value FROM counters WHERE name = 'rewrites'").fetchone()
    return 0 if row is None else int(row[0])


def _unused(db: sqlite3.Connection) -> set[str]:
    settled: set[str] = set()
    others: set[str] = set()
    for layer_id, state in db.execute("SELECT layer_id, state FROM layers"):
        (settled if state in ("ready", "durable") else others).add(layer_id)
    needed = set(_of_snapshots(db, 0))
    holes = sorted(needed - settled)
    if holes:
        state = "about to go" if holes[0] in others else "not there"
        raise Corrupt(
            f"a snapshot stands on the layer {holes[0]}, which is {state}; nothing was collected",
            remedy="run `worldfork store check`",
            expected=holes,
            actual=state,
        )
    return settled - needed - _of_holders(db)


def _used(db: sqlite3.Connection, *, after: int) -> set[str]:
    """Return the layers of all holders, and of the snapshots with a number beyond `after`."""
    return _of_holders(db) | set(_of_snapshots(db, after))


def _of_holders(db: sqlite3.Connection) -> set[str]:
    return {row[0] for row in db.execute("SELECT DISTINCT value FROM holders, json_each(holders.layers)")}


def _of_snapshots(db: sqlite3.Connection, after: int) -> Iterator[str]:
    """Yield the layers of the snapshots with a number beyond `after`, those of equal stacks once."""
    rows = db.execute("SELECT DISTINCT json_extract(record, '$.layers') FROM snapshots WHERE number > ?", (after,))
    for (text,) in rows:
        yield from json.loads(text or "[]")
