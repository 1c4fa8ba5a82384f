"""One attempt at one rollout, stage by stage, each with a budget and failures of its own.

start -> the policy's turn -> end of its sandbox, what it left is read -> grading elsewhere -> clearing away

Faults of ours become a failure with a kind and no reward; what the policy's own processes brought upon its sandbox is
scored as what it is worth. Only cancellation passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import OutOfSpace, SandboxDied, VerifierError, WorldforkError
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import Edits
from worldfork.records.episode import Episode, Failure, FailureKind, Timings
from worldfork.records.task import Task
from worldfork.records.trajectory import Trajectory
from worldfork.reward.carry import Carried, carry_out
from worldfork.reward.patching import diff_of
from worldfork.reward.verifier import Case, Grade, Start, Verifier, checked_reward, gradings_of
from worldfork.rollout.bounds import TurnOver, bounded
from worldfork.rollout.faults import FaultRules, blame, failure_of, pause_after
from worldfork.rollout.leftovers import end_label
from worldfork.rollout.recording import RecordedSandbox, Recorder
from worldfork.rollout.run_directory import trajectory_bytes
from worldfork.rollout.turn import Agent, Turn
from worldfork.store.faultpoints import fault

READING = 10
"""How many times the budget of a stop reading may take, which is bounded by what may be carried: a backstop."""


@dataclass(frozen=True)
class Which:
    """Which attempt at which rollout."""

    task: Task
    policy_id: str
    index: int
    """The place within the group, from 0; the fork's index."""
    seed: int | None = None
    """None: what follows from task and index alone."""
    attempt: int = 1
    faults: tuple[str, ...] = ()
    group_id: str = ""


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
    """Whether the end of a scored rollout is kept as a snapshot; whoever asked deletes it."""


