"""How an open rollout ends: what its policy left is carried out, graded and written down, then all is cleared away.

Each step is in the ledger before the next begins, so that whoever asks next goes on where the last one was stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace

from worldfork.core.clock import SystemClock
from worldfork.core.errors import Locked, SandboxDied, WorldforkError
from worldfork.core.shielded import to_its_end
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.endings import clear_away, see_end
from worldfork.lineage.place import place
from worldfork.records.death import DeathCause
from worldfork.records.episode import Episode, Failure, FailureKind
from worldfork.records.sandbox import SandboxStatus
from worldfork.records.snapshot import SnapshotRecord
from worldfork.records.task import Task
from worldfork.reward.carry import Carried, read_out
from worldfork.reward.verifier import Verifier
from worldfork.rollout.attempt import HOST_MEMORY, Attempt, Setting
from worldfork.rollout.clearing import clearing_of_loop
from worldfork.rollout.faults import RETRIES, failure_of, fault_of, pause_after
from worldfork.rollout.judges import cpus
from worldfork.rollout.ledger import End, Facts, Ledger
from worldfork.rollout.leftovers import ends_of, let_go, settle, wait_lasting
from worldfork.rollout.outcome import Outcome, Which
from worldfork.rollout.recording import Recorder
from worldfork.rollout.run_directory import RunDirectory
from worldfork.rollout.starts import StartingState, StartingStates

_DEATH_S = 2.0
"""How long another process waits for the one that started a sandbox to tell how it ended."""
_JOURNAL_S = 30.0
"""How long to wait for others who add to the same run."""
_POLL_S = 0.02
_CLOSED = Failure(FailureKind.STOPPED, "closed", "it was closed before it was graded")

_log = logging.getLogger("worldfork")
_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


class Ending:
    """The end of one open rollout, as one handle sees it. Its caller holds the ledger's turn."""

    def __init__(
        self, ledger: Ledger, facts: Facts, task: Task, sandbox: AsyncSandbox | None, start: StartingState | None
    ) -> None:
        self._ledger = ledger
        self._facts = facts
        self._task = task
        self._sandbox = sandbox
        self._start = start
        self._which = Which(
            task,
            facts.policy_id,
            facts.index,
            facts.seed,
            facts.attempt,
            group_id=facts.group_id,
            rollout_id=facts.sandbox_id,
        )

    async def grade(self, verifier: Verifier, recorder: Recorder, policy_end: str, *, keep: bool) -> Episode:
        """Return the episode, and write it down unless asking again could give another.

        Args:
            verifier: what grades.
            recorder: what this handle recorded, where nobody else's is known.
            policy_end: how the policy's turn ended.
            keep: whether the state at the end stays.

        Raises:
            OSError: nothing can be written down.
        """
        try:
            start = self._start = self._start or await self._find_start()
        except Exception as error:
            return self._which.failed(failure_of(FailureKind.START, error), self._facts.opened_s)
        setting = Setting(
            start,
            verifier,
            gradings=_gate(),
            keep_end=keep,
            book=self._ledger.path,
            holds_end=True,
            clearing=clearing_of_loop(),
        )
        attempt = Attempt(self._which, setting)
        attempt.recorder = await self._recorded(recorder)
        lost = await self._take_end(attempt, policy_end)
        attempt.time_turn(self._facts.opened_s, self._ledger.ending_s)
        if lost is not None:
            episode = self._which.failed(lost, self._facts.opened_s)
            if await self._may_ask_again(lost):
                return episode
            return await to_its_end(self._give_up(Outcome(episode)))
        # Where this is cancelled or fails for our reasons, the state at the end stays for the next who asks.
        await attempt.judge()
        if attempt.failure is not None and attempt.failure.kind in RETRIES:
            return attempt.outcome().episode
        await attempt.describe()
        return await to_its_end(self._conclude(attempt))

    async def clear(self) -> None:
        """End the sandbox, and let go of what only a grading would need; without an episode there will be none."""
        here = place()
        try:
            if await here.work(self._ledger.episode) is None:
                closed = self._which.failed(_CLOSED, self._facts.opened_s)
                await here.work(lambda: self._ledger.set_episode(closed))
                await let_go([record.snapshot_id for record in await here.work(self._left)])
        finally:
            # Whatever can be written: on a disk that is full, this is what makes room.
            await self._end_sandbox()
        await here.work(self._ledger.forget_end)

    async def add_to_run(self, wait_s: float = 0.0) -> None:
        """Add the episode to its run where that is still to be done; what cannot be now is done when next asked for."""
        here = place()
        try:
            blobs = None if self._facts.run is None else await here.work(self._ledger.to_add)
            episode = None if blobs is None else await here.work(self._ledger.episode)
            if self._facts.run is None or blobs is None or episode is None:
                return
            await self._add(RunDirectory(self._facts.run), Outcome(episode, tuple(blobs)), wait_s)
            await here.work(self._ledger.set_added)
        except (WorldforkError, OSError) as error:
            _log.warning("the episode of %s is not in %s yet: %s", self._facts.sandbox_id, self._facts.run, error)

    async def _end_sandbox(self) -> None:
        sandbox = self._sandbox
        if sandbox is not None:
            limit_s = self._task.limits.stop_wall_s
            await clearing_of_loop().do(lambda: clear_away(sandbox), limit_s, self._facts.sandbox_id)

    async def _give_up(self, outcome: Outcome) -> Episode:
        episode = await self._settle(outcome)
        await self._end_sandbox()
        return episode

    async def _conclude(self, attempt: Attempt) -> Episode:
        # In this order: a process that dies in between leaves nothing that names a state which is gone.
        episode = await self._settle(attempt.outcome())
        await attempt.clear()
        return episode

    async def _settle(self, outcome: Outcome) -> Episode:
        """Write down what is final: first where it is to stay, and before that what it names."""
        episode = outcome.episode
        if episode.final_snapshot_id is not None:
            try:
                await wait_lasting(episode.final_snapshot_id)
            except (WorldforkError, OSError) as error:
                _log.warning("the state at the end of %s is not kept: %s", episode.sandbox_id, error)
                await let_go([episode.final_snapshot_id])
                episode = replace(episode, final_snapshot_id=None)
        # Here first, and with what it names: whatever the run says to it, nobody has to grade again.
        await place().work(lambda: self._write_down(episode, outcome.blobs))
        await self.add_to_run(_JOURNAL_S)
        if episode.final_snapshot_id is not None:
            await settle({episode.final_snapshot_id: episode.sandbox_id})
        return episode

    def _write_down(self, episode: Episode, blobs: Sequence[bytes]) -> None:
        if self._facts.run is not None:
            self._ledger.set_to_add(blobs)
        self._ledger.set_episode(episode)

    async def _add(self, run: RunDirectory, outcome: Outcome, wait_s: float) -> None:
        tries = 1 + round(wait_s / _POLL_S)
        for left in reversed(range(tries)):
            try:
                await in_thread(run.add, self._task, outcome.episode, outcome.blobs)
                return
            except Locked:
                if not left:
                    raise
                await asyncio.sleep(_POLL_S)

    async def _find_start(self) -> StartingState:
        world = None if self._facts.world is None else await AsyncSandbox.get_snapshot(self._facts.world)
        states, start_id = await StartingStates.open(world), self._facts.start_snapshot_id
        return await (states.get(self._task) if start_id is None else states.at(start_id, self._task))

    async def _recorded(self, recorder: Recorder) -> Recorder:
        """Return what all handles recorded, those of other processes too."""
        recorder.trajectory()
        found = Recorder()
        await place().work(lambda: found.replay(self._ledger.steps()))
        return found if found.trajectory().steps else recorder

    async def _take_end(self, attempt: Attempt, policy_end: str) -> Failure | None:
        """Do as `_carry`, and again after faults of a moment as the rules allow."""
        kinds: tuple[FailureKind, ...] = ()
        while True:
            attempt.policy_end = policy_end
            # What was begun is brought to its end even for a caller that is gone: half of it would look like a death.
            lost = await to_its_end(self._carry(attempt))
            if lost is None or not await self._may_ask_again(lost):
                return lost
            kinds = (*kinds, lost.kind)
            pause_s = pause_after(attempt.setting.rules, kinds)
            if pause_s is None:
                return lost
            await attempt.setting.clock.sleep_s(pause_s)

    async def _may_ask_again(self, lost: Failure) -> bool:
        """Whether what the policy left can be had yet, although it could not be now."""
        if lost.kind not in RETRIES or lost.code == HOST_MEMORY:
            return False
        return await self._lives() or bool(await place().work(self._left))

    def _left(self) -> list[SnapshotRecord]:
        """Return the state at the end, where one was taken and is not graded yet."""
        return ends_of(self._ledger.path) if self._ledger.ending_s is not None else []

    async def _lives(self) -> bool:
        return self._sandbox is not None and await self._sandbox.status() is SandboxStatus.RUNNING

    async def _carry(self, attempt: Attempt) -> Failure | None:
        """Let an attempt have what the policy left; return why there is nothing to be had."""
        here = place()
        end = await here.work(self._ledger.end)
        if end is None:
            lost = await self._carry_out(attempt)
            if lost is not None:
                return lost
            end = End(attempt.edits, attempt.end_snapshot_id, attempt.policy_end)
            await here.work(lambda: self._ledger.set_end(end))
        left = None if end.edits is None else Carried(end.edits, end.end_snapshot_id or "")
        attempt.recall(self._facts.sandbox_id, self._facts.seed, end.policy_end, left)
        return None

    async def _carry_out(self, attempt: Attempt) -> Failure | None:
        here, lives = place(), await self._lives()
        if self._ledger.ending_s is not None and not lives:
            # Whoever stopped it did not come to write down what was left.
            left = await here.work(self._left)
            if left:
                return await self._read_out(attempt, left[0].snapshot_id)
        if self._sandbox is None or (self._ledger.ending_s is not None and not lives):
            attempt.policy_end = SandboxDied.code
            return await self._why_gone()
        if lives:
            try:
                await here.work(lambda: self._ledger.set_ending(SystemClock().now_s()))
            except OSError as error:
                return failure_of(FailureKind.CARRY, error)
        attempt.adopt(self._sandbox)
        await attempt.carry()
        lost, attempt.failure = attempt.failure, None
        if lost is not None and lost.kind is FailureKind.LOST:
            return await self._why_gone()
        return lost

    async def _read_out(self, attempt: Attempt, end_snapshot_id: str) -> Failure | None:
        start_id = attempt.setting.start.snapshot_id
        try:
            found = await read_out(end_snapshot_id, self._task, start_snapshot_id=start_id)
        except Exception as error:
            return failure_of(FailureKind.CARRY, error)
        attempt.edits, attempt.end_snapshot_id = found.edits, found.end_snapshot_id
        return None

    async def _why_gone(self) -> Failure | None:
        """Return the fault of ours that ended the sandbox; None where it was the policy's own doing."""
        if self._ledger.closed:
            return _CLOSED
        for _ in range(round(_DEATH_S / _POLL_S)):
            death = await place().work(self._ledger.death)
            if death is not None:
                if death.cause is DeathCause.ENDED and self._ledger.ending_s is not None:
                    break
                return fault_of(death)
            await asyncio.sleep(_POLL_S)
        if SystemClock().now_s() >= self._facts.ends_s:
            return Failure(FailureKind.LIMIT, "lease", "its lease was over before it was graded")
        return Failure(FailureKind.LOST, SandboxDied.code, "its sandbox is gone, and how it ended is not known here")


async def note_death(ledger: Ledger, sandbox: AsyncSandbox) -> None:
    """Write down how a sandbox ends, once it has."""
    with contextlib.suppress(WorldforkError, OSError):
        death = await see_end(sandbox)
        if death is not None:
            await in_thread(ledger.set_death, death)


def _gate() -> asyncio.Semaphore:
    """Return what bounds the gradings of this event loop: beyond its CPUs they only slow each other down."""
    loop = asyncio.get_running_loop()
    if loop not in _gates:
        _gates[loop] = asyncio.Semaphore(cpus())
    return _gates[loop]
