"""The tasks of a run on disk: one JSON line each, appended and never changed, by any number of processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from worldfork.core.errors import ConfigError, Locked
from worldfork.core.recent import Recent
from worldfork.records.task import Task
from worldfork.rollout.loading import read_task
from worldfork.store.syscalls import sync_directory

_WAIT_S = 30.0
"""How long to wait for others, who hold the file for as long as it takes to add a few lines."""
_POLL_S = 0.01
_MARK_BYTES = 4 << 10
_BYTES_PER_TASK = 300
"""About what is remembered of each."""


@dataclass(frozen=True)
class _Seen:
    """As much of a file as was read."""

    file: tuple[int, int] = (0, 0)
    """Device and inode."""
    end: int = 0
    """Offset after the last line."""
    mark: bytes = b""
    """What stands before that: a file that was written anew is another one."""
    lines: int = 0


_SEEN: Recent[tuple[_Seen, dict[str, str]]] = Recent(4 << 20)
"""By path, with the hashes by task id: who adds one task after the other reads only what others added."""


def keep_tasks(path: Path, tasks: Sequence[Task]) -> None:
    """Add those tasks that a file does not hold yet; when this returns they survive a crash of the machine. Blocking.

    Args:
        path: the file; its directory is there.
        tasks: any.

    Raises:
        ConfigError: the file cannot be read, or another task of it or of these has the same id; nothing is written.
        Locked: others held it for too long. OSError: the disk is full or broken; the file is as before.
    """
    if not tasks:
        return
    with _held(path) as file:
        seen, hashes = _read_on(path, file)
        there = len(hashes)
        new: list[Task] = []
        for task in tasks:
            known = hashes.setdefault(task.task_id, task.task_hash)
            if known != task.task_hash:
                for each in new:
                    del hashes[each.task_id]
                raise ConfigError(
                    f"{path.parent} holds another task {task.task_id!r}", remedy="name another directory", field="run"
                )
            if len(hashes) > there + len(new):
                new.append(task)
        if new:
            try:
                seen = _append(path, file, seen, new)
            except BaseException:
                for each in new:
                    del hashes[each.task_id]
                raise
        _SEEN.put(path.absolute(), (seen, hashes), _BYTES_PER_TASK * len(hashes))


def read_tasks(path: Path) -> list[Task]:
    """Return the tasks of a file without locking it; a line that was being written is left out. None is no error.

    Raises:
        ConfigError: a whole line is no task, or the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return [task for task, _ in _tasks(path, file, 0)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", path=str(path)) from error


def _read_on(path: Path, file: BinaryIO) -> tuple[_Seen, dict[str, str]]:
    """Return the whole of what a file holds, having read no more than what was added since the last time."""
    info = os.fstat(file.fileno())
    seen, hashes = _SEEN.get(path.absolute()) or (_Seen(), dict[str, str]())
    if seen.file != (info.st_dev, info.st_ino) or seen.mark != _mark(file, seen.end):
        seen, hashes = _Seen((info.st_dev, info.st_ino)), {}
    end, lines = seen.end, seen.lines
    if end < info.st_size:
        # Not by iterating over the file itself: it is unbuffered, since it is written.
        with open(os.dup(file.fileno()), "rb") as reader:
            reader.seek(end)
            for task, size in _tasks(path, reader, lines):
                end, lines = end + size, lines + 1
                hashes[task.task_id] = task.task_hash
    return _Seen(seen.file, end, _mark(file, end), lines), hashes


def _tasks(path: Path, file: BinaryIO, before: int) -> Iterator[tuple[Task, int]]:
    """Yield each task from where a file stands, and the bytes of its line."""
    pending = 0
    for number, line in enumerate(file, before + 1):
        if not line.strip():
            pending += len(line)
            continue
        try:
            task = read_task(path, number, line)
        except ConfigError:
            if line.endswith(b"\n"):
                raise
            return
        yield task, pending + len(line)
        pending = 0


def _append(path: Path, file: BinaryIO, seen: _Seen, tasks: Sequence[Task]) -> _Seen:
    size = os.fstat(file.fileno()).st_size
    # What a process that died left of a line goes; one that somebody wrote by hand may lack its end.
    begin = b"" if not seen.end or seen.mark.endswith(b"\n") else b"\n"
    text = begin + b"".join(_line(task) for task in tasks)
    try:
        if size != seen.end:
            file.truncate(seen.end)
        file.seek(seen.end)
        rest = memoryview(text)
        while rest:
            rest = rest[file.write(rest) :]
        os.fdatasync(file.fileno())
    except OSError:
        file.truncate(seen.end)
        raise
    if not seen.end:
        sync_directory(path.parent)
    end = seen.end + len(text)
    return _Seen(seen.file, end, _mark(file, end), seen.lines + len(tasks))


def _line(task: Task) -> bytes:
    return json.dumps(task.to_json(), separators=(",", ":"), ensure_ascii=True).encode("ascii") + b"\n"


def _mark(file: BinaryIO, end: int) -> bytes:
    start = max(0, end - _MARK_BYTES)
    return os.pread(file.fileno(), end - start, start)


@contextmanager
def _held(path: Path) -> Iterator[BinaryIO]:
    """Open a file that nobody else adds to meanwhile, of all threads and processes."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0)
    with file:
        end_s = time.monotonic() + _WAIT_S
        while not _try_lock(file):
            if time.monotonic() >= end_s:
                raise Locked(f"somebody holds {path}", remedy="ask again later", holders=[])
            threading.Event().wait(_POLL_S)
        try:
            yield file
        finally:
            # Said, not left to the closing: a process that was forked meanwhile has the file open too.
            fcntl.flock(file, fcntl.LOCK_UN)


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
            raise
        return False
    return True
