"""A rollout whose turn is taken by whoever opened it: for trainers, which own their loop.

::

    async with await open_rollout(task, ttl_s=900) as rollout:
        await rollout.sh("ls")          # the policy's turn, for as long as it likes
        episode = await rollout.grade() # its sandbox ends, what it left is graded elsewhere

It ends with `close`, with its block, with this process unless it was detached, and with its lease in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from pathlib import Path
from typing import Any, Self

from worldfork.core.clock import SystemClock
from worldfork.core.errors import ConfigError, Locked, NotFound, SandboxDied, WorldforkError
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.place import place
from worldfork.lineage.snapshots import SnapshotInfo
from worldfork.records.edits import Edits
from worldfork.records.episode import Episode, Failure, FailureKind
from worldfork.records.task import Task
from worldfork.records.trajectory import Trajectory
from worldfork.reward.carry import Carried
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.verifier import Verifier
from worldfork.rollout.attempt import Attempt, Outcome, Setting, Which
from worldfork.rollout.bounds import to_its_end
from worldfork.rollout.faults import RETRIES, failure_of, fault_of
from worldfork.rollout.judging import cpus, judges
from worldfork.rollout.ledger import End, Facts, Ledger, forget_old
from worldfork.rollout.leftovers import sweep_once
from worldfork.rollout.recording import RecordedSandbox, Recorder
from worldfork.rollout.run_directory import RunDirectory
from worldfork.rollout.starts import StartingState, StartingStates
from worldfork.sandbox.command import CommandResult

DEFAULT_TTL_S = 3600.0
_GRADE_WAIT_S = 86_400.0
"""Each grading has its own limits; this only keeps a forgotten caller from waiting for ever."""

_DEATH_S = 2.0
"""How long another process waits for the one that started a sandbox to tell how it ended."""
_JOURNAL_S = 30.0
"""How long to wait for others who add to the same run."""
_POLL_S = 0.02

_watching: set[asyncio.Task[None]] = set()
_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def open_rollout(
    task: Task,
    *,
    ttl_s: float = DEFAULT_TTL_S,
    index: int = 0,
    seed: int | None = None,
    attempt: int = 1,
    policy_id: str = "open",
    world: SnapshotInfo | None = None,
    verifier: Verifier | None = None,
    detached: bool = False,
    run: str | Path | None = None,
    starts: StartingStates | None = None,
) -> AsyncRollout:
    """Fork a task's starting state for somebody to act in.

    Args:
        task: the problem.
        ttl_s: the lease: its sandbox ends after so many seconds, whoever forgot it. What is not graded by then has no
            reward.
        index: WORLDFORK_FORK_INDEX inside, the place within a group.
        seed: WORLDFORK_SEED inside; by default it follows from task and index alone.
        attempt: from 1; part of what an outside verifier goes by.
        policy_id: names what acts.
        world: as of `run_rollouts`.
        verifier: by default the task's own.
        detached: whether it outlives this process, until its lease ends.
        run: the directory of a run to which the episode is added once it is final, with what the policy left and did.
        starts: where starting states come from, for whoever opens many.

    Raises:
        ConfigError: a bad argument. VerifierError, SandboxError, StoreError, ForkError: the starting state could not be
        made, or not forked in time.
    """
    if not 0 < ttl_s < float("inf"):
        raise ConfigError(f"ttl_s {ttl_s!r} is not a time", field="ttl_s")
    if index < 0 or attempt < 1:
        raise ConfigError("index begins at 0, attempt at 1", field="index")
    start = await (starts or await StartingStates.open(world)).get(task)
    async with asyncio.timeout(task.limits.start_wall_s):
        sandbox = await start.open(index, seed=seed, ttl_s=ttl_s, detached=detached)
    now_s = SystemClock().now_s()
    facts = Facts(
        sandbox.sandbox_id,
        task.to_json(),
        policy_id,
        index,
        sandbox.seed,
        attempt,
        now_s,
        now_s + ttl_s,
        None if world is None else world.snapshot_id,
        None if run is None else str(Path(run).absolute()),
    )
    here = place()
    root = here.home.scratch / "rollouts"
    try:
        ledger = Ledger(root, sandbox.sandbox_id)
        await here.work(lambda: ledger.begin(facts))
        await here.work(lambda: forget_old(root, now_s))
        await sweep_once(here)
    except BaseException:
        await asyncio.shield(sandbox.terminate())
        raise
    rollout = AsyncRollout(ledger, facts, sandbox, start, verifier)
    rollout.watch()
    return rollout


class AsyncRollout:
    """An open rollout. Made by `open_rollout` or `attach`; every call may be made again, and from any process."""

    def __init__(
        self,
        ledger: Ledger,
        facts: Facts,
        sandbox: AsyncSandbox | None,
        start: StartingState | None,
        verifier: Verifier | None,
    ) -> None:
        self._ledger = ledger
        self._facts = facts
        self._inner = sandbox
        self._start = start
        self._verifier = verifier
        self._recorder = Recorder()
        self._recorded = None if sandbox is None else RecordedSandbox(sandbox, self._recorder)
        self._task = facts.read_task()

    @classmethod
    async def attach(cls, rollout_id: str, *, verifier: Verifier | None = None) -> Self:
        """Take up a rollout by id, in this process or another than opened it; graded or dead ones too.

        Raises:
            NotFound: no rollout of this home is called so, or its lease was over long ago.
        """
        here = await asyncio.get_running_loop().run_in_executor(None, place)
        ledger = Ledger(here.home.scratch / "rollouts", rollout_id)
        facts = await here.work(ledger.facts)
        try:
            sandbox = await AsyncSandbox.connect(rollout_id)
        except NotFound:
            sandbox = None
        return cls(ledger, facts, sandbox, None, verifier)

    def watch(self) -> None:
        """Write down how the sandbox ends, as long as this event loop runs: other processes cannot see that."""
        if self._inner is not None:
            watching = asyncio.ensure_future(_note_death(self._ledger, self._inner))
            _watching.add(watching)
            watching.add_done_callback(_watching.discard)

    @property
    def rollout_id(self) -> str:
        """Its id, that of its sandbox."""
        return self._facts.sandbox_id

    @property
    def task(self) -> Task:
        """The problem."""
        return self._task

    @property
    def index(self) -> int:
        """The place within its group."""
        return self._facts.index

    @property
    def seed(self) -> int:
        """WORLDFORK_SEED inside."""
        return self._facts.seed

    @property
    def sandbox(self) -> AsyncSandbox:
        """Where the policy acts; what is done by it is recorded.

        Raises:
            SandboxDied: it was over before this handle attached.
        """
        if self._recorded is None:
            raise SandboxDied(f"the sandbox of {self.rollout_id} is gone", sandbox_id=self.rollout_id)
        return self._recorded

    @property
    def recorder(self) -> Recorder:
        """Where this handle's steps go, and what a policy said with them can."""
        return self._recorder

    @property
    def trajectory(self) -> Trajectory:
        """What was done by this handle so far."""
        return self._recorder.trajectory()

    async def sh(self, line: str, *, timeout: float | None = None, **options: Any) -> CommandResult:
        """Run one line in the world's shell, in the task's directory; at most the task's time for a command.

        Raises:
            SandboxDied: the sandbox is gone.
        """
        limit_s = self._task.limits.command_wall_s if timeout is None else timeout
        options.setdefault("working_dir", TASK_DIRECTORY)
        return await self.sandbox.sh(line, timeout=limit_s, **options)

    async def grade(self, *, policy_end: str = "finished", keep: bool = False) -> Episode:
        """End the policy's turn and grade what it left; once, whoever asks how often.

        Args:
            policy_end: how its turn ended, for the episode, such as `timed_out`.
            keep: whether the state at the end stays, as the episode's `final_snapshot_id`; the caller deletes it.

        Returns:
            The episode: scored, or with a failure where that is a fault of ours. What could be graded yet, on a machine
            that is less busy, may be asked for again.

        Raises:
            NotFound: its lease was over long ago, and the episode is forgotten. Locked, OSError: it could not be added
            to its run; ask again.
        """
        here = place()
        known = await here.work(self._ledger.episode)
        if known is not None:
            return known
        async with self._ledger.turn(_GRADE_WAIT_S):
            known = await here.work(self._ledger.episode)
            if known is not None:
                return known
            outcome, final = await self._grade(policy_end, keep)
            episode = outcome.episode
            if final:
                await to_its_end(self._settle(outcome))
            if self._ledger.closed:
                await to_its_end(self._clear())
            return episode

    async def _settle(self, outcome: Outcome) -> None:
        """Write down what is final; first where it is to stay."""
        if self._facts.run is not None:
            await self._add(RunDirectory(self._facts.run), outcome)
        await place().work(lambda: self._ledger.set_episode(outcome.episode))

    async def _add(self, run: RunDirectory, outcome: Outcome) -> None:
        tries = round(_JOURNAL_S / _POLL_S)
        for left in reversed(range(tries)):
            try:
                await in_thread(run.add, self._task, outcome.episode, outcome.blobs)
                return
            except Locked:
                if not left:
                    raise
                await asyncio.sleep(_POLL_S)

    async def edits(self) -> Edits | None:
        """Return what the policy left, from its grading until it is closed; None where nothing could be read."""
        end = await place().work(self._ledger.end)
        return None if end is None else end.edits

    async def keep(self, label: str | None = None) -> str:
        """Store the state as it is now and return the snapshot's id; the rollout goes on. The caller deletes it.

        Raises:
            SandboxDied: there is no state any more; `grade(keep=True)` keeps the one at the end. StoreError, ForkError:
            it could not be stored.
        """
        return (await self.sandbox.checkpoint(label=label)).snapshot_id

    async def close(self) -> None:
        """End it and clear it away. Never raises for what is gone already; while it is graded, that goes to its end."""
        self._ledger.set_closed()
        with contextlib.suppress(WorldforkError, OSError):
            async with self._ledger.turn(0.0 if self._is_dead() else self._task.limits.stop_wall_s):
                await to_its_end(self._clear())

    def _is_dead(self) -> bool:
        return not self._ledger.path.exists()

    async def _grade(self, policy_end: str, keep: bool) -> tuple[Outcome, bool]:
        """Return the episode with what it names, and whether asking again could not give another."""
        facts = self._facts
        which = Which(self._task, facts.policy_id, facts.index, facts.seed, facts.attempt)
        started_s = facts.opened_s
        try:
            start = self._start = self._start or await self._find_start()
            verifier = self._verifier = self._verifier or judges()(self._task)
        except Exception as error:
            return Outcome(_failed(which, started_s, failure_of(FailureKind.START, error))), False
        attempt = Attempt(which, Setting(start, verifier, gradings=_gate(), keep_end=keep))
        attempt.recorder = self._recorder
        attempt.policy_end = policy_end
        attempt.time_turn(max(0.0, SystemClock().now_s() - facts.opened_s))
        # What was begun here is brought to its end even for a caller that is gone: half of it would look like a death.
        lost = await to_its_end(self._carry(attempt))
        if lost is not None:
            return Outcome(_failed(which, started_s, lost)), True
        # Where this is cancelled or fails for our reasons, the state at the end stays for the next who asks.
        await attempt.judge()
        final = attempt.failure is None or attempt.failure.kind not in RETRIES
        if final:
            await to_its_end(attempt.clear())
            await attempt.describe()
        return attempt.outcome(), final

    async def _find_start(self) -> StartingState:
        world = None if self._facts.world is None else await AsyncSandbox.get_snapshot(self._facts.world)
        return await (await StartingStates.open(world)).get(self._task)

    async def _carry(self, attempt: Attempt) -> Failure | None:
        """Let an attempt have what the policy left; return why there is nothing to be had."""
        here = place()
        end = await here.work(self._ledger.end)
        if end is None:
            if self._inner is not None:
                attempt.adopt(self._inner)
                await attempt.carry()
            lost = attempt.failure
            if self._inner is None:
                attempt.policy_end = SandboxDied.code
            if self._inner is None or (lost is not None and lost.kind is FailureKind.LOST):
                lost = await self._why_gone()
                attempt.failure = None
            if lost is not None:
                return lost
            end = End(attempt.edits, attempt.end_snapshot_id, attempt.policy_end)
            await here.work(lambda: self._ledger.set_end(end))
        left = None if end.edits is None else Carried(end.edits, end.end_snapshot_id or "")
        attempt.recall(self.rollout_id, self._facts.seed, end.policy_end, left)
        return None

    async def _why_gone(self) -> Failure | None:
        """Return the fault of ours that ended the sandbox; None where it was the policy's own doing."""
        if self._ledger.closed:
            return Failure(FailureKind.STOPPED, "closed", "it was closed before it was graded")
        for _ in range(round(_DEATH_S / _POLL_S)):
            death = await place().work(self._ledger.death)
            if death is not None:
                return fault_of(death)
            await asyncio.sleep(_POLL_S)
        if SystemClock().now_s() >= self._facts.ends_s:
            return Failure(FailureKind.LIMIT, "lease", "its lease was over before it was graded")
        return Failure(FailureKind.LOST, SandboxDied.code, "its sandbox is gone, and how it ended is not known here")

    async def _clear(self) -> None:
        here = place()
        if await here.work(self._ledger.episode) is None:
            which = Which(self._task, self._facts.policy_id, self._facts.index, self._facts.seed, self._facts.attempt)
            closed = Failure(FailureKind.STOPPED, "closed", "it was closed before it was graded")
            await here.work(lambda: self._ledger.set_episode(_failed(which, self._facts.opened_s, closed)))
            end = await here.work(self._ledger.end)
            if end is not None and end.edits is not None and end.end_snapshot_id is not None:
                with contextlib.suppress(WorldforkError):
                    await Carried(end.edits, end.end_snapshot_id).drop()
        with contextlib.suppress(WorldforkError, OSError, TimeoutError):
            async with asyncio.timeout(self._task.limits.stop_wall_s):
                if self._inner is not None:
                    await self._inner.terminate()
        await here.work(self._ledger.forget_end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rollout_id!r})"


async def _note_death(ledger: Ledger, sandbox: AsyncSandbox) -> None:
    with contextlib.suppress(WorldforkError, OSError):
        await sandbox._live.wait_ended()
        death = await sandbox.cause_of_death()
        if death is not None:
            await in_thread(ledger.set_death, death)


def _gate() -> asyncio.Semaphore:
    """Return what bounds the gradings of this event loop: beyond its CPUs they only slow each other down."""
    loop = asyncio.get_running_loop()
    if loop not in _gates:
        _gates[loop] = asyncio.Semaphore(cpus())
    return _gates[loop]


def _failed(which: Which, started_s: float, failure: Failure) -> Episode:
    return Episode(
        task_id=which.task.task_id,
        task_hash=which.task.task_hash,
        policy_id=which.policy_id,
        index=which.index,
        reward=None,
        failure=failure,
        started_s=started_s,
        seed=which.seed,
        attempt=which.attempt,
    )
