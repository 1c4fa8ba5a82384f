"""Many rollouts: groups of one task, sets of tasks, a few at a time, each an episode of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from worldfork.core.clock import SystemClock
from worldfork.core.errors import ConfigError
from worldfork.lineage.place import place
from worldfork.lineage.snapshots import SnapshotInfo
from worldfork.records.episode import Episode, FailureKind
from worldfork.records.task import Task
from worldfork.reward.advantages import group_advantages
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.pytest_verifier import PytestVerifier
from worldfork.rollout.journal import Journal, Key
from worldfork.rollout.policies import Policy
from worldfork.rollout.rollout import failed_before, run_rollout
from worldfork.rollout.starts import StartingStates

MAX_CONCURRENCY = 1024


@dataclass(frozen=True)
class Group:
    """The episodes of one task from one starting state: what is compared with each other."""

    task: Task
    episodes: tuple[Episode, ...]
    """By index."""

    @property
    def rewards(self) -> list[float | None]:
        """One per episode; None where the rollout failed."""
        return [episode.reward for episode in self.episodes]

    @property
    def advantages(self) -> list[float | None]:
        """Rewards less their mean; see `reward.advantages.group_advantages`."""
        return group_advantages(self.rewards)


async def run_group(
    task: Task,
    policy: Policy,
    n: int,
    *,
    world: SnapshotInfo | None = None,
    concurrency: int | None = None,
    journal: Journal | None = None,
    on_episode: Callable[[Episode], None] | None = None,
) -> Group:
    """Run one task `n` times from the same starting state. Arguments and errors as in `run_rollouts`."""
    episodes = await run_rollouts(
        [task], policy, n=n, world=world, concurrency=concurrency, journal=journal, on_episode=on_episode
    )
    return Group(task, tuple(episodes))


async def run_rollouts(
    tasks: Sequence[Task],
    policy: Policy,
    *,
    n: int = 1,
    world: SnapshotInfo | None = None,
    concurrency: int | None = None,
    journal: Journal | None = None,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Run each task `n` times; a failed rollout is an episode and does not touch its siblings.

    Args:
        tasks: distinct tasks.
        policy: what acts.
        n: rollouts per task; their indices are 0 to n - 1.
        world: a snapshot with `python`, pytest and pytest-timeout, over which each task's files are laid; built
            once per home and kept there if not given.
        concurrency: rollouts at a time; the number of CPUs that this process may use if not given.
        journal: where each episode is written as soon as it ends. Rollouts that it holds a reward for are not
            run again; failed ones are.
        on_episode: called with each episode that ends now, in the order in which they end, once it is written.

    Returns:
        The episodes by task and index, those from the journal among them.

    Raises:
        ConfigError: a bad argument, before anything starts.
        SandboxError, StoreError: the world could not be built.
        OSError: the journal could not be written; nothing after it was run.
    """
    width = _check(tasks, n, concurrency)
    ended: dict[Key, Episode] = {}
    wanted = {(task.task_hash, policy.policy_id, index): task for task in tasks for index in range(n)}
    if journal is not None:
        ended = {each.key: each for each in journal.episodes() if each.reward is not None and each.key in wanted}
    jobs = [(task, key[2]) for key, task in wanted.items() if key not in ended]
    if jobs:
        crew = _Crew(policy, await StartingStates.open(world), journal, on_episode)
        await crew.work(iter(jobs), min(width, len(jobs)))
        ended |= crew.ended
    return [ended[key] for key in wanted]


def _check(tasks: Sequence[Task], n: int, concurrency: int | None) -> int:
    if n < 1:
        raise ConfigError(f"n is {n}; a group has at least one rollout", n=n)
    if len({task.task_hash for task in tasks}) != len(tasks):
        raise ConfigError("a task comes twice", remedy="raise n to run a task more than once")
    width = len(os.sched_getaffinity(0)) if concurrency is None else concurrency
    if not 1 <= width <= MAX_CONCURRENCY:
        raise ConfigError(f"concurrency {width} is not between 1 and {MAX_CONCURRENCY}", concurrency=width)
    return width


class _Crew:
    """The rollouts of one call."""

    def __init__(
        self,
        policy: Policy,
        starts: StartingStates,
        journal: Journal | None,
        on_episode: Callable[[Episode], None] | None,
    ) -> None:
        self.ended: dict[Key, Episode] = {}
        self._policy = policy
        self._starts = starts
        self._journal = journal
        self._on_episode = on_episode
        self._clock = SystemClock()
        self._verifier = PytestVerifier(CalibrationStore(place().home.scratch / "tasks"), self._clock)
        self._unwritten: list[Episode] = []
        # Guards the journal: one batch is written at a time, and holds whatever ended meanwhile.
        self._writing = asyncio.Lock()

    async def work(self, jobs: Iterator[tuple[Task, int]], width: int) -> None:
        """Do the jobs, `width` at a time. What ended before an error or a cancellation is in the journal."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(width):
                    group.create_task(self._take_turns(jobs))
        except BaseExceptionGroup as errors:
            # Rollouts do not raise; what does is the journal or the caller's own function.
            raise errors.exceptions[0] from None
        finally:
            if self._journal is not None and self._unwritten:
                self._journal.append(self._unwritten)

    async def _take_turns(self, jobs: Iterator[tuple[Task, int]]) -> None:
        for task, index in jobs:
            episode = await self._run(task, index)
            self.ended[episode.key] = episode
            await self._write(episode)
            if self._on_episode is not None:
                self._on_episode(episode)

    async def _run(self, task: Task, index: int) -> Episode:
        started_s = self._clock.now_s()
        try:
            start = await self._starts.get(task)
        except Exception as error:
            return failed_before(task, self._policy, index, started_s, FailureKind.START, error)
        return await run_rollout(task, self._policy, index, start, self._verifier, self._clock)

    async def _write(self, episode: Episode) -> None:
        journal = self._journal
        if journal is None:
            return
        self._unwritten.append(episode)
        async with self._writing:
            batch, self._unwritten = self._unwritten, []
            if batch:
                await _to_its_end(asyncio.to_thread(journal.append, batch))


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that must not be left half done; a cancellation passes on after its end."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
