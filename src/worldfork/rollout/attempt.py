"""One attempt at one rollout, stage by stage, each with a budget and failures of its own.

start -> the policy's turn -> end of its sandbox, what it left is read -> grading elsewhere -> clearing away

Faults of ours become a failure with a kind and no reward; what the policy's own processes brought upon its sandbox is
scored as what it is worth. Only cancellation passes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import OutOfSpace, SandboxDied, WorldforkError
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import Edits
from worldfork.records.episode import Episode, Failure, FailureKind, Timings
from worldfork.records.task import Task
from worldfork.reward.carry import Carried, carry_out
from worldfork.reward.verifier import Case, Grade, Start, Verifier, gradings_of
from worldfork.rollout.acting import take_turn
from worldfork.rollout.clearing import Clearing
from worldfork.rollout.contents import told_of
from worldfork.rollout.faults import FaultRules, blame, failure_of, pause_after
from worldfork.rollout.leftovers import end_label
from worldfork.rollout.outcome import Outcome, Pieces, Which, checked_grade, digest_of, graded, pieces_of
from worldfork.rollout.recording import Recorder
from worldfork.rollout.turn import Agent, Turn
from worldfork.store.faultpoints import fault

READING = 10
"""How many times the budget of a stop reading may take, which is bounded by what may be carried: a backstop."""

HOST_MEMORY = "host_memory"
"""The code of a failure that no second look at the same turn mends."""


@dataclass(frozen=True)
class Setting:
    """What the attempts of a run share."""

    start: Start
    verifier: Verifier
    clock: Clock = field(default_factory=SystemClock)
    gradings: asyncio.Semaphore | None = None
    """How many may be graded at a time."""
    rules: FaultRules = field(default_factory=FaultRules)
    """How often a grading is tried again."""
    keep_end: bool = False
    """Whether the end of a scored rollout is kept as a snapshot; whoever asked settles or deletes it."""
    book: Path | None = None
    """What will name the states at the end, as of `leftovers.end_label`."""
    holds_end: bool = False
    """Whether one that could not be read stays: whoever asks next finds it by its book."""
    clearing: Clearing = field(default_factory=Clearing)


class Attempt:
    """One attempt. Each stage is called once, in order; `clear` in any case."""

    def __init__(self, which: Which, setting: Setting) -> None:
        self.which = which
        self.setting = setting
        self.failure: Failure | None = None
        self.policy_end = "finished"
        self.recorder = Recorder(setting.clock)
        self.edits: Edits | None = None
        self.end_snapshot_id: str | None = None
        self.grade: Grade | None = None
        self.judge_faults: tuple[str, ...] = ()
        """Kinds of the failures of the gradings before."""
        self._sandbox: AsyncSandbox | None = None
        self._sandbox_id: str | None = None
        self._seed = which.seed
        self._timings = Timings()
        self._started_s = setting.clock.now_s()
        self._began_s = setting.clock.monotonic_s()
        self._holds = contextlib.AsyncExitStack()
        self._carried: Carried | None = None
        self._pieces = Pieces()
        self._start_content: str | None = None
        self._acted = False

    @property
    def task(self) -> Task:
        """The problem."""
        return self.which.task

    async def begin(self) -> None:
        """Fork the starting state."""
        async with self._stage(FailureKind.FORK, self.task.limits.start_wall_s, "a start", "fork_s"):
            fault("rollout:fork")
            fork = self.setting.start.fork(self.which.index, seed=self.which.seed)
            self.adopt(await self._holds.enter_async_context(fork))

    def adopt(self, sandbox: AsyncSandbox) -> None:
        """Take a sandbox that was forked elsewhere as the one in which the policy acts."""
        self._sandbox = sandbox
        self._sandbox_id = sandbox.sandbox_id
        self._seed = sandbox.seed

    def time_turn(self, began_s: float, ended_s: float | None = None) -> None:
        """Take note of a turn that was taken elsewhere.

        Args:
            began_s, ended_s: seconds since the Unix epoch; by default it ended now.
        """
        now_s = self.setting.clock.now_s()
        policy_s = max(0.0, (now_s if ended_s is None else ended_s) - began_s)
        self._started_s, self._began_s = began_s, self.setting.clock.monotonic_s() - max(0.0, now_s - began_s)
        self._timings = replace(self._timings, policy_s=policy_s, commands_s=self.recorder.commands_s)

    def recall(self, sandbox_id: str, seed: int | None, policy_end: str, left: Carried | None) -> None:
        """Take up where the policy's sandbox is over and read: `left` is what it left, None for nothing."""
        self._sandbox_id, self._seed, self.policy_end = sandbox_id, seed, policy_end
        self._carried = None
        if left is not None:
            self.edits, self.end_snapshot_id = left.edits, left.end_snapshot_id or None
            self._carried = left if left.end_snapshot_id else None

    async def act(self, policy: Agent) -> None:
        """Let the policy take its turn."""
        if self.failure is not None or self._sandbox is None:
            return
        async with self._stage(FailureKind.POLICY, None, "", "policy_s"):
            fault("rollout:policy")
            # Said by the class that the library ships, not by a name: many call a frozen model so.
            tells = getattr(policy, "tells_solution", False) is True
            solution = self.setting.start.solution if tells else None
            turn = Turn(self.which.index, self._sandbox.seed, self.recorder, solution)
            end = await take_turn(policy, self._sandbox, self.task, turn)
            self.policy_end, self.failure = end.policy_end, end.failure
        self._timings = replace(self._timings, commands_s=self.recorder.commands_s)

    async def carry(self) -> None:
        """End the policy's sandbox and everything in it, and read what it left."""
        if self.failure is not None or self._sandbox is None:
            return
        longest_s = READING * self.task.limits.stop_wall_s
        async with self._stage(FailureKind.CARRY, longest_s, "reading what was left", "carry_s"):
            fault("rollout:carry")
            if await self._lost_memory(self._sandbox):
                return
            try:
                await self._carry_out(self._sandbox)
            except (SandboxDied, OutOfSpace) as error:
                self.failure = await blame(self._sandbox, error, FailureKind.CARRY)
                self.policy_end = error.code
        self._acted = self.failure is None
        if not self.setting.keep_end and not self.setting.verifier.needs_end:
            # Before the grading, which takes longest: a process that is killed leaves less behind.
            with contextlib.suppress(WorldforkError, OSError):
                await self.drop()

    async def _carry_out(self, sandbox: AsyncSandbox) -> None:
        keeps, start_id = self.setting.keep_end, self.setting.start.snapshot_id
        level, label = "local" if keeps else "volatile", end_label(self.setting.book)
        carried = await carry_out(
            sandbox,
            self.task,
            start_snapshot_id=start_id,
            level=level,
            label=label,
            holds=self.setting.holds_end,
        )
        self._carried, self.edits, self.end_snapshot_id = carried, carried.edits, carried.end_snapshot_id

    async def drop(self) -> None:
        """Let go of the state at the end. Idempotent."""
        if self._carried is not None:
            await self._carried.drop()
        self._carried = self.end_snapshot_id = None

    async def judge(self) -> None:
        """Grade what was left, and again after faults of ours as the rules allow; the policy need not act again."""
        if self.failure is not None or self._sandbox_id is None:
            return
        kinds: tuple[FailureKind, ...] = ()
        while True:
            self.failure = await self._judge_once()
            if self.failure is None:
                return
            kinds = (*kinds, self.failure.kind)
            pause_s = pause_after(self.setting.rules, kinds)
            if pause_s is None:
                return
            self.judge_faults = tuple(kind.value for kind in kinds)
            await self.setting.clock.sleep_s(pause_s)

    async def _judge_once(self) -> Failure | None:
        limits = self.task.limits
        self.failure = None
        # Each run has the same limits: up to four of a calibration may come first, and what is in doubt is run thrice.
        once_s = limits.start_wall_s + limits.rebuild_wall_s + limits.grade_wall_s + limits.stop_wall_s
        longest_s = 7 * once_s * gradings_of(self.setting.verifier)
        async with self.setting.gradings or contextlib.nullcontext():
            async with self._stage(FailureKind.GRADING, longest_s, "a grading", "grade_s"):
                fault("rollout:grade")
                verifier, case = self.setting.verifier, self.case()
                grade = await (verifier.grade_nothing(case) if self.edits is None else verifier.grade(case))
                self.grade = checked_grade(grade, verifier)
        if self.grade is not None:
            # Whatever else the stage took was for learning how to grade.
            waited_s = (self._timings.grade_s or 0.0) - self.grade.grade_s
            self._timings = replace(
                self._timings,
                calibrate_s=max(self.grade.calibrate_s, waited_s),
                grade_s=self.grade.grade_s,
                grade_cpu_s=self.grade.cpu_s,
            )
        return self.failure

    def case(self) -> Case:
        """Return what the verifier is given."""
        return Case(
            self.task,
            self.setting.start,
            self.edits or Edits(),
            fork_id=self._sandbox_id or "",
            index=self.which.index,
            attempt=self.which.attempt,
            end_snapshot_id=self.end_snapshot_id if self.setting.verifier.needs_end else None,
            trajectory=self.recorder.trajectory(),
        )

    async def clear(self) -> None:
        """Clear away the sandbox, and the state at its end unless it is to be kept. Idempotent; bounded."""
        began_s = self.setting.clock.monotonic_s()
        left = None
        if not self._keeps:
            left, self._carried, self.end_snapshot_id = self._carried, None, None

        async def work() -> None:
            fault("rollout:clear")
            await self._end_sandbox()
            if left is not None:
                await left.drop()

        await self.setting.clearing.do(work, self.task.limits.stop_wall_s, self._sandbox_id or "a start that failed")
        self._timings = replace(self._timings, stop_s=self.setting.clock.monotonic_s() - began_s)

    @property
    def _keeps(self) -> bool:
        return self.setting.keep_end and self.failure is None and self.grade is not None

    async def _end_sandbox(self) -> None:
        try:
            await self._holds.aclose()
        except Exception:
            if self._sandbox is not None:
                # Whoever tries again finds it there.
                self._holds.push_async_callback(self._sandbox.terminate)
            raise

    async def describe(self) -> None:
        """Put into bytes what the episode is to name, and make the diff for people; one without a diff is whole."""
        trajectory = self.recorder.trajectory()
        # What a policy left may take seconds to put together, and the starting state lies on the disk.
        self._pieces = await in_thread(lambda: pieces_of(self.edits, self.setting.start, trajectory))
        self._start_content = await in_thread(lambda: told_of(self.setting.start, quick=True))

    def stop(self, code: str, message: str) -> None:
        """Take the attempt as given up because the run is over."""
        self.failure, self.grade = Failure(FailureKind.STOPPED, code, message), None

    def outcome(self) -> Outcome:
        """Return the episode as it stands."""
        pieces = self._pieces
        grade = None if self.failure else self.grade
        total_s = self.setting.clock.monotonic_s() - self._began_s
        failure = self.failure
        if failure is None and grade is None:
            failure = Failure(FailureKind.INTERNAL, "internal", "the attempt came to no end")
        episode = Episode(
            task_id=self.task.task_id,
            task_hash=self.task.task_hash,
            policy_id=self.which.policy_id,
            index=self.which.index,
            reward=None if grade is None else grade.reward,
            failure=failure,
            policy_end=self.policy_end,
            started_s=self._started_s,
            timings=replace(self._timings, total_s=total_s),
            snapshot_id=self.setting.start.snapshot_id,
            start_content=self._start_content,
            sandbox_id=self._sandbox_id,
            verifier_id=self.setting.verifier.verifier_id,
            trust=self.setting.verifier.trust,
            seed=self._seed,
            attempt=self.which.attempt,
            faults=(*self.which.faults, *self.judge_faults),
            edits=digest_of(pieces.edits),
            diff=digest_of(pieces.diff),
            trajectory=digest_of(pieces.trajectory),
            final_snapshot_id=self.end_snapshot_id if self._keeps else None,
            group_id=self.which.group_id,
            rollout_id=self.which.rollout_id,
        )
        if grade is not None:
            episode = graded(episode, grade, self.edits)
        return Outcome(episode, pieces.all, self._acted)

    @contextlib.asynccontextmanager
    async def _stage(self, kind: FailureKind, budget_s: float | None, what: str, timing: str) -> AsyncIterator[None]:
        """Do one stage: its time is taken, what breaks in it is the failure of the attempt."""
        clock = self.setting.clock
        began_s = clock.monotonic_s()
        try:
            async with asyncio.timeout(budget_s) as limit:
                yield
        except Exception as error:
            if limit.expired() and isinstance(error, TimeoutError):
                self.failure = Failure(FailureKind.LIMIT, "limit", f"{what} took more than {budget_s:g} s")
            else:
                self.failure = failure_of(kind, error)
        finally:
            self._timings = replace(self._timings, **{timing: clock.monotonic_s() - began_s})

    async def _lost_memory(self, sandbox: AsyncSandbox) -> bool:
        """Fail where the host, short of memory, killed a process of a sandbox that was within its limit."""
        if not (await sandbox.limit_hits()).host_memory:
            return False
        self.failure = Failure(
            FailureKind.MEMORY, HOST_MEMORY, "the host ended a process for memory that was within its limit"
        )
        return True
