"""A run on disk, written: its journal of episodes, and beside it what these name. `stored` reads it.

::

    RUN/episodes.jsonl             the journal, see `journal`
    RUN/tasks.jsonl                the tasks, so that a run can be graded again by itself
    RUN/blobs/<2 hex>/<digest>.zst edits, diffs and trajectories, by the SHA-256 of their content

What an episode names is on disk before the episode is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from worldfork.core.errors import ConfigError
from worldfork.core.whole_file import whole_file
from worldfork.records.episode import Episode
from worldfork.records.task import Task
from worldfork.records.trajectory import Trajectory
from worldfork.rollout.journal import Journal, run_of
from worldfork.rollout.run_tasks import keep_tasks
from worldfork.rollout.stored import BLOBS, JOURNAL, TASKS
from worldfork.store.syscalls import sync_directory

_LEVEL = 3


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

        One that was added before counts once, as it is now.

        Raises:
            Locked: somebody holds the journal now. ConfigError, Corrupt: it is none.
            OSError: the disk is full or broken.
        """
        # The journal is held for its line alone: many wait for it.
        self.put_tasks([task])
        self.put(blobs)
        with Journal.open(self.path / JOURNAL, to_add=True) as journal:
            journal.append([episode])

    def expect(self, task: Task) -> None:
        """Let the run know of a task whose episodes are to be added: what would refuse them does so now. Blocking.

        Raises:
            ConfigError, FormatUnsupported: this is no run, cannot be written, or holds another task of that name.
            Locked: others added tasks for too long. OSError: the disk is full or broken.
        """
        run_of(self.path / JOURNAL)
        self.put_tasks([task])

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        """Keep tasks beside those that are there already. Blocking; from any number of processes.

        Raises:
            ConfigError: the directory cannot be made, the tasks that are there cannot be read, or another one has the
            same name; nothing is written. Locked: others added tasks for too long.
            OSError: the disk is full or broken.
        """
        try:
            _make_directory(self.path)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"{error.filename} is no directory", remedy="name another one", field="run") from error
        keep_tasks(self.path / TASKS, tasks)


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
    """Write a file that is there whole or not at all, and on the disk when this returns."""
    with whole_file(target) as part, part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fdatasync(file.fileno())
