"""A run on disk, written: its journal of episodes, and beside it what these name. `stored` reads it.

::

    RUN/episodes.jsonl             the journal, see `journal`
    RUN/tasks.jsonl                the tasks, so that a run can be graded again by itself
    RUN/blobs/<2 hex>/<digest>.zst edits, diffs and trajectories, by the SHA-256 of their content

What an episode names is on disk before the episode is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from worldfork.core.errors import ConfigError
from worldfork.core.recent import Recent
from worldfork.records.episode import Episode
from worldfork.records.task import Task
from worldfork.records.trajectory import Trajectory
from worldfork.rollout.journal import Journal
from worldfork.rollout.loading import load_tasks
from worldfork.rollout.stored import BLOBS, JOURNAL, TASKS
from worldfork.store.syscalls import sync_directory

_LEVEL = 3
_SEEN: Recent[frozenset[str]] = Recent(4 << 20)
"""Hashes of the tasks in a version of a file of tasks: who adds one episode after the other need not read them all."""


class RunDirectory:
    """Where one run writes what it keeps. Safe for many threads at once."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def open_journal(self) -> Journal:
        """Open the journal to append to, and make the run if it is not there; errors as of `Journal.open`."""
        return Journal.open(self.path / JOURNAL)

    def put(self, contents: Iterable[bytes]) -> list[str]:
        """Keep contents, and return their digests; when this returns they survive a crash of the machine.

        Raises:
            OSError: the disk is full or broken.
        """
        from worldfork.content.compression import zstd

        digests: list[str] = []
        touched: set[Path] = set()
        for content in contents:
            digest = hashlib.sha256(content).hexdigest()
            digests.append(digest)
            target = self.path / BLOBS / digest[:2] / f"{digest}.zst"
            if target.exists():
                continue
            _make_directory(target.parent)
            _write_whole(target, zstd.compress(content, _LEVEL))
            touched.add(target.parent)
        for directory in touched:
            sync_directory(directory)
        return digests

    def add(self, task: Task, episode: Episode, blobs: Iterable[bytes] = ()) -> None:
        """Add one episode with what it names, for whoever does not hold the journal; others may do so too. Blocking.

        Raises:
            Locked: somebody holds the journal now. ConfigError, Corrupt: it is none.
            OSError: the disk is full or broken.
        """
        with Journal.open(self.path / JOURNAL, to_add=True) as journal:
            self.put_tasks([task])
            self.put(blobs)
            journal.append([episode])

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        """Keep tasks beside those that are there already. For whoever holds the journal.

        Raises:
            ConfigError: the tasks that are there cannot be read, or another one has the same name; nothing is written.
            OSError: the disk is full or broken.
        """
        target = self.path / TASKS
        version = _version_of(target)
        there = _SEEN.get(version)
        if there is not None and there.issuperset(task.task_hash for task in tasks):
            return
        kept = {task.task_hash: task for task in load_tasks(target)} if target.is_file() else {}
        wanted = kept | {task.task_hash: task for task in tasks}
        if wanted.keys() == kept.keys():
            _SEEN.put(version, frozenset(kept), sum(map(len, kept)))
            return
        names = Counter(task.task_id for task in wanted.values())
        twice = sorted(name for name, count in names.items() if count > 1)
        if twice:
            raise ConfigError(f"{self.path} holds another task {twice[0]!r}", remedy="name another directory")
        _make_directory(self.path)
        lines = (json.dumps(task.to_json(), separators=(",", ":"), ensure_ascii=True) for task in wanted.values())
        _write_whole(target, "".join(f"{line}\n" for line in lines).encode("ascii"))
        sync_directory(self.path)


def _version_of(path: Path) -> tuple[object, ...]:
    try:
        info = path.stat()
    except FileNotFoundError:
        return (path.absolute(),)
    return path.absolute(), info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size


def trajectory_bytes(trajectory: Trajectory) -> bytes:
    """Return a trajectory as a run keeps it."""
    text = json.dumps(trajectory.to_json(), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def _make_directory(path: Path) -> None:
    """Make a directory that survives a crash, and those above it."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def _write_whole(target: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    handle, name = tempfile.mkstemp(prefix=".part-", dir=target.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fdatasync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
