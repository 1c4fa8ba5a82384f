"""Memory of snapshots: directories of files that nobody changes, each made whole and then put in its place."""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from worldfork.content.hashing import hash_file
from worldfork.core.errors import NotFound, StoreError, WorldforkError
from worldfork.core.ids import check_id, is_id
from worldfork.core.recent import Recent
from worldfork.core.remove import remove_tree
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.readings import Readings
from worldfork.store.syscalls import sync_directory

DIGESTS = "digests.json"
"""In a memory directory: size and content hash of each file, written when it is brought to disk."""
_DRAFT, _GONE = ".new-", ".gone-"
_BLOCK_BYTES = 512  # the unit of st_blocks
_digests: Recent[list[Any]] = Recent(1024)
"""By file; each counts as one."""


class MemorySizes(NamedTuple):
    """What memory takes on disk."""

    kept: dict[str, int]
    """Of each snapshot that has any, by its id."""
    stray_bytes: int
    """Of what no snapshot has."""

    @property
    def kept_bytes(self) -> int:
        """Of all snapshots together."""
        return sum(self.kept.values())


class MemoryFile(NamedTuple):
    """A file of a memory; others may have it too."""

    inode: int
    links: int
    stored_bytes: int


def going_bytes(memories: Iterable[Iterable[MemoryFile]]) -> int:
    """Return what is free on disk once these memories are gone: files that somebody else has stay."""
    files = [file for memory in memories for file in memory]
    going = Counter(file.inode for file in files)
    return sum({file.inode: file.stored_bytes for file in files if going[file.inode] == file.links}.values())


