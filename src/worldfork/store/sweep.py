"""What the dead left behind, and what nothing uses any more."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from worldfork.core.errors import Locked, StoreError, WorldforkError
from worldfork.store import locks
from worldfork.store.durability import Durability
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.leases import GRACE_S, READING, Holder

_PATIENCE_S = 10.0
"""How long a sweep waits for that of another process."""
_ELSEWHEN = "boot_id NOT IN (SELECT value FROM json_each(:boots))"
"""Of another boot of the machine than this."""
_TORN = f"state = 'ready' AND {_ELSEWHEN}"
_USED = (
    "layer_id IN (SELECT value FROM snapshots, json_each(CASE WHEN json_valid(record) THEN record ELSE '{}' END,"
    " '$.layers'))"
)


@dataclass
class SweepReport:
    """What a sweep has found. Empty lists throughout mean that nothing was left behind."""

    lost_snapshots: list[str] = field(default_factory=list)
    """Snapshots that were ready, but not durable, when the machine went down."""
    drafts: list[str] = field(default_factory=list)
    """Layers that dead owners were making."""
    holders: list[str] = field(default_factory=list)
    """Dead holders."""
    leftovers: list[str] = field(default_factory=list)
    """Names of stray directories of layers and memory, lock files, temporary files and trash."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """What could not be cleared, and why; the next sweep tries again."""


class Sweeping(Durability):
    """How a store cleans up. One process at a time does it; all others go on."""

    def recover(self) -> list[str]:
        """Drop the snapshots that a crash of the machine may have torn; return their ids. Cheap.

        Those whose bytes had reached the disk become durable. Layers that may be torn are condemned, so that nobody
        who looks for one of their ids or of their content takes them to be there.

        Raises:
            StoreError: the metadata failed; nothing was dropped.
        """
        condition = f"state != 'durable' AND {_ELSEWHEN}"
        boots = {"boots": json.dumps(sorted(self._present_boots()))}
        with self.database.read() as db:
            pending = db.execute(f"SELECT 1 FROM snapshots WHERE {condition}", boots).fetchone()
            if not pending and not db.execute(f"SELECT 1 FROM layers WHERE {_TORN}", boots).fetchone():
                return []
        with self.database.write_lasting() as db:
            db.execute(
                "UPDATE layers SET state = 'durable' WHERE state = 'ready' AND layer_id IN (SELECT value"
                f" FROM snapshots s, json_each(s.record, '$.layers') WHERE s.state = 'synced' AND s.{_ELSEWHEN})",
                boots,
            )
            db.execute(f"UPDATE snapshots SET state = 'durable' WHERE {condition} AND state = 'synced'", boots)
            query = f"SELECT snapshot_id FROM snapshots WHERE {condition} ORDER BY number"
            lost = [row[0] for row in db.execute(query, boots).fetchall()]
            db.execute(f"DELETE FROM snapshots WHERE {condition}", boots)
            db.execute(f"UPDATE layers SET state = 'condemned' WHERE {_TORN} AND NOT {_USED}", boots)
            fault("recover:written")
        fault("recover:committed")
        return lost

    def _present_boots(self) -> set[str]:
        """Return the boot ids that stand for this boot: ours, and those of owners who are alive.

        A container may have been given a boot id of its own.
        """
        boots = {"boots": json.dumps([self.boot_id])}
        unsettled = f"SELECT boot_id, owner_id FROM {{}} WHERE state != 'durable' AND {_ELSEWHEN}"
        with self.database.read() as db:
            rows = {row for table in ("layers", "snapshots") for row in db.execute(unsettled.format(table), boots)}
        return {self.boot_id, *(boot for boot, owner_id in rows if self.is_alive(owner_id))}

    def sweep(self, *, dead: Callable[[Holder], None] | None = None, grace_s: float = GRACE_S) -> SweepReport:
        """Clear what dead owners and holders left; one failure never stops the rest.

        Args:
            dead: called for each dead holder before it is forgotten, outside of any transaction, to clear what the
                store knows nothing of. If it raises, the holder stays for the next sweep.
            grace_s: for so many seconds a new holder counts as alive while its maker is.
        Raises:
            Locked: another process has been sweeping for a while, and clears the same.
            StoreError: the sweep could not begin.
        """
        report = SweepReport()
        with self.single_flight("sweep", wait_s=min(_PATIENCE_S, self.ttl_s)):
            report.lost_snapshots = self.recover()
            steps: list[Callable[[], None]] = [
                lambda: self._sweep_holders(report, dead, grace_s),
                lambda: self._sweep_drafts(report, grace_s),
                lambda: self._sweep_stray_layers(report),
                lambda: self._sweep_memories(report),
                lambda: self._sweep_tmp(report),
                lambda: self._sweep_locks(report),
                lambda: self._sweep_trash(report),
                self.database.checkpoint,
            ]
            for step in steps:
                try:
                    step()
                except WorldforkError as error:
                    report.failures.append(("sweep", str(error)))
        return report

    def sweep_lost(self) -> SweepReport:
        """Clear what owners who died or stood still were reading and making, and nothing of sandboxes.

        For those who cannot clear up after a sandbox. One failure never stops the rest.

        Raises:
            Locked: as `sweep`. StoreError: it could not begin.
        """
        report = SweepReport()
        with self.single_flight("sweep", wait_s=min(_PATIENCE_S, self.ttl_s)):
            for holder in self.holders():
                if holder.kind == READING and not self.is_living(holder):
                    self.release([holder.holder_id])
                    report.holders.append(holder.holder_id)
            self._sweep_drafts(report, GRACE_S)
        return report

    def _sweep_holders(self, report: SweepReport, dead: Callable[[Holder], None] | None, grace_s: float) -> None:
        for holder in self.holders():
            try:
                if self.is_living(holder, grace_s=grace_s):
                    continue
                self._clear_holder(holder, dead)
                report.holders.append(holder.holder_id)
            except Exception as error:
                report.failures.append((holder.holder_id, str(error) or type(error).__name__))

    def _clear_holder(self, holder: Holder, dead: Callable[[Holder], None] | None) -> None:
        # With its lock in our hands it cannot come alive after all, and find everything gone.
        with typed(f"the lock of {holder.holder_id} cannot be taken"):
            lock = locks.take(self.lock_path(holder.holder_id))
        if lock is None:
            raise Locked(f"{holder.holder_id} has come alive", holders=[holder.holder_id])
        try:
            if self.is_vouched(holder.holder_id):
                return  # somebody has come to see to what it leaves
            if dead is not None and holder.kind != READING:
                dead(holder)
            fault("sweep:holder_cleared")
            self.release([holder.holder_id])
        finally:
            with typed(f"the lock of {holder.holder_id} cannot be removed"):
                lock.release()

    def _sweep_drafts(self, report: SweepReport, grace_s: float) -> None:
        with self.database.read() as db:
            rows = db.execute("SELECT layer_id, owner_id, renewed_s FROM layers WHERE state = 'building'").fetchall()
        if not rows:
            return
        # A detached sandbox whose maker died in the middle of a checkpoint still writes to such a layer.
        used = {
            layer for holder in self.holders() if self.is_living(holder, grace_s=grace_s) for layer in holder.layers
        }
        for layer_id, owner_id, renewed_s in rows:
            try:
                if layer_id in used or self.is_going(owner_id, renewed_s):
                    continue
                self.abandon_layer(layer_id, owner_id=owner_id)
                report.drafts.append(layer_id)
            except WorldforkError as error:
                report.failures.append((layer_id, str(error)))

    def _sweep_stray_layers(self, report: SweepReport) -> None:
        # In this order: a layer's row is there before its directory is.
        with typed("the layers cannot be listed"):
            names = os.listdir(self.home.layers)
        with self.database.read() as db:
            known = {row[0] for row in db.execute("SELECT layer_id FROM layers")}
        for name in sorted(set(names) - known):
            self._clear_stray_layer(report, name)

    def _clear_stray_layer(self, report: SweepReport, name: str) -> None:
        """Move a directory without a row away, unless it has come to have one: ids of imports come from elsewhere."""
        try:
            with self.database.write() as db:
                if db.execute("SELECT 1 FROM layers WHERE layer_id = ?", (name,)).fetchone():
                    return
                moved = self._move_to_trash(self.home.layers / name)
        except WorldforkError as error:
            report.failures.append((f"layers/{name}", str(error)))
        else:
            if moved:
                report.leftovers.append(f"layers/{name}")

    def _sweep_memories(self, report: SweepReport) -> None:
        removed, failures = self._clear_memories()
        report.leftovers += removed
        report.failures += failures

    def _sweep_tmp(self, report: SweepReport) -> None:
        with typed("the temporary files cannot be listed"):
            names = os.listdir(self.home.tmp.parent)
        for name in sorted(set(names) - self._present_boots()):
            self._clear(report, self.home.tmp.parent / name)

    def _sweep_locks(self, report: SweepReport) -> None:
        # In this order: a holder's row is there before its lock file is.
        with typed("the locks cannot be listed"):
            names = os.listdir(self.home.locks)
        known = {holder.holder_id for holder in self.holders()}
        for name in sorted(set(names) - known):
            try:
                with typed(f"the lock {name} cannot be removed"):
                    if locks.remove_if_free(self.home.locks / name):
                        report.leftovers.append(f"locks/{name}")
            except StoreError as error:
                report.failures.append((name, str(error)))

    def _sweep_trash(self, report: SweepReport) -> None:
        with typed("the trash cannot be listed"):
            names = os.listdir(self.home.trash)
        failures = self._empty_trash()
        report.failures += failures
        failed = {os.path.basename(path) for path, _ in failures}
        report.leftovers += [f"trash/{name}" for name in sorted(names) if name not in failed]

    def _clear(self, report: SweepReport, path: Path) -> None:
        name = f"{path.parent.name}/{path.name}"
        try:
            self.trash(path)
            report.leftovers.append(name)
        except WorldforkError as error:
            report.failures.append((name, str(error)))
