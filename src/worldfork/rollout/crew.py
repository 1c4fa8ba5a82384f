"""The rollouts of one run: a few at a time, tried again where a fault of ours allows it, written as they end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from worldfork.core.shielded import to_its_end
from worldfork.core.threads import in_thread
from worldfork.records.episode import Episode, Failure, FailureKind
from worldfork.rollout.attempt import Setting
from worldfork.rollout.clearing import Clearing
from worldfork.rollout.faults import failure_of
from worldfork.rollout.journal import Key
from worldfork.rollout.kept import FinalStates
from worldfork.rollout.leftovers import let_go
from worldfork.rollout.orders import Job, Orders
from worldfork.rollout.outcome import Outcome, Which
from worldfork.rollout.rollout import run_rollout
from worldfork.rollout.stopping import ENOUGH, Prefix
from worldfork.store.faultpoints import fault

_TOGETHER = 256


class Crew:
    """Does the jobs of one run. For one call."""

    def __init__(self, orders: Orders) -> None:
        self.ended: dict[Key, Episode] = {}
        self._known: dict[Key, Episode] = {}
        self._orders = orders
        self._gradings = asyncio.Semaphore(orders.gradings)
        self._prefixes: dict[str, Prefix] = {}
        self._running: dict[tuple[str, int], asyncio.Task[Outcome]] = {}
        self._over: tuple[str, str] | None = None
        self._states = FinalStates(orders.keep, self._prefix)
        self._clearing = Clearing()
        self._unwritten: list[Outcome] = []
        # Guards the journal: one batch is written at a time, and holds whatever ended meanwhile.
        self._writing = asyncio.Lock()

    async def know(self, episodes: Sequence[Episode]) -> None:
        """Take what an earlier call of this run finished.

        Raises:
            StoreError: it could not be written down whose their final states are now.
        """
        for episode in episodes:
            self._known[episode.key] = episode
            self._prefix(episode.task_hash).add(episode.index, episode.reward)
        for episode in await self._states.know(list(episodes), self._book):
            self._take_note(Outcome(episode))

    async def work(self, jobs: Sequence[Job], width: int) -> None:
        """Do the jobs, `width` at a time. What ended before an error or a cancellation is in the journal."""
        waiting = iter(jobs)
        deadline = asyncio.ensure_future(self._end_at_deadline())
        whole = False
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(width, len(jobs))):
                    group.create_task(self._take_jobs(waiting))
            whole = True
        except BaseExceptionGroup as errors:
            # Rollouts do not raise; what does is the journal or the caller's own function.
            raise errors.exceptions[0] from None
        finally:
            deadline.cancel()
            await to_its_end(self._end(whole))

    def cut(self, episode: Episode) -> Episode:
        """Return an episode, or that it was not needed where it lies behind its group's cut."""
        if not episode.valid or not self._prefix(episode.task_hash).leaves_out(episode.index):
            return episode
        return Episode(
            task_id=episode.task_id,
            task_hash=episode.task_hash,
            policy_id=episode.policy_id,
            index=episode.index,
            reward=None,
            failure=_ENOUGH,
            started_s=episode.started_s,
            seed=episode.seed,
            attempt=episode.attempt,
            faults=episode.faults,
            group_id=episode.group_id,
        )

    @property
    def _book(self) -> Path | None:
        return None if self._orders.journal is None else self._orders.journal.path

    async def _take_jobs(self, jobs: Iterator[Job]) -> None:
        stopped: list[Outcome] = []
        for job in jobs:
            refused = self._refusal(job)
            if refused is not None:
                # There may be thousands: they are written together.
                stopped.append(self._stopped(job, refused))
            if stopped and (refused is None or len(stopped) == _TOGETHER):
                await to_its_end(self._give_up(stopped))
                stopped = []
            if refused is None:
                # What ended is written and told whatever happens to the run meanwhile.
                await to_its_end(self._finish(await self._do(job)))
        await to_its_end(self._give_up(stopped))

    async def _give_up(self, stopped: Sequence[Outcome]) -> None:
        """Write down rollouts that are not run, or not to their end, and tell them.

        What a run shows of them must not depend on how far each of them came.
        """
        for outcome in stopped:
            self._take_note(outcome)
        await self._write()
        if self._orders.on_episode is not None:
            for outcome in stopped:
                self._orders.on_episode(outcome.episode)

    async def _do(self, job: Job) -> Outcome:
        refused = self._refusal(job)
        if refused is not None:
            # That came meanwhile.
            return self._stopped(job, refused)
        key = job.task.task_hash, job.index
        running = self._running[key] = asyncio.ensure_future(self._try(job))
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            # Siblings are settled, not dropped: each clears its sandbox away before this passes on.
            running.cancel()
            await to_its_end(asyncio.wait({running}))
            if not running.cancelled():
                # It ended in the same moment.
                await to_its_end(self._finish(running.result()))
            raise
        finally:
            self._running.pop(key, None)
        if running.cancelled():
            return self._stopped(job, self._refusal(job) or _stop("cancelled", "the rollout was cancelled"))
        return running.result()

    async def _try(self, job: Job) -> Outcome:
        """Run one rollout, again after a fault of ours as often as the rules allow."""
        orders, faults = self._orders, tuple[FailureKind, ...]()
        while True:
            which = replace(self._which(job), attempt=len(faults) + 1, faults=tuple(kind.value for kind in faults))
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

    def _which(self, job: Job) -> Which:
        policy_id = self._orders.policy.policy_id
        return Which(job.task, policy_id, job.index, job.seed, group_id=f"{job.task.task_hash[:16]}:{policy_id}")

    async def _attempt(self, which: Which) -> Outcome:
        orders = self._orders
        started_s = orders.clock.now_s()
        try:
            setting = Setting(
                await orders.starts.get(which.task),
                orders.verifier_of(which.task),
                orders.clock,
                self._gradings,
                orders.faults.rules,
                keep_end=orders.keep is not None,
                book=self._book,
                clearing=self._clearing,
            )
        except Exception as error:
            return Outcome(which.failed(failure_of(FailureKind.START, error), started_s))
        try:
            return await run_rollout(which, orders.policy, setting)
        except Exception as error:
            # Every fault that is known of has its stage; this one is a defect, and its siblings go on.
            return Outcome(which.failed(failure_of(FailureKind.INTERNAL, error), started_s))

    async def _finish(self, outcome: Outcome) -> None:
        """Write down how a rollout ended, and tell it."""
        orders, episode = self._orders, outcome.episode
        if episode.failure is not None and episode.failure.kind is FailureKind.STOPPED:
            await self._give_up([outcome])
            return
        outcome = await self._states.lasting(outcome)
        episode = self._decide(outcome)
        going = self._states.going()
        await self._write()
        await let_go(going)
        if orders.on_episode is not None:
            if orders.journal is None and orders.keep == "all" and orders.stop is None:
                # Nothing takes it back any more, and nobody but the caller will know of it.
                await self._states.settle(episode)
            orders.on_episode(episode)

    def _decide(self, outcome: Outcome) -> Episode:
        """Let an episode take part in its group, and return it as it is to be told.

        Nothing is waited for here: what is decided later is written later.
        """
        episode = outcome.episode
        if self._prefix(episode.task_hash).add(episode.index, episode.reward):
            self._cancel_behind_cut(episode.task_hash)
        lost = {each.key: each for each in self._states.add(episode)}
        episode = lost.pop(episode.key, episode)
        self._take_note(replace(outcome, episode=episode))
        for other in lost.values():
            self._take_note(Outcome(other))
        return episode

    def _take_note(self, outcome: Outcome) -> None:
        self.ended[outcome.episode.key] = outcome.episode
        self._unwritten.append(outcome)

    async def _end(self, whole: bool) -> None:
        """Bring the run's books into order: what ended is written, what lies behind a cut taken back.

        Args:
            whole: whether the caller hears of what ended; else only the journal and `on_episode` told of it.
        """
        await self._clearing.finish()
        # Those of an earlier call too: which of them it came to take back is a matter of when it was killed.
        late = [each for each in (self._known | self.ended).values() if self.cut(each) is not each]
        for episode in late:
            self._states.take_back(episode)
            self._take_note(Outcome(self.cut(episode)))
        for episode in self._states.decide():
            self._take_note(Outcome(episode))
        going = self._states.going()
        await self._write()
        await let_go(going)
        if whole or self._orders.journal is not None or self._orders.on_episode is not None:
            await self._states.settle()
        else:
            await self._states.forsake()

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
            return _ENOUGH
        return self._orders.faults.refusal(job.task.task_hash)

    def _prefix(self, task_hash: str) -> Prefix:
        if task_hash not in self._prefixes:
            self._prefixes[task_hash] = Prefix(self._orders.stop)
        return self._prefixes[task_hash]

    def _stopped(self, job: Job, failure: Failure) -> Outcome:
        return Outcome(self._which(job).failed(failure, self._orders.clock.now_s()))

    async def _write(self) -> None:
        """Write what waits to be written, with what has come to wait meanwhile."""
        async with self._writing:
            if self._unwritten:
                await to_its_end(self._write_batch())

    async def _write_batch(self) -> None:
        batch = list(self._unwritten)
        if self._orders.journal is not None:
            await in_thread(self._store, batch)
            fault("rollout:written")
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


_ENOUGH = _stop(ENOUGH, "the group's stop rule held")
