"""The journal of a run: its episodes, one JSON line each, appended and never changed.

The first line says what the file is. A line that was being written when the process or the machine died is cut
off at the next opening; everything before it is kept. One writer at a time holds the file's lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from worldfork.core.errors import ConfigError, Corrupt, FormatUnsupported, Locked
from worldfork.core.ids import check_id, new_id
from worldfork.core.recent import Recent
from worldfork.records.episode import Episode

JOURNAL_FORMAT = 1

_TAIL_BYTES = 64 << 10
_MARK_BYTES = 4 << 10
_BYTES_PER_ROLLOUT = 400
"""About what is remembered of each."""

Key = tuple[str, str, int, str]
"""Which rollout an episode is of, as of `Episode.key`."""


@dataclass
class _Index:
    """Where in a file the last episode of each rollout stands, as far as it was read."""

    file: tuple[int, int]
    """Device and inode."""
    run_id: str = ""
    end: int = 0
    """Offset after the last whole line."""
    mark: bytes = b""
    """What stands before that: a file that was written anew is another one."""
    number: int = 0
    """Lines."""
    last: dict[Key, tuple[int, bool, str]] = field(default_factory=dict)
    """Offset of its line, whether it is scored, and the id of its starting state."""

    def note(self, key: Key, size: int, scored: bool, start_id: str | None) -> None:
        """Take note of an episode after all others."""
        self.last[key] = self.end, scored, sys.intern(start_id or "")
        self.end += size
        self.number += 1


_INDEXED: Recent[_Index] = Recent(32 << 20)
"""By path: who opens a run again and again, as trainers do, reads only what was added since. Of one that is open,
whoever holds its lock changes it."""


class Journal:
    """An open journal. `with Journal.open(path) as journal: ...`; for one thread at a time."""

    def __init__(self, path: Path, file: BinaryIO, run_id: str, index: _Index | None) -> None:
        self.path = path
        self.run_id = run_id
        """Made when the journal was, and kept when a run is resumed."""
        self._index = index
        self._file = file
        self._pid = os.getpid()

    @classmethod
    def open(cls, path: str | Path, *, to_add: bool = False) -> Journal:
        """Open a journal to append to, and make it if it is not there.

        Args:
            path: the file.
            to_add: for whoever adds an episode once in a while, as many processes may to one run: reads head and tail
                alone, however long the journal is, and can only append.

        Raises:
            Locked: another run is writing it.
            Corrupt: a line before the last cannot be read; nothing was changed.
            ConfigError: the file is no journal or cannot be opened.
            FormatUnsupported: a newer version wrote it.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}", path=str(path)) from error
        try:
            _lock(path, file)
            run_id = _run_of_whole(path, file) if to_add else None
            index = _recover(path, file) if run_id is None else None
        except BaseException:
            file.close()
            raise
        return cls(path, file, index.run_id if index else str(run_id), index)

    def append(self, episodes: Sequence[Episode]) -> None:
        """Write the episodes; when this returns they survive a crash of the machine.

        Raises:
            OSError: the disk is full or broken; the journal is as before.
        """
        if not episodes:
            return
        start = self._file.seek(0, os.SEEK_END)
        lines = [_line(each.to_json()) for each in episodes]
        try:
            _write_all(self._file, b"".join(lines))
            os.fdatasync(self._file.fileno())
        except OSError:
            # Half a line in the middle would make everything after it unreadable.
            self._file.truncate(start)
            raise
        if self._index is not None:
            for each, line in zip(episodes, lines, strict=True):
                self._index.note(each.key, len(line), each.valid, each.snapshot_id)
            self._index.mark = _mark(self._file, self._index.end)

    def is_finished(self, key: Key) -> bool:
        """True where the last episode of that rollout is scored. A failed one is to be tried again."""
        return self._known.last.get(key, (0, False, ""))[1]

    def episodes_of(self, keys: Iterable[Key]) -> Iterator[Episode]:
        """Yield the last episode of each of these rollouts that has one, whatever else the journal holds. Blocking."""
        return self._at([self._known.last[key][0] for key in keys if key in self._known.last])

    def starts_of(self, task_hashes: Set[str]) -> dict[str, dict[str, str | None]]:
        """Return what the scored rollouts of tasks stand on, whoever acted. Blocking.

        Returns:
            Task hash -> snapshot id of a starting state -> digest of its content, where that was told.
        """
        places: dict[tuple[str, str], int] = {}
        for key, (place, scored, start_id) in self._known.last.items():
            if scored and start_id and key[0] in task_hashes:
                places[key[0], start_id] = place
        found: dict[str, dict[str, str | None]] = {}
        for each in self._at(places.values()):
            found.setdefault(each.task_hash, {})[str(each.snapshot_id)] = each.start_content
        return found

    def _at(self, places: Iterable[int]) -> Iterator[Episode]:
        with open(os.dup(self._file.fileno()), "rb") as reader:
            for place in places:
                reader.seek(place)
                yield Episode.from_json(_parse(reader.readline()) or {})

    @property
    def _known(self) -> _Index:
        if self._index is None:
            raise ValueError("a journal that was opened to add to knows nothing of what it holds")
        return self._index

    def episodes(self) -> Iterator[Episode]:
        """Return what the journal holds, the last episode of each rollout, in the order of their first."""
        return iter(read_journal(self.path))

    def close(self) -> None:
        """Let go of the file and its lock. May be called twice."""
        if not self._file.closed and self._pid == os.getpid():
            # Said, not left to the closing: a process that was forked meanwhile has the file open too.
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_of(path: str | Path) -> str | None:
    """Return the id of the run whose journal this is; None where there is none yet. Reads a line and locks nothing.

    Raises:
        ConfigError: the file is no journal or cannot be read.
        FormatUnsupported: a newer version wrote it.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            line = file.readline(_TAIL_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", path=str(path)) from error
    head = _parse(line)
    if head is None and _is_torn_header(path):
        return None
    _check_header(path, head or {})
    return check_id("run", (head or {})["run_id"])


def read_journal(path: str | Path) -> list[Episode]:
    """Read a journal without locking or changing it; where a rollout was tried again, its last episode counts.

    Raises:
        Corrupt: a line before the last cannot be read.
        ConfigError: no journal, or no such file.
        FormatUnsupported: a newer version wrote it.
    """
    path = Path(path)
    by_key: dict[Key, Episode] = {}
    try:
        with path.open("rb") as file:
            lines = _whole_lines(path, file)
            if next(lines, None) is None:
                return []
            for _, data in lines:
                episode = Episode.from_json(data)
                by_key[episode.key] = episode
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", path=str(path)) from error
    return list(by_key.values())


def _recover(path: Path, file: BinaryIO) -> _Index:
    """Cut off a torn tail and return what the file holds; begin an empty one."""
    info = os.fstat(file.fileno())
    index = _INDEXED.get(path.absolute())
    if index is None or index.file != (info.st_dev, info.st_ino) or index.mark != _mark(file, index.end):
        index = _Index((info.st_dev, info.st_ino))
    for after, data in _whole_lines(path, file, index.end, index.number):
        if not index.run_id:
            index.run_id = check_id("run", data["run_id"])
            index.end, index.number = after, 1
        else:
            key = data["task_hash"], data["policy_id"], data["index"], data.get("rollout_id", "")
            index.note(key, after - index.end, data.get("failure") is None, data.get("snapshot_id"))
    if file.seek(0, os.SEEK_END) != index.end:
        file.truncate(index.end)
    if not index.run_id:
        index.run_id = new_id("run")
        head = _line({"journal": JOURNAL_FORMAT, "run_id": index.run_id})
        file.seek(0)
        _write_all(file, head)
        os.fsync(file.fileno())
        _sync_directory(path.parent)
        index.end, index.number = len(head), 1
    index.mark = _mark(file, index.end)
    _INDEXED.put(path.absolute(), index, _BYTES_PER_ROLLOUT * len(index.last))
    return index


def _mark(file: BinaryIO, end: int) -> bytes:
    start = max(0, end - _MARK_BYTES)
    return os.pread(file.fileno(), end - start, start)


def _run_of_whole(path: Path, file: BinaryIO) -> str | None:
    """Return the id of the run whose journal begins and ends with a whole line; None where it has to be read."""
    with open(os.dup(file.fileno()), "rb") as reader:
        reader.seek(0)
        head = _parse(reader.readline())
        end = start = reader.seek(0, os.SEEK_END)
        if head is None or not end:
            return None
        _check_header(path, head)
        # A crash may leave zeros before the end of a line: the last one has to be readable as a whole.
        tail = b""
        while start and tail.find(b"\n", 0, -1) < 0:
            start = max(0, start - _TAIL_BYTES)
            reader.seek(start)
            tail = reader.read(end - start)
        last = tail[tail.rfind(b"\n", 0, -1) + 1 :]
        return None if _parse(last) is None else check_id("run", head["run_id"])


def _whole_lines(path: Path, file: BinaryIO, end: int = 0, before: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset after the line, its object), header first, up to a torn tail.

    Args:
        path: the file's.
        file: the same, open.
        end: where to begin.
        before: how many lines that leaves out.
    """
    torn_at = None
    # Not by iterating over the file: it is unbuffered where it is written.
    with open(os.dup(file.fileno()), "rb") as reader:
        reader.seek(end)
        for number, line in enumerate(reader, before + 1):
            data = _parse(line)
            if data is None:
                torn_at = torn_at or number
                continue
            if torn_at is not None:
                raise Corrupt(
                    f"{path}:{torn_at}: not an episode, but good ones follow",
                    remedy="remove that line by hand, or use a new file",
                    expected="a JSON object",
                    actual=f"line {torn_at}",
                )
            if end == 0:
                _check_header(path, data)
            end += len(line)
            yield end, data
    if end == 0 and torn_at is not None and not _is_torn_header(path):
        raise ConfigError(f"{path} is not a journal", remedy="name a new file", path=str(path))


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _check_header(path: Path, data: dict[str, Any]) -> None:
    version = data.get("journal")
    if not isinstance(version, int) or not isinstance(data.get("run_id"), str):
        raise ConfigError(f"{path} is not a journal", remedy="name a new file", path=str(path))
    if version > JOURNAL_FORMAT:
        raise FormatUnsupported(f"{path}: journal format {version} is newer than {JOURNAL_FORMAT}", version=version)


def _is_torn_header(path: Path) -> bool:
    """True for the start of a header, or the zeros that a crash may leave in place of one."""
    head = path.read_bytes()[:200]
    begins = _line({"journal": JOURNAL_FORMAT, "run_id": "run-"}).removesuffix(b'"}\n')
    return not head.strip(b"\0") or head.startswith(begins) or begins.startswith(head)


def _lock(path: Path, file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Locked(f"another run is writing {path}", remedy="wait for it, or name another file", holders=[]) from None


def _line(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def _write_all(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
