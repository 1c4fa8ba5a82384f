"""Many rollouts: groups of one task, sets of tasks, a few at a time, each an episode of its own."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldfork.core.clock import SystemClock
from worldfork.core.errors import ConfigError
from worldfork.core.ids import content_id
from worldfork.core.shielded import to_its_end
from worldfork.core.threads import in_thread
from worldfork.lineage.place import place
from worldfork.lineage.snapshots import SnapshotInfo
from worldfork.records.episode import Episode, ranked
from worldfork.records.task import Task
from worldfork.reward.advantages import group_advantages
from worldfork.reward.score_verifier import ScoreFunction
from worldfork.reward.verifier import Verifier
from worldfork.rollout.crew import Crew
from worldfork.rollout.faults import FaultRules, Faults
from worldfork.rollout.journal import Journal, Key
from worldfork.rollout.judges import cpus, judges
from worldfork.rollout.leftovers import sweep_once
from worldfork.rollout.orders import Job, Orders, Starts
from worldfork.rollout.run_directory import RunDirectory
from worldfork.rollout.standing import Standing
from worldfork.rollout.starts import StartingStates
from worldfork.rollout.stopping import StopRule
from worldfork.rollout.turn import as_policy

MAX_CONCURRENCY = 1024
SEEDS = ("derived", "common", "independent")
KEEPS = ("best", "all")


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
    def valid(self) -> list[bool]:
        """One per episode: whether it counts."""
        return [episode.valid for episode in self.episodes]

    @property
    def advantages(self) -> list[float | None]:
        """Rewards less their mean; see `reward.advantages` for all others."""
        return group_advantages(self.rewards)

    def advantages_by(self, method: Callable[[Sequence[float | None]], array[float]]) -> array[float]:
        """Return what a function of `reward.advantages`, such as `grpo`, makes of the rewards."""
        return method(self.rewards)

    @property
    def best(self) -> Episode | None:
        """The first of those with the highest reward; None where none has one."""
        return next((each for each in ranked(self.episodes) if each.reward is not None), None)


async def run_group(task: Task, policy: object, n: int, **options: Any) -> Group:
    """Run one task `n` times from the same starting state. Options and errors as in `run_rollouts`."""
    return Group(task, tuple(await run_rollouts([task], policy, n=n, **options)))


async def run_rollouts(
    tasks: Sequence[Task],
    policy: object,
    *,
    n: int = 1,
    world: SnapshotInfo | None = None,
    concurrency: int | None = None,
    journal: Journal | None = None,
    run: RunDirectory | str | Path | None = None,
    on_episode: Callable[[Episode], None] | None = None,
    seeds: str = "derived",
    seed: int = 0,
    stop: StopRule | None = None,
    keep: str | None = None,
    deadline_s: float | None = None,
    rules: FaultRules | None = None,
    verifier: Verifier | None = None,
    score: ScoreFunction | None = None,
    starts: Starts | None = None,
) -> list[Episode]:
    """Run each task `n` times; a failed rollout is an episode and does not touch its siblings.

    Args:
        tasks: distinct tasks.
        policy: what acts; anything that `turn.as_policy` takes.
        n: rollouts per task; their indices are 0 to n - 1.
        world: a snapshot with `python`, pytest and pytest-timeout, over which the files of tasks that name no world
            are laid; built once per home and kept there if not given.
        concurrency: rollouts at a time; if not given as many as there are CPUs for this process and, by the tasks'
            limits, memory. However many there are, no more are graded at a time than there are CPUs.
        journal: where each episode is written as soon as it ends. Rollouts that it holds a reward for are not
            run again; failed ones are.
        run: a directory that keeps what episodes name, and the journal if none is given.
        on_episode: called with each episode that ends now, in the order in which they end, once it is written.
        seeds: `derived` from the task and the index; `common` to the group; `independent`, by chance.
        seed: derives others.
        stop: ends a group early. What lies behind the cut is STOPPED, in progress or done, here and in the journal, and
            its kept state goes; so is what an earlier call of this run finished there.
        keep: whose final state is kept as a snapshot: the `best` one's of each group, or `all`; None for none. The
            caller deletes them. With `best` those of others go that an earlier call of this run kept.
        deadline_s: wall time for the whole; what has not ended by then is STOPPED.
        rules: what is tried again, and when to give up.
        verifier: grades all tasks; by default each task's own.
        score: a function that grades all tasks, in the place of a verifier.
        starts: where starting states come from; by default this home.

    Returns:
        The episodes by task and index, those from the journal among them.

    Raises:
        ConfigError: a bad argument, before anything starts; so is a run whose rollouts of a task stand on a starting
            state that is gone, where what the task has by now does not hold the same.
        SandboxError, StoreError: the world could not be built.
        OSError: the journal could not be written; nothing after it was run.
    """
    verifier_of = judges(verifier=verifier, score=score)
    agent = as_policy(policy)
    width = check_rollouts(tasks, n, concurrency, seeds=seeds, keep=keep, deadline_s=deadline_s)
    if not tasks:
        return []
    directory = RunDirectory(run) if isinstance(run, (str, Path)) else run
    wanted: dict[Key, Task] = {(task.task_hash, agent.policy_id, at, ""): task for task in tasks for at in range(n)}
    with contextlib.ExitStack() as holds:
        book, ended = await to_its_end(in_thread(lambda: _open_books(directory, journal, wanted, holds)))
        _check_judges(ended, wanted, verifier_of)
        jobs = [Job(task, key[2], _seed(seeds, seed, task, key[2])) for key, task in wanted.items() if key not in ended]
        states = await _standing(starts or await StartingStates.open(world), book, jobs)
        orders = Orders(
            agent,
            states,
            verifier_of=verifier_of,
            clock=SystemClock(),
            faults=Faults(rules),
            gradings=cpus(),
            stop=stop,
            keep=keep,
            deadline_s=deadline_s,
            journal=book,
            run=directory,
            on_episode=on_episode,
        )
        crew = await _work(orders, jobs, ended, width)
        ended |= crew.ended
        return [crew.cut(ended[key]) for key in wanted]


async def _work(orders: Orders, jobs: Sequence[Job], known: dict[Key, Episode], width: int) -> Crew:
    """Do what is to be done, and return who did it."""
    crew = Crew(orders)
    await crew.know(list(known.values()))
    if jobs:
        await sweep_once(place())
    await crew.work(jobs, width)
    return crew


async def stream_rollouts(tasks: Sequence[Task], policy: object, **options: Any) -> AsyncIterator[Episode]:
    """Run as `run_rollouts` does, and yield each episode as soon as it ends and is written.

    Leaving the iteration early (`aclose`, or the end of the caller's task) cancels what still runs, and waits for it to
    be cleared away. Episodes that the journal held before are not yielded.
    """
    async with contextlib.aclosing(follow_rollouts(tasks, policy, **options)) as told:
        async for each in told:
            if isinstance(each, Episode):
                yield each


async def follow_rollouts(
    tasks: Sequence[Task], policy: object, **options: Any
) -> AsyncGenerator[Episode | list[Episode]]:
    """Yield what `stream_rollouts` does, and at last what `run_rollouts` returns."""
    ready: asyncio.Queue[Episode | None] = asyncio.Queue()
    running = asyncio.ensure_future(run_rollouts(tasks, policy, on_episode=ready.put_nowait, **options))
    running.add_done_callback(lambda _: ready.put_nowait(None))
    try:
        while (episode := await ready.get()) is not None:
            yield episode
        yield await running
    finally:
        running.cancel()
        # Cancelled once more, it still waits: half a run is settled by nobody.
        await to_its_end(asyncio.wait({running}))
        if not running.cancelled():
            running.exception()


def check_rollouts(
    tasks: Sequence[Task],
    n: int,
    concurrency: int | None,
    *,
    seeds: str = "derived",
    keep: str | None = None,
    deadline_s: float | None = None,
) -> int:
    """Look at arguments as of `run_rollouts`; return how many rollouts run at a time.

    Raises:
        ConfigError: one cannot be meant.
    """
    if n < 1:
        raise ConfigError(f"n is {n}; a group has at least one rollout", n=n)
    if len({task.task_hash for task in tasks}) != len(tasks):
        raise ConfigError("a task comes twice", remedy="raise n to run a task more than once")
    if seeds not in SEEDS:
        raise ConfigError(f"seeds cannot be {seeds!r}", remedy=f"use one of {', '.join(SEEDS)}", field="seeds")
    if keep is not None and keep not in KEEPS:
        raise ConfigError(f"keep cannot be {keep!r}", remedy=f"use one of {', '.join(KEEPS)}, or None", field="keep")
    if deadline_s is not None and not deadline_s > 0:
        raise ConfigError(f"deadline_s {deadline_s!r} is not a time", field="deadline_s")
    width = _natural_width(tasks) if concurrency is None else concurrency
    if not 1 <= width <= MAX_CONCURRENCY:
        raise ConfigError(f"concurrency {width} is not between 1 and {MAX_CONCURRENCY}", concurrency=width)
    return width


def _natural_width(tasks: Sequence[Task]) -> int:
    """Return how many rollouts of the largest of these tasks this machine has CPUs and memory for."""
    largest_bytes = max((task.limits.memory_mb for task in tasks), default=1) << 20
    return max(1, min(cpus(), _available_bytes() // largest_bytes))


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def _open_books(
    run: RunDirectory | None, journal: Journal | None, wanted: Mapping[Key, Task], holds: contextlib.ExitStack
) -> tuple[Journal | None, dict[Key, Episode]]:
    """Open where a run is written, and return the journal and what it holds a reward for. Blocking."""
    if run is not None:
        journal = journal or holds.enter_context(run.open_journal())
        run.put_tasks(list({task.task_hash: task for task in wanted.values()}.values()))
    if journal is None:
        return None, {}
    return journal, {each.key: each for each in journal.episodes_of(wanted) if each.reward is not None}


async def _standing(starts: Starts, book: Journal | None, jobs: Sequence[Job]) -> Standing:
    """Return where jobs start from in a run that may have rollouts of their tasks.

    Raises:
        ConfigError: they stand on what cannot be had any more.
    """
    tasks = {job.task.task_hash: job.task for job in jobs}
    stood = {} if book is None or not jobs else await to_its_end(in_thread(book.starts_of, tasks.keys()))
    states = Standing(starts, stood)
    await states.settle(tasks.values())
    return states


def _check_judges(known: dict[Key, Episode], wanted: dict[Key, Task], verifier_of: Callable[[Task], Verifier]) -> None:
    """Refuse to go on with a run that another verifier graded: its rewards are not to be compared with new ones."""
    for key, episode in known.items():
        now = verifier_of(wanted[key]).verifier_id if episode.verifier_id else ""
        if now != episode.verifier_id:
            raise ConfigError(
                f"rollout {episode.index} of {episode.task_id} was graded by {episode.verifier_id}, not by {now}",
                remedy="name another directory, or `worldfork regrade` this one",
                field="verifier",
            )


def _seed(seeds: str, seed: int, task: Task, index: int) -> int:
    if seeds == "independent":
        return secrets.randbits(60)
    parts = [task.task_hash.encode(), b"" if seeds == "common" else str(index).encode()]
    return int(content_id(*parts, *([str(seed).encode()] if seed else []))[:15], 16)