class Memories(Readings):
    """The memory directories of a store, one for each snapshot that has memory."""

    def memory_path(self, snapshot_id: str) -> Path:
        """Return where the memory of a snapshot lies. Looks at nothing: hold the snapshot to be sure of it."""
        return self.home.memory / check_id("sn", snapshot_id)

    def begin_memory(self, snapshot_id: str) -> Path:
        """Return where the memory of a snapshot to be published is to be made; the directory does not exist yet.

        What this process leaves there when it dies is removed by the next sweep.

        Raises:
            OutOfSpace, StoreError: the lock of this process cannot be made.
        """
        return self.home.memory / f"{_DRAFT}{check_id('sn', snapshot_id)}-{self.owner_id}"

    def abandon_memory(self, snapshot_id: str) -> None:
        """Remove what was made for a snapshot that is not published after all. Idempotent.

        Raises:
            StoreError: the disk or the metadata failed.
        """
        self._remove_memory(self.begin_memory(snapshot_id))
        with self.database.write() as db:
            moved = None if _is_known(db, snapshot_id) else self._move_memory(self.memory_path(snapshot_id))
        if moved is not None:
            with typed(f"{moved} cannot be removed"):
                remove_tree(moved)

    def _place_memory(self, snapshot_id: str) -> None:
        """Put what was made in its place, within the transaction that publishes its snapshot."""
        with typed(f"the memory of {snapshot_id} cannot be put in its place"):
            try:
                os.rename(self.begin_memory(snapshot_id), self.memory_path(snapshot_id))
            except FileNotFoundError as error:
                raise NotFound(f"the memory of {snapshot_id} was not made", snapshot_id=snapshot_id) from error

    def _sync_memory(self, snapshot_id: str) -> None:
        """Bring the memory of a snapshot to disk, if it has any, with the digests of its files."""
        directory = self.memory_path(snapshot_id)
        with typed(f"the memory of {snapshot_id} cannot be brought to disk"):
            if not directory.is_dir():
                return
            if not (directory / DIGESTS).exists():
                self._note_digests(directory)
                fault("make_durable:digests")
            for path in _files_of(directory):
                _sync_file(path)
            sync_directory(directory)
            sync_directory(self.home.memory)
        fault("make_durable:memory")

    def _note_digests(self, directory: Path) -> None:
        found = {path.name: _known_digest(path) for path in _files_of(directory)}
        draft = directory / f"{DIGESTS}.new"
        draft.write_text(json.dumps(found), encoding="utf-8")
        _sync_file(draft)
        draft.replace(directory / DIGESTS)

    def memory_digests(self, snapshot_id: str) -> dict[str, Any] | None:
        """Return size and content hash of each file as they were when it was brought to disk; None before that.

        Raises:
            NotFound: there is no such directory. StoreError: it cannot be read, or is not what was written there.
        """
        directory = self.memory_path(snapshot_id)
        with typed(f"the memory of {snapshot_id} cannot be read"):
            try:
                return _checked(json.loads((directory / DIGESTS).read_text(encoding="utf-8")))
            except FileNotFoundError:
                if directory.is_dir():
                    return None
                raise NotFound(
                    f"the memory of {snapshot_id} is gone from {directory}", snapshot_id=snapshot_id
                ) from None
            except (ValueError, TypeError) as error:
                raise StoreError(f"{directory / DIGESTS} cannot be read: {error}") from error

    def memory_bytes(self) -> MemorySizes:
        """Return what memory takes on disk; files that several have are counted for the oldest snapshot alone.

        Raises:
            StoreError: the directories cannot be listed, or the metadata failed.
        """
        strays = self.stray_memories()
        with self.database.read() as db:
            rows = db.execute(
                'SELECT snapshot_id FROM snapshots WHERE instr(record, \'"kind":"memory"\') > 0 ORDER BY number'
            ).fetchall()
        seen: set[int] = set()
        with typed("the memory of snapshots cannot be listed"):
            kept = {snapshot_id: _stored_bytes(self.memory_path(snapshot_id), seen) for (snapshot_id,) in rows}
            return MemorySizes(kept, sum(_stored_bytes(path, seen) for path in strays))

    def memory_files(self, snapshot_ids: Iterable[str]) -> dict[str, list[MemoryFile]]:
        """Return the files of those of these snapshots that have memory."""
        with typed("the memory of snapshots cannot be listed"):
            found = {one: list(_looks(self.memory_path(one))) for one in snapshot_ids}
        return {snapshot_id: files for snapshot_id, files in found.items() if files}

    def stray_memories(self) -> list[Path]:
        """Return the directories that no snapshot has, and that nobody alive is making.

        Raises:
            StoreError: they cannot be listed, or the metadata failed.
        """
        with typed("the memory of snapshots cannot be listed"):
            names = os.listdir(self.home.memory)
        with self.database.read() as db:
            return [self.home.memory / name for name in sorted(names) if self._is_stray(db, name)]

    def _is_stray(self, db: sqlite3.Connection, name: str) -> bool:
        if name.startswith(_DRAFT):
            return not self.is_alive(_maker_of(name))
        return name.startswith(_GONE) or (is_id("sn", name) and not _is_known(db, name))

    def _clear_memories(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Remove what `stray_memories` finds; return the names, and what could not be removed and why."""
        removed, failures = [], []
        strays = self.stray_memories()
        if strays:
            # A crash of the machine must not bring a deleted snapshot back, without its memory.
            self.database.sync_log()
            fault("collect:memory_deleted")
        for path in strays:
            try:
                # Within a transaction, for it is published in one: without a row it has no use then.
                with self.database.write() as db:
                    moved = self._move_memory(path) if self._is_stray(db, path.name) else None
                if moved is not None:
                    with typed(f"{moved} cannot be removed"):
                        remove_tree(moved)
                    removed.append(f"memory/{path.name}")
            except WorldforkError as error:
                failures.append((f"memory/{path.name}", str(error)))
        return removed, failures

    def _remove_memory(self, path: Path) -> None:
        moved = self._move_memory(path)
        if moved is not None:
            with typed(f"{moved} cannot be removed"):
                remove_tree(moved)

    def _move_memory(self, path: Path) -> Path | None:
        """Move a directory out of sight; return where to, or None where there is none.

        Not to the trash, which may lie on another file system.
        """
        if path.name.startswith(_GONE):
            return path
        with typed(f"{path} cannot be moved away"):
            moved = path.with_name(f"{_GONE}{token_hex(8)}")
            try:
                os.rename(path, moved)
            except FileNotFoundError:
                return None
        return moved


def _checked(found: Any) -> dict[str, Any]:
    """Return the digests of files, if these words are that."""
    digests = dict(found)
    for name, (size_bytes, digest) in digests.items():
        if "/" in name or not isinstance(size_bytes, int) or not isinstance(digest, str):
            raise ValueError(f"{name!r} has no size and digest")
    return digests


def file_digest(path: Path) -> list[Any]:
    """Return the size and the content hash of a file.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        sparse = info.st_blocks * _BLOCK_BYTES < info.st_size
        return [info.st_size, hash_file(fd, info.st_size, sparse)]
    finally:
        os.close(fd)


def _known_digest(path: Path) -> list[Any]:
    """Return what `file_digest` does, of a file that nobody changes; many snapshots have links to one."""
    info = os.lstat(path)
    key = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
    found = _digests.get(key)
    if found is None:
        found = file_digest(path)
        _digests.put(key, found, size_bytes=1)
    return found


def _files_of(directory: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from sorted(path for path in directory.iterdir() if not path.name.startswith(DIGESTS))


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _stored_bytes(directory: Path, seen: set[int]) -> int:
    """Return what the files of a directory take on disk, but for those that were seen before."""
    total = 0
    for file in _looks(directory):
        if file.inode not in seen:
            seen.add(file.inode)
            total += file.stored_bytes
    return total


def _looks(directory: Path) -> Iterator[MemoryFile]:
    for path in _files_of(directory):
        with suppress(FileNotFoundError):
            info = os.lstat(path)
            yield MemoryFile(info.st_ino, info.st_nlink, info.st_blocks * _BLOCK_BYTES)


def _maker_of(name: str) -> str:
    return name[name.rindex("ow-") :] if "ow-" in name else name


def _is_known(db: sqlite3.Connection, snapshot_id: str) -> bool:
    return db.execute("SELECT 1 FROM snapshots WHERE snapshot_id = ?", (snapshot_id,)).fetchone() is not None
