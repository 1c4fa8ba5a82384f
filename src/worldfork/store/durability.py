"""From ready to durable: the bytes first, then the word that they are there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from worldfork.core.errors import NotFound, StoreError, WorldforkError
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.snapshots import Snapshots
from worldfork.store.syscalls import sync_directory, syncfs


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
        error = self.make_all_durable([snapshot_id], sync_fds).get(snapshot_id)
        if error is not None:
            raise error

    def make_all_durable(self, snapshot_ids: Iterable[str], sync_fds: Sequence[int] = ()) -> dict[str, WorldforkError]:
        """Bring many snapshots to disk with one synchronisation; return the errors of those that are not.

        Args: as of `make_durable`.
        """
        errors: dict[str, WorldforkError] = {}
        waiting: dict[str, tuple[str, ...]] = {}
        for snapshot_id in dict.fromkeys(snapshot_ids):
            try:
                record = self.snapshot(snapshot_id)
                if record.state != "durable":
                    waiting[snapshot_id] = record.layers
            except WorldforkError as error:
                errors[snapshot_id] = error
        if not waiting:
            return errors
        try:
            self._bring_to_disk(waiting, sync_fds, errors)
        except WorldforkError as error:
            errors.update({snapshot_id: self._reason(snapshot_id, error) for snapshot_id in waiting})
        return errors

    @contextmanager
    def watching_disk(self) -> Iterator[int]:
        """Give a descriptor for `sync_fds`: what fails to reach the disk from here on is reported to it.

        Raises:
            OutOfSpace, StoreError: it cannot be opened.
        """
        with typed("the layers cannot be opened"):
            fd = os.open(self.home.layers, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def make_layers_durable(self, layer_ids: Sequence[str], sync_fds: Sequence[int] = ()) -> None:
        """Bring layers that no snapshot uses yet to disk, and say so. Hold them meanwhile.

        Args:
            layer_ids: which.
            sync_fds: as of `make_durable`.
        Raises:
            NotFound: one is gone. OutOfSpace, StoreError: the disk failed.
        """
        unsettled = self._unsettled(layer_ids)
        with typed("layers cannot be brought to disk"):
            self._sync(sync_fds)
            for layer_id in unsettled:
                self._sync_layer(layer_id)
            sync_directory(self.home.layers)
        fault("make_layers_durable:synced")
        with self.database.write_lasting() as db:
            for layer_id in unsettled:
                changed = db.execute(
                    "UPDATE layers SET state = 'durable' WHERE layer_id = ? AND state IN ('ready', 'durable')",
                    (layer_id,),
                ).rowcount
                if changed != 1:
                    raise NotFound(f"there is no layer {layer_id}", layer_id=layer_id)
        fault("make_layers_durable:committed")

    def _bring_to_disk(
        self, waiting: dict[str, tuple[str, ...]], sync_fds: Sequence[int], errors: dict[str, WorldforkError]
    ) -> None:
        """Do it; takes from `waiting` whatever turns out to have failed alone."""
        layer_ids = self._unsettled({layer_id for layers in waiting.values() for layer_id in layers})
        with typed("the layers cannot be brought to disk"):
            self._sync(sync_fds)
        lost = set()
        for layer_id in layer_ids:
            try:
                with typed(f"the layer {layer_id} cannot be brought to disk"):
                    self._sync_layer(layer_id)
            except StoreError as error:
                lost.add(layer_id)
                for snapshot_id in [one for one, layers in waiting.items() if layer_id in layers]:
                    del waiting[snapshot_id]
                    errors[snapshot_id] = self._reason(snapshot_id, error)
        for snapshot_id in list(waiting):
            try:
                self._sync_memory(snapshot_id)
            except WorldforkError as error:
                del waiting[snapshot_id]
                errors[snapshot_id] = self._reason(snapshot_id, error)
        with typed("the layers cannot be brought to disk"):
            sync_directory(self.home.layers)
        fault("make_durable:directories")
        with self.database.write() as db:
            # From here on a crash of the machine either forgets this word, or keeps it and the bytes.
            gone = [
                snapshot_id
                for snapshot_id in waiting
                if db.execute(
                    "UPDATE snapshots SET state = 'synced' WHERE snapshot_id = ? AND state != 'durable'",
                    (snapshot_id,),
                ).rowcount
                != 1
            ]
        fault("make_durable:noted")
        self.database.sync_log()
        fault("make_durable:lasting")
        for snapshot_id in gone:
            del waiting[snapshot_id]
            try:
                self._expect_kept(snapshot_id)
            except NotFound as error:
                errors[snapshot_id] = error
        self._say(waiting, [layer_id for layer_id in layer_ids if layer_id not in lost])

    def _say(self, snapshot_ids: Iterable[str], layer_ids: Sequence[str]) -> None:
        with self.database.write() as db:
            db.executemany(
                "UPDATE snapshots SET state = 'durable' WHERE snapshot_id = ?", [(one,) for one in snapshot_ids]
            )
            db.executemany(
                "UPDATE layers SET state = 'durable' WHERE layer_id = ? AND state = 'ready'",
                [(layer_id,) for layer_id in layer_ids],
            )
            fault("make_durable:said")
        fault("make_durable:committed")
        self.database.checkpoint()

    def _unsettled(self, layer_ids: Iterable[str]) -> list[str]:
        with self.database.read() as db:
            rows = db.execute(
                "SELECT layer_id FROM layers WHERE state = 'ready' AND layer_id IN (SELECT value FROM json_each(?))",
                (json.dumps(list(layer_ids)),),
            ).fetchall()
        return [row[0] for row in rows]

    def _reason(self, snapshot_id: str, error: WorldforkError) -> WorldforkError:
        """Return why a snapshot could not be brought to disk: if it was deleted meanwhile, then that."""
        try:
            self._expect_kept(snapshot_id)
        except NotFound as gone:
            return gone
        except WorldforkError:
            pass
        return error

    def _expect_kept(self, snapshot_id: str) -> None:
        try:
            self.snapshot(snapshot_id)
        except NotFound as error:
            raise NotFound(f"{snapshot_id} was deleted before it was durable", snapshot_id=snapshot_id) from error

    def _sync(self, sync_fds: Sequence[int]) -> None:
        for fd in sync_fds:
            syncfs(fd)
        fault("make_durable:written")
        sync_directory(self.home.layers, syncfs)
        fault("make_durable:synced")

    def _sync_layer(self, layer_id: str) -> None:
        sync_directory(self.home.layers / layer_id)

    def pending_durability(self) -> list[str]:
        """Return the ready snapshots that are this process's to make durable.

        Its own, those of dead owners, and those of owners who have stood still since: being made durable twice harms
        nothing. Throw-away snapshots never are.

        Raises:
            StoreError: the metadata or the locks failed.
        """
        with self.database.read() as db:
            # The owner said last that it goes on when these layers were drafts of its own; of one that added none
            # nobody can tell.
            rows = db.execute(
                "SELECT snapshot_id, owner_id, (SELECT ifnull(max(renewed_s), 0) FROM layers, json_each(record,"
                " '$.layers') WHERE layer_id = value AND layers.state = 'ready') FROM snapshots"
                " WHERE state != 'durable' AND level != 'volatile' ORDER BY created_s, number"
            ).fetchall()
        mine = self.owner_id
        others = {row[1:] for row in rows if row[1] != mine}
        going = {other for other in others if self.is_going(*other)}
        return [snapshot_id for snapshot_id, *owner in rows if tuple(owner) not in going]

    def pending_export(self) -> list[str]:
        """Return the durable snapshots of level `exported` that nobody has pushed yet, the oldest first."""
        with self.database.read() as db:
            rows = db.execute(
                "SELECT snapshot_id FROM snapshots WHERE level = 'exported' AND exported IS NULL"
                " AND state = 'durable' ORDER BY number"
            ).fetchall()
        return [row[0] for row in rows]