@dataclass(frozen=True)
class Outcome:
    """An episode, and what it names."""

    episode: Episode
    blobs: tuple[bytes, ...] = ()
    """What `edits`, `diff` and `trajectory` of the episode are the digests of."""
    acted: bool = False
    """Whether the policy's turn is over and what it left is known: then it need not act again."""


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
        self._diff: bytes | None = None
        self._acted = False

    @property
    def task(self) -> Task:
        """The problem."""
        return self.which.task

    @property
    def sandbox(self) -> AsyncSandbox | None:
        """Where the policy acts, once it is there."""
        return self._sandbox

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

    def time_turn(self, policy_s: float) -> None:
        """Take note of how long a turn was that was taken elsewhere."""
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
            await self._take_turn(policy, self._sandbox)
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
                await self._drop()

    async def _carry_out(self, sandbox: AsyncSandbox) -> None:
        keeps, start_id = self.setting.keep_end, self.setting.start.snapshot_id
        level, label = ("local", f"end of {self._sandbox_id}") if keeps else ("volatile", end_label())
        carried = await carry_out(sandbox, self.task, start_snapshot_id=start_id, level=level, label=label)
        self._carried, self.edits, self.end_snapshot_id = carried, carried.edits, carried.end_snapshot_id

    async def _drop(self) -> None:
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
        # Calibration may come first; each of its runs has the same limits.
        once_s = limits.start_wall_s + limits.rebuild_wall_s + limits.grade_wall_s + limits.stop_wall_s
        longest_s = 4 * once_s * gradings_of(self.setting.verifier)
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
        keeps = self.setting.keep_end and self.failure is None and self.grade is not None
        with contextlib.suppress(WorldforkError, OSError, TimeoutError):
            # What is not cleared away in time here is swept by the next who opens the home.
            async with asyncio.timeout(self.task.limits.stop_wall_s):
                fault("rollout:clear")
                await self._holds.aclose()
                if not keeps:
                    await self._drop()
        if not keeps:
            self.end_snapshot_id = None
        self._timings = replace(self._timings, stop_s=self.setting.clock.monotonic_s() - began_s)

    async def describe(self) -> None:
        """Make the diff of what was left, for people; an episode without one is whole."""
        edits = self.edits
        if edits is None or edits.empty:
            return
        with contextlib.suppress(WorldforkError, OSError):
            # What a policy left may take seconds to compare, and the starting state lies on the disk.
            self._diff = await in_thread(lambda: diff_of(self.setting.start.originals, edits))

    def stop(self, code: str, message: str) -> None:
        """Take the attempt as given up because the run is over."""
        self.failure, self.grade = Failure(FailureKind.STOPPED, code, message), None

    def outcome(self) -> Outcome:
        """Return the episode as it stands."""
        trajectory = self.recorder.trajectory()
        edits = None if self.edits is None else self.edits.to_bytes()
        diff = self._diff
        record = _record(trajectory)
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
            sandbox_id=self._sandbox_id,
            verifier_id=self.setting.verifier.verifier_id,
            trust=self.setting.verifier.trust,
            seed=self._seed,
            attempt=self.which.attempt,
            faults=(*self.which.faults, *self.judge_faults),
            edits=_digest(edits),
            diff=_digest(diff),
            trajectory=_digest(record),
            final_snapshot_id=self.end_snapshot_id,
            group_id=self.which.group_id,
        )
        if grade is not None:
            episode = graded(episode, grade)
        return Outcome(episode, tuple(blob for blob in (edits, diff, record) if blob is not None), self._acted)

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

    async def _take_turn(self, policy: Agent, sandbox: AsyncSandbox) -> None:
        """Let the policy act, and note how its turn ended.

        A program that meets the state of its own sandbox in an error has ended its turn by what it did there. Any other
        error is one of the program on the host.
        """
        # Said by the class that the library ships, not by a name: many call a frozen model so.
        tells = getattr(policy, "tells_solution", False) is True
        solution = self.setting.start.solution if tells else None
        turn = Turn(self.which.index, sandbox.seed, self.recorder, solution)
        try:
            await bounded(policy.agent(RecordedSandbox(sandbox, self.recorder), self.task, turn), self._turn_s())
        except TurnOver:
            self.policy_end = "timed_out"
        except Exception as error:
            self.failure = await blame(sandbox, error, FailureKind.POLICY)
            own = error.code if isinstance(error, WorldforkError) else SandboxDied.code
            self.policy_end = own if self.failure is None else self.failure.code

    def _turn_s(self) -> float:
        return self.task.limits.policy_wall_s

    async def _lost_memory(self, sandbox: AsyncSandbox) -> bool:
        """Fail where the host, short of memory, killed a process of a sandbox that was within its limit."""
        if not (await sandbox.limit_hits()).host_memory:
            return False
        self.failure = Failure(
            FailureKind.MEMORY, "host_memory", "the host ended a process for memory that was within its limit"
        )
        return True


def graded(episode: Episode, grade: Grade) -> Episode:
    """Return a scored episode with what a verifier said."""
    return replace(
        episode,
        reward=grade.reward,
        failure=None,
        parts=dict(grade.parts),
        expected=grade.expected,
        passed=grade.passed,
        failed=grade.failed,
        untouched=grade.untouched,
        grade_end=grade.end,
        grading_sandbox_id=grade.sandbox_id,
        trust=grade.trust,
    )


def checked_grade(grade: Grade, verifier: Verifier) -> Grade:
    """Return a grade with a reward that is one, or fail."""
    if not isinstance(grade, Grade):
        raise VerifierError(f"{verifier.verifier_id} gave {type(grade).__name__} as a grade", kind=FailureKind.GRADING)
    parts = {str(name): checked_reward(part, f"the part {name!r}") for name, part in grade.parts.items()}
    return replace(grade, reward=checked_reward(grade.reward, verifier.verifier_id), parts=parts)


def _record(trajectory: Trajectory) -> bytes | None:
    if not trajectory.steps and not trajectory.facts:
        return None
    try:
        return trajectory_bytes(trajectory)
    except (TypeError, ValueError, RecursionError):
        # What a policy's program told of itself must not cost it its reward.
        return trajectory_bytes(Trajectory(truncated=True))


def _digest(blob: bytes | None) -> str | None:
    return None if blob is None else hashlib.sha256(blob).hexdigest()
