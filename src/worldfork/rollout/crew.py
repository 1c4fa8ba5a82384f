"""The rollouts of one run: a few at a time, tried again where a fault of ours allows it, written as they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from worldfork.core.clock import Clock
from worldfork.core.errors import WorldforkError
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import Episode, Failure, FailureKind
from worldfork.records.task import Task
from worldfork.reward.verifier import Start, Verifier
from worldfork.rollout.attempt import Outcome, Setting, Which
from worldfork.rollout.bounds import to_its_end
from worldfork.rollout.faults import Faults
from worldfork.rollout.journal import Journal, Key
from worldfork.rollout.rollout import failed_before, run_rollout
from worldfork.rollout.run_directory import RunDirectory
from worldfork.rollout.stopping import ENOUGH, Prefix, StopRule
from worldfork.rollout.turn import Agent


class Starts(Protocol):
    """Where starting states come from."""

    async def get(self, task: Task) -> Start:
        """Return a task's."""
        ...


@dataclass(frozen=True)
class Job:
    """One rollout that is to be run."""

    task: Task
    index: int
    seed: int


@dataclass(frozen=True)
class Orders:
    """How the rollouts of a run are to be run."""

    policy: Agent
    starts: Starts
    verifier_of: Callable[[Task], Verifier]
    clock: Clock
    faults: Faults
    gradings: int
    """How many are graded at a time."""
    stop: StopRule | None = None
    keep: str | None = None
    """`best`, `all` or None: whose final state is kept."""
    deadline_s: float | None = None
    """Wall time for the whole run."""
    journal: Journal | None = None
    run: RunDirectory | None = None
    on_episode: Callable[[Episode], None] | None = None
    collects: bool = True
    """Whether `ended` holds every episode, or only those that are needed."""


