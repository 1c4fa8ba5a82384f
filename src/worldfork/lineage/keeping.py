"""`SnapshotStore`: what a program does with snapshots besides restoring and forking them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, BinaryIO

from worldfork.core.errors import ConfigError
from worldfork.keeping.with_ids import with_ids, with_range
from worldfork.lineage.place import Place, place
from worldfork.lineage.snapshots import SnapshotInfo, snapshot_info
from worldfork.records.sandbox import DirectoryEntry
from worldfork.records.snapshot import FileChange, SnapshotRecord
from worldfork.store.failures import typed

if TYPE_CHECKING:
    from worldfork.content.entry import Entry
    from worldfork.exchange.departure import Exported
    from worldfork.exchange.exchange import PushReport
    from worldfork.keeping.family import Member
    from worldfork.keeping.findings import CheckReport
    from worldfork.keeping.prune import PruneReport
    from worldfork.keeping.usage import Usage
    from worldfork.store.store import Store

_NS = 1_000_000_000


class SnapshotStore:
    """The snapshots of this home: kept, looked into, moved elsewhere. Thread-safe; every call may wait for a disk.

    A program with an event loop calls it through `asyncio.to_thread`. Wherever a snapshot is asked for, its id or a
    name of it will do.
    """

    @property
    def _place(self) -> Place:
        return place()

    def find(self, snapshot: str) -> SnapshotInfo:
        """Return a snapshot.

        Raises:
            NotFound: there is none of this id or name.
        """
        return snapshot_info(self._place.store.snapshot(self._id(snapshot)))

    def list(self) -> Sequence[SnapshotInfo]:
        """Return all snapshots, oldest first."""
        return [snapshot_info(record) for record in self._place.store.snapshots()]

    def tag(self, snapshot: str, name: str) -> None:
        """Let a name stand for a snapshot from now on, also if it stood for another before. On disk when it returns."""
        self._place.store.set_name(name, self._id(snapshot))

    def untag(self, name: str) -> None:
        """Take a name away. One that is not there is fine."""
        self._place.store.set_name(name, None)

    def tags(self) -> dict[str, str]:
        """Return every name and the id of the snapshot that it stands for."""
        return self._place.store.names()

    def prune(
        self,
        *,
        keep_last: int | None = None,
        keep_within_s: float | None = None,
        keep_labels: Sequence[str] = (),
        keep_names: Sequence[str] | None = None,
        keep_ancestors: bool = False,
        dry_run: bool = False,
    ) -> PruneReport:
        """Delete the snapshots that no rule keeps and no living sandbox uses. Without a rule none is deleted.

        Args:
            keep_last: so many of those taken last.
            keep_within_s: those not older than so many seconds.
            keep_labels: those whose label matches a pattern.
            keep_names: those with a name that matches a pattern; by default all that have a name stay.
            keep_ancestors: the ancestors of those that stay, too.
            dry_run: change nothing, and tell what would be done.
        Raises:
            ConfigError: a rule makes no sense. StoreError: nothing was done.
        """
        from worldfork.keeping.keep_rules import KeepRules
        from worldfork.keeping.prune import prune

        names = None if keep_names is None else tuple(keep_names)
        rules = KeepRules(keep_last, keep_within_s, tuple(keep_labels), names, keep_ancestors)
        report = prune(self._place.store, rules, dry_run=dry_run)
        if not dry_run:
            self._place.upkeep.want()
        return report

    def check(self, *, read_data: bool = False) -> CheckReport:
        """Verify everything and change nothing; `report.sound` is the verdict.

        Args:
            read_data: read the content of all files too.
        """
        from worldfork.keeping.check import check

        return check(self._place.store, read_data)

    def usage(self) -> Usage:
        """Return what the snapshots take on disk, share, and could free."""
        from worldfork.keeping.usage import usage

        return usage(self._place.store, measure=True)

    def family(self) -> Sequence[Member]:
        """Return which snapshot came from which, in the order of the tree."""
        from worldfork.keeping.family import family

        return family(self._place.store)

    def digest(self, snapshot: str) -> str:
        """Return the digest of the whole state: the same for the same tree, however it came about. Slow once."""
        from worldfork.keeping.state import digest_of

        snapshot_id = self._id(snapshot)
        return with_ids(self._place.store, [snapshot_id], digest_of, snapshot_id)

    def read_file(self, snapshot: str, path: str) -> bytes:
        """Return a file's content without starting a sandbox; links are followed inside the snapshot.

        Raises:
            PathError: there is no such file. NotFound: no such snapshot.
        """
        from worldfork.keeping.browse import read_file

        snapshot_id = self._id(snapshot)
        return with_ids(self._place.store, [snapshot_id], read_file, snapshot_id, path)

    def list_directory(self, snapshot: str, path: str = "/") -> Sequence[DirectoryEntry]:
        """Return what is in a directory of a snapshot, without starting a sandbox.

        Raises:
            PathError: there is no such directory. NotFound: no such snapshot.
        """
        snapshot_id = self._id(snapshot)
        return with_ids(self._place.store, [snapshot_id], _listed, snapshot_id, path)

    def diff(self, old: str, new: str, path: str = "/", *, patches: bool = False) -> Sequence[FileChange]:
        """Return what was added, changed and removed from one snapshot to another.

        Args:
            old, new: which.
            path: only what lies there.
            patches: with unified diffs of text files.
        Raises:
            NotFound, ConfigError: a snapshot is not there, or the two cannot be compared. PathError: no such path.
        """
        pair = self._id(old), self._id(new)
        return with_ids(self._place.store, pair, _changed, *pair, path, patches)

    def export(self, snapshot: str, archive: BinaryIO) -> Exported:
        """Write a snapshot with all that it needs as one archive: the same bytes for the same stored snapshot."""
        from worldfork.exchange.departure import export_snapshot

        here, snapshot_id = self._place, self._id(snapshot)
        if not here.driver.ids:
            return export_snapshot(here.store, snapshot_id, archive)
        with typed("the archive cannot be kept"), NamedTemporaryFile(dir=here.home.tmp) as file:
            exported = with_range(here.store, _exported, snapshot_id, file.name)
            shutil.copyfileobj(file, archive)
        return exported

    def import_(self, archive: BinaryIO) -> SnapshotInfo:
        """Read an archive; its snapshot keeps its id, and is durable when this returns.

        Raises:
            Corrupt: the archive is damaged; nothing was stored.
        """
        from worldfork.exchange.arrival import import_snapshot

        here = self._place
        if not here.driver.ids:
            return snapshot_info(import_snapshot(here.store, archive, here.driver.form))
        with typed("the archive cannot be kept"), NamedTemporaryFile(dir=here.home.tmp) as file:
            shutil.copyfileobj(archive, file)
            file.flush()
            return snapshot_info(with_range(here.store, _imported, file.name, here.driver.form))

    def push(self, snapshots: Sequence[str], remote: str | None = None) -> PushReport:
        """Copy snapshots to a directory or `s3://bucket/prefix`: only layers that are not there yet."""
        from worldfork.exchange.exchange import push

        ids = [self._id(one) for one in snapshots]
        return with_ids(self._place.store, ids, push, ids, self._remote(remote))

    def pull(self, snapshot_ids: Sequence[str], remote: str | None = None) -> Sequence[SnapshotInfo]:
        """Copy snapshots from a remote: only layers that are not here yet. They are durable when this returns."""
        from worldfork.exchange.exchange import pull

        here = self._place
        wanted = list(snapshot_ids), self._remote(remote), here.driver.form
        records = with_range(here.store, pull, *wanted) if here.driver.ids else pull(here.store, *wanted)
        return [snapshot_info(record) for record in records]

    def _remote(self, remote: str | None) -> str:
        chosen = remote or self._place.settings.remote
        if not chosen:
            raise ConfigError("there is no remote to copy to or from", remedy="name one, or set WORLDFORK_REMOTE to it")
        return chosen

    def _id(self, snapshot: str) -> str:
        return self._place.store.id_of(snapshot)


def _exported(store: Store, snapshot_id: str, archive: str) -> Exported:
    from worldfork.exchange.departure import export_snapshot

    with open(archive, "wb") as target:
        return export_snapshot(store, snapshot_id, target)


def _imported(store: Store, archive: str, form: str) -> SnapshotRecord:
    from worldfork.exchange.arrival import import_snapshot

    with open(archive, "rb") as source:
        return import_snapshot(store, source, form)


def _listed(store: Store, snapshot_id: str, path: str) -> Sequence[DirectoryEntry]:
    from worldfork.keeping.browse import browsing

    with browsing(store, snapshot_id) as opened:
        return [_shown(entry) for entry in opened.list(path)]


def _changed(store: Store, old_id: str, new_id: str, path: str, patches: bool) -> Sequence[FileChange]:
    from worldfork.content.compare import patch
    from worldfork.keeping.browse import compared, comparing

    with comparing(store, old_id, new_id) as (before, after):
        return [
            FileChange(
                path="/" + change.path,
                change=change.how,
                what=change.what,
                old_kind=None if change.old is None else change.old.seen.kind,
                new_kind=None if change.new is None else change.new.seen.kind,
                old_bytes=change.old_bytes,
                new_bytes=change.new_bytes,
                patch=patch(before.view, after.view, change) if patches else None,
            )
            for change in compared(before, after, path)
        ]


def _shown(entry: Entry) -> DirectoryEntry:
    is_directory = entry.kind == "d"
    return DirectoryEntry(
        name=entry.path.rpartition("/")[2],
        is_dir=is_directory,
        size=None if is_directory else entry.size_bytes,
        modified_at=entry.mtime_ns / _NS,
        kind=entry.kind,
        mode=entry.mode,
        link_target=entry.target or None,
    )
