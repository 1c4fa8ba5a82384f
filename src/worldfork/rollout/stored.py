"""A stored run, read: its episodes, and what each left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from worldfork.core.errors import ConfigError, Corrupt
from worldfork.records.edits import Edits
from worldfork.records.episode import Episode
from worldfork.records.task import Task
from worldfork.records.trajectory import Trajectory
from worldfork.rollout.journal import read_journal

JOURNAL = "episodes.jsonl"
TASKS = "tasks.jsonl"
BLOBS = "blobs"

MAX_BLOB_BYTES = 256 << 20
"""What one stored piece may unpack to; more is taken to be damage."""

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class StoredGroup:
    """The episodes of one task by one policy, by index."""

    task_id: str
    policy_id: str
    episodes: tuple[Episode, ...]

    @property
    def rewards(self) -> list[float | None]:
        """One per episode; None where the rollout failed."""
        return [episode.reward for episode in self.episodes]


class StoredRun:
    """The directory of a run, or the file of its episodes alone. Reading locks and changes nothing.

    Args:
        path: the directory, or a file of episodes.
        tasks: the run's tasks, for whoever needs their prompts; by default those that the directory holds.

    Raises:
        ConfigError: there is no run.
        Corrupt, FormatUnsupported: its episodes cannot be read.
    """

    def __init__(self, path: str | Path, tasks: Iterable[Task] | None = None) -> None:
        given = Path(path)
        self.directory = given if given.is_dir() else given.parent
        self.journal = given / JOURNAL if given.is_dir() else given
        if not self.journal.is_file():
            raise ConfigError(f"{given} holds no run", remedy="name the directory given to --run", path=str(given))
        self.episodes: list[Episode] = read_journal(self.journal)
        self._given_tasks = None if tasks is None else list(tasks)

    @cached_property
    def run_id(self) -> str:
        """The run's id."""
        with self.journal.open("rb") as file:
            line = file.readline(1 << 20)
        return str(json.loads(line)["run_id"]) if line else ""

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """Task hash -> task, as far as they are known."""
        if self._given_tasks is None:
            return {task.task_hash: task for task in self._stored_tasks()}
        return {task.task_hash: task for task in self._given_tasks}

    @cached_property
    def groups(self) -> list[StoredGroup]:
        """The groups, in the order in which each first had an episode."""
        first: dict[tuple[str, str, str], int] = {}
        for episode in self.episodes:
            first.setdefault(_group_key(episode), len(first))
        ordered = sorted(self.episodes, key=lambda each: (first[_group_key(each)], each.index))
        return [
            StoredGroup(key[0], key[2], tuple(members))
            for key, members in groupby(ordered, key=lambda each: _group_key(each))
        ]

    def trajectory(self, episode: Episode) -> Trajectory | None:
        """Return what the policy did; None where it was not kept."""
        data = self.blob(episode.trajectory)
        if data is None:
            return None
        try:
            return Trajectory.from_json(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise self._corrupt(episode.trajectory, str(error)) from error

    def edits(self, episode: Episode) -> Edits | None:
        """Return what the policy left of the editable files; None where it was not kept."""
        data = self.blob(episode.edits)
        return None if data is None else Edits.from_bytes(data)

    def diff(self, episode: Episode) -> str | None:
        """Return the same as a unified diff, with U+FFFD for what is no UTF-8; None where it was not kept."""
        data = self.blob(episode.diff)
        return None if data is None else data.decode("utf-8", "replace")

    def blob(self, digest: str | None) -> bytes | None:
        """Return a stored piece by its digest; None where the run does not hold it.

        Raises:
            Corrupt: it cannot be unpacked.
        """
        if digest is None or not _DIGEST.fullmatch(digest):
            return None
        from worldfork.content.compression import zstd

        path = self.directory / BLOBS / digest[:2] / f"{digest}.zst"
        try:
            with path.open("rb") as file, zstd.ZstdFile(file) as unpacked:
                data = bytes(unpacked.read(MAX_BLOB_BYTES + 1))
        except FileNotFoundError:
            return None
        except (OSError, EOFError, zstd.ZstdError) as error:
            raise self._corrupt(digest, str(error)) from error
        if len(data) > MAX_BLOB_BYTES:
            raise self._corrupt(digest, f"more than {MAX_BLOB_BYTES} bytes")
        return data

    def _corrupt(self, digest: str | None, why: str) -> Corrupt:
        return Corrupt(
            f"the run in {self.directory} holds a piece that cannot be read: {digest}: {why}",
            remedy="remove that file; the episode stays, without it",
            expected="a readable piece",
            actual=why,
        )

    def _stored_tasks(self) -> Sequence[Task]:
        from worldfork.rollout.run_tasks import read_tasks

        return read_tasks(self.directory / TASKS)


def _group_key(episode: Episode) -> tuple[str, str, str]:
    return episode.task_id, episode.task_hash, episode.policy_id