class Crew:
    """Does the jobs of one run. For one call."""

    def __init__(self, orders: Orders) -> None:
        self.ended: dict[Key, Episode] = {}
        self.prefixes: dict[str, Prefix] = {}
        self._orders = orders
        self._gradings = asyncio.Semaphore(orders.gradings)
        self._verifiers: dict[str, Verifier] = {}
        self._running: dict[tuple[str, int], asyncio.Task[Outcome]] = {}
        self._over: tuple[str, str] | None = None
        self._best: dict[str, Episode] = {}
        self._unwritten: list[Outcome] = []
        # Guards `_best`: which of two states goes is decided by one at a time.
        self._choosing = asyncio.Lock()
        # Guards the journal: one batch is written at a time, and holds whatever ended meanwhile.
        self._writing = asyncio.Lock()

    def know(self, episode: Episode) -> None:
        """Take an episode that an earlier process of this run finished."""
        self._prefix(episode.task_hash).add(episode.index, episode.reward)
        if episode.final_snapshot_id is not None and self._orders.keep == "best":
            self._best[episode.task_hash] = _better(self._best.get(episode.task_hash), episode)

    async def work(self, jobs: Sequence[Job], width: int) -> None:
        """Do the jobs, `width` at a time. What ended before an error or a cancellation is in the journal."""
        waiting = iter(jobs)
        deadline = asyncio.ensure_future(self._end_at_deadline())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(width, len(jobs))):
                    group.create_task(self._take_jobs(waiting))
        except BaseExceptionGroup as errors:
            # Rollouts do not raise; what does is the journal or the caller's own function.
            raise errors.exceptions[0] from None
        finally:
            deadline.cancel()
            if self._unwritten:
                await to_its_end(self._write_batch())

    async def _take_jobs(self, jobs: Iterator[Job]) -> None:
        for job in jobs:
            await self._finish(job, await self._do(job))

    async def _do(self, job: Job) -> Outcome:
        refused = self._refusal(job)
        if refused is not None:
            return Outcome(self._stopped(job, refused))
        key = job.task.task_hash, job.index
        running = self._running[key] = asyncio.ensure_future(self._try(job))
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            # Siblings are settled, not dropped: each clears its sandbox away before this passes on.
            running.cancel()
            await to_its_end(asyncio.wait({running}))
            raise
        finally:
            self._running.pop(key, None)
        if running.cancelled():
            return Outcome(self._stopped(job, self._refusal(job) or _stop("cancelled", "the rollout was cancelled")))
        return running.result()

    async def _try(self, job: Job) -> Outcome:
        """Run one rollout, again after a fault of ours as often as the rules allow."""
        orders, faults = self._orders, tuple[FailureKind, ...]()
        while True:
            which = Which(
                job.task,
                orders.policy.policy_id,
                job.index,
                job.seed,
                attempt=len(faults) + 1,
                faults=tuple(kind.value for kind in faults),
                group_id=f"{job.task.task_hash[:16]}:{orders.policy.policy_id}",
            )
            outcome = await self._attempt(which)
            failure = outcome.episode.failure
            orders.faults.note_attempt(failure)
            if failure is None or outcome.acted:
                # What the policy left was graded as often as the rules allow; another turn would be another answer.
                break
            faults = (*faults, failure.kind)
            pause_s = orders.faults.pause_s(faults)
            if pause_s is None:
                break
            await orders.clock.sleep_s(pause_s)
        orders.faults.note_rollout(job.task.task_hash, outcome.episode.failure)
        return outcome

    async def _attempt(self, which: Which) -> Outcome:
        orders = self._orders
        started_s = orders.clock.now_s()
        try:
            start = await orders.starts.get(which.task)
            verifier = self._verifier(which.task)
        except Exception as error:
            return Outcome(failed_before(which, started_s, FailureKind.START, error))
        setting = Setting(
            start, verifier, orders.clock, self._gradings, orders.faults.rules, keep_end=orders.keep is not None
        )
        try:
            return await run_rollout(which, orders.policy, setting)
        except Exception as error:
            # Every fault that is known of has its stage; this one is a defect, and its siblings go on.
            return Outcome(failed_before(which, started_s, FailureKind.INTERNAL, error))

    def _verifier(self, task: Task) -> Verifier:
        if task.task_hash not in self._verifiers:
            self._verifiers[task.task_hash] = self._orders.verifier_of(task)
        return self._verifiers[task.task_hash]

    async def _finish(self, job: Job, outcome: Outcome) -> None:
        orders, episode = self._orders, outcome.episode
        stopped = episode.failure is not None and episode.failure.kind is FailureKind.STOPPED
        if stopped:
            self._note(episode)
        elif orders.keep == "best":
            async with self._choosing:
                episode = await self._keep_best(outcome)
        else:
            await self._write(outcome)
            self._note(episode)
        if orders.on_episode is not None:
            orders.on_episode(episode)
        if not stopped and self._prefix(episode.task_hash).add(job.index, episode.reward):
            self._cancel_behind_cut(episode.task_hash)

    def _cancel_behind_cut(self, task_hash: str) -> None:
        prefix = self._prefix(task_hash)
        for (other, index), running in list(self._running.items()):
            if other == task_hash and prefix.leaves_out(index):
                running.cancel()

    async def _end_at_deadline(self) -> None:
        if self._orders.deadline_s is None:
            return
        await self._orders.clock.sleep_s(self._orders.deadline_s)
        self._over = "deadline", f"the run's {self._orders.deadline_s:g} s were over"
        for running in list(self._running.values()):
            running.cancel()

    def _refusal(self, job: Job) -> Failure | None:
        """Return why a rollout is not run; None where it is to be."""
        if self._over is not None:
            return _stop(*self._over)
        if self._prefix(job.task.task_hash).leaves_out(job.index):
            return _stop(ENOUGH, "the group's stop rule held")
        return self._orders.faults.refusal(job.task.task_hash)

    def _prefix(self, task_hash: str) -> Prefix:
        if task_hash not in self.prefixes:
            self.prefixes[task_hash] = Prefix(self._orders.stop)
        return self.prefixes[task_hash]

    def _stopped(self, job: Job, failure: Failure) -> Episode:
        return Episode(
            task_id=job.task.task_id,
            task_hash=job.task.task_hash,
            policy_id=self._orders.policy.policy_id,
            index=job.index,
            reward=None,
            failure=failure,
            started_s=self._orders.clock.now_s(),
            seed=job.seed,
        )

    def _note(self, episode: Episode) -> None:
        if self._orders.collects:
            self.ended[episode.key] = episode

    async def _keep_best(self, outcome: Outcome) -> Episode:
        """Write an episode, and let go of the final state that is not the best one of its group any more."""
        episode = outcome.episode
        if episode.final_snapshot_id is None:
            await self._write(outcome)
            self._note(episode)
            return episode
        former = self._best.get(episode.task_hash)
        best = self._best[episode.task_hash] = _better(former, episode)
        loser = former if best is episode else episode
        if loser is not None:
            with contextlib.suppress(WorldforkError):
                await AsyncSandbox.delete_snapshot(str(loser.final_snapshot_id))
        if loser is episode:
            episode = replace(episode, final_snapshot_id=None)
        elif loser is not None:
            without = replace(loser, final_snapshot_id=None)
            await self._write(Outcome(without))
            self._note(without)
        await self._write(replace(outcome, episode=episode))
        self._note(episode)
        return episode

    async def _write(self, outcome: Outcome) -> None:
        if self._orders.journal is None:
            return
        self._unwritten.append(outcome)
        async with self._writing:
            if outcome in self._unwritten:
                await to_its_end(self._write_batch())

    async def _write_batch(self) -> None:
        batch = list(self._unwritten)
        await in_thread(self._store, batch)
        # What could not be written stays, so that nobody takes it for written.
        self._unwritten = self._unwritten[len(batch) :]

    def _store(self, batch: Sequence[Outcome]) -> None:
        """Write what ended; first what the episodes name. Blocking."""
        if self._orders.journal is None:
            return
        if self._orders.run is not None:
            self._orders.run.put(blob for outcome in batch for blob in outcome.blobs)
        self._orders.journal.append([outcome.episode for outcome in batch])


def _stop(code: str, message: str) -> Failure:
    return Failure(FailureKind.STOPPED, code, message)


def _better(one: Episode | None, other: Episode) -> Episode:
    """Return the better of two; of equal ones the first by index, whichever ended first."""
    if one is None:
        return other
    return max(one, other, key=lambda each: (each.reward if each.reward is not None else -1.0, -each.index))
