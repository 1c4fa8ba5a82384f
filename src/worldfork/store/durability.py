"""From ready to durable: the bytes first, then the word that they are there."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from worldfork.core.errors import NotFound, StoreError
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.snapshots import Snapshots
from worldfork.store.syscalls import syncfs


class Durability(Snapshots):
    """What makes snapshots survive a crash of the machine."""

    def make_durable(self, snapshot_id: str, sync_fds: Sequence[int] = ()) -> None:
        """Bring a snapshot and all its layers to disk, and only then say so. Slow; returns at once if it was done.

        Args:
            snapshot_id: a snapshot that is ready.
            sync_fds: descriptors on the file system of its layers, opened before anything was written to them. An
                error of a write-back is reported only to descriptors that were open when it happened.
        Raises:
            NotFound: there is no such snapshot, or it was deleted meanwhile.
            OutOfSpace, StoreError: the disk failed (`errno` EIO); the snapshot stays ready.
        """
        record = self.snapshot(snapshot_id)
        if record.state == "durable":
            return
        with self.database.read() as db:
            rows = db.execute(
                "SELECT layer_id FROM layers WHERE state = 'ready' AND layer_id IN (SELECT value FROM json_each(?))",
                (json.dumps(record.layers),),
            ).fetchall()
        layer_ids = [row[0] for row in rows]
        try:
            with typed(f"{snapshot_id} cannot be brought to disk"):
                self._sync(layer_ids, sync_fds)
        except StoreError:
            # Was it deleted meanwhile, and its layers collected? Then that is the error.
            self._expect_kept(snapshot_id)
            raise
        fault("make_durable:directories")
        with self.database.write() as db:
            # From here on a crash of the machine either forgets this word, or keeps it and the bytes.
            changed = db.execute(
                "UPDATE snapshots SET state = 'synced' WHERE snapshot_id = ? AND state != 'durable'", (snapshot_id,)
            ).rowcount
        if changed != 1:
            self._expect_kept(snapshot_id)
            return
        fault("make_durable:noted")
        self.database.sync_log()
        fault("make_durable:lasting")
        with self.database.write() as db:
            db.execute("UPDATE snapshots SET state = 'durable' WHERE snapshot_id = ?", (snapshot_id,))
            db.executemany(
                "UPDATE layers SET state = 'durable' WHERE layer_id = ? AND state = 'ready'",
                [(layer_id,) for layer_id in layer_ids],
            )
            fault("make_durable:said")
        fault("make_durable:committed")
        self.database.checkpoint()

    def _expect_kept(self, snapshot_id: str) -> None:
        try:
            self.snapshot(snapshot_id)
        except NotFound as error:
            raise NotFound(f"{snapshot_id} was deleted before it was durable", snapshot_id=snapshot_id) from error

    def _sync(self, layer_ids: Sequence[str], sync_fds: Sequence[int]) -> None:
        for fd in sync_fds:
            syncfs(fd)
        fault("make_durable:written")
        _sync_file_system(self.home.layers)
        fault("make_durable:synced")
        for layer_id in layer_ids:
            _sync_directory(self.home.layers / layer_id)
        _sync_directory(self.home.layers)

    def pending_durability(self) -> list[str]:
        """Return the ready snapshots that are this process's to make durable: its own and those of dead owners.

        Raises:
            StoreError: the metadata or the locks failed.
        """
        with self.database.read() as db:
            rows = db.execute(
                "SELECT snapshot_id, owner_id FROM snapshots WHERE state != 'durable' ORDER BY created_s, number"
            ).fetchall()
        mine = self.owner_id
        others = {owner for _, owner in rows if owner != mine}
        living = {owner for owner in others if self.is_alive(owner)}
        return [snapshot_id for snapshot_id, owner in rows if owner not in living]


def _sync_file_system(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        syncfs(fd)
    finally:
        os.close(fd)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
