"""Rollouts and groups for synchronous callers: each does what its coroutine does, from any number of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from worldfork.lineage.door import through, through_each
from worldfork.lineage.synchronous import Sandbox
from worldfork.records.edits import Edits
from worldfork.records.episode import Episode
from worldfork.records.task import Task
from worldfork.records.trajectory import Trajectory
from worldfork.rollout import group, opened
from worldfork.rollout.group import Group
from worldfork.rollout.opened import AsyncRollout
from worldfork.rollout.recording import Recorder
from worldfork.sandbox.command import CommandResult


def run_group(task: Task, policy: object, n: int, **options: Any) -> Group:
    """Run one task `n` times from the same starting state; see `run_rollouts`."""
    return Group(task, tuple(run_rollouts([task], policy, n=n, **options)))


def run_rollouts(
    tasks: Sequence[Task], policy: object, *, on_episode: Callable[[Episode], None] | None = None, **options: Any
) -> list[Episode]:
    """Run each task `n` times; see `group.run_rollouts`. `on_episode` is called in the caller's thread."""
    if on_episode is None:
        return through(group.run_rollouts, tasks, policy, **options)
    with contextlib.closing(through_each(group.follow_rollouts(tasks, policy, **options))) as told:
        for each in told:
            if not isinstance(each, Episode):
                return each
            on_episode(each)
    raise AssertionError("a run that ends returns its episodes")


def stream_rollouts(tasks: Sequence[Task], policy: object, **options: Any) -> Iterator[Episode]:
    """Yield each episode as it ends; leaving the iteration settles what still runs. See `group.stream_rollouts`."""
    return through_each(group.stream_rollouts(tasks, policy, **options))


def open_rollout(task: Task, **options: Any) -> Rollout:
    """Fork a task's starting state for somebody to act in; see `opened.open_rollout`."""
    return Rollout.open(task, **options)


class Rollout:
    """The synchronous face of `AsyncRollout`, for many threads at once; pickles as its id."""

    def __init__(self, inner: AsyncRollout) -> None:
        self._inner = inner

    @classmethod
    def open(cls, task: Task, **options: Any) -> Self:
        """Open a rollout; see `open_rollout`."""
        return cls(through(opened.open_rollout, task, **options))

    @classmethod
    def attach(cls, rollout_id: str, **options: Any) -> Self:
        """Take up a rollout by id; see `AsyncRollout.attach`."""
        return cls(through(AsyncRollout.attach, rollout_id, **options))

    @property
    def rollout_id(self) -> str:
        """Its id, that of its sandbox."""
        return self._inner.rollout_id

    @property
    def task(self) -> Task:
        """The problem."""
        return self._inner.task

    @property
    def index(self) -> int:
        """The place within its group."""
        return self._inner.index

    @property
    def seed(self) -> int:
        """WORLDFORK_SEED inside."""
        return self._inner.seed

    @property
    def sandbox(self) -> Sandbox:
        """Where the policy acts; what is done by it is recorded."""
        return Sandbox(self._inner.sandbox)

    @property
    def recorder(self) -> Recorder:
        """Where this handle's steps go."""
        return self._inner.recorder

    @property
    def trajectory(self) -> Trajectory:
        """What was done by this handle so far."""
        return self._inner.trajectory

    def sh(self, line: str, *, timeout: float | None = None, **options: Any) -> CommandResult:
        """Run one line in the world's shell, in the task's directory."""
        return through(self._inner.sh, line, timeout=timeout, **options)

    def grade(self, *, policy_end: str = "finished", keep: bool = False) -> Episode:
        """End the policy's turn and grade what it left; once, whoever asks how often."""
        return through(self._inner.grade, policy_end=policy_end, keep=keep)

    def edits(self) -> Edits | None:
        """Return what the policy left, once it is graded."""
        return through(self._inner.edits)

    def keep(self, label: str | None = None) -> str:
        """Store the state as it is now and return the snapshot's id; the rollout goes on."""
        return through(self._inner.keep, label)

    def close(self) -> None:
        """End it and clear it away."""
        through(self._inner.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).attach, (self.rollout_id,)

    def __repr__(self) -> str:
        return f"Rollout({self.rollout_id!r})"
