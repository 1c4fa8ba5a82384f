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
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from worldfork.core.clock import SystemClock
from worldfork.core.errors import ConfigError, ForkError, NotFound, SandboxDied, SandboxError, WorldforkError
from worldfork.core.shielded import to_its_end
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.door import through
from worldfork.lineage.place import place
from worldfork.lineage.snapshots import SnapshotInfo
from worldfork.records.edits import Edits
from worldfork.records.episode import Episode
from worldfork.records.task import Task
from worldfork.records.trajectory import Trajectory
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.score_verifier import ScoreFunction
from worldfork.reward.verifier import Verifier
from worldfork.rollout.ending import Ending, note_death
from worldfork.rollout.judges import judges
from worldfork.rollout.ledger import Facts, Ledger, forget_old
from worldfork.rollout.leftovers import sweep_once
from worldfork.rollout.recording import RecordedSandbox, Recorder
from worldfork.rollout.run_directory import RunDirectory
from worldfork.rollout.starts import StartingState, StartingStates
from worldfork.sandbox.command import CommandResult

DEFAULT_TTL_S = 3600.0
_GRADE_WAIT_S = 86_400.0
"""Each grading has its own limits; this only keeps a forgotten caller from waiting for ever."""

_log = logging.getLogger("worldfork")
_watching: set[asyncio.Task[None]] = set()


async def open_rollout(
    task: Task,
    *,
    ttl_s: float = DEFAULT_TTL_S,
    index: int = 0,
    seed: int | None = None,
    attempt: int = 1,
    policy_id: str = "open",
    group_id: str = "",
    world: SnapshotInfo | None = None,
    verifier: Verifier | None = None,
    score: ScoreFunction | None = None,
    detached: bool = False,
    run: RunDirectory | str | Path | None = None,
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
        group_id: of its episode, for whoever compares it with others.
        world: as of `run_rollouts`.
        verifier: by default the task's own.
        score: a function that grades, in the place of a verifier. It goes with this handle: one that is attached grades
            with `verifier=ScoreVerifier(score)`.
        detached: whether it outlives this process, until its lease ends.
        run: the directory of a run to which the episode is added once it is final, with what the policy left and did.
        starts: where starting states come from, for whoever opens many.

    Raises:
        ConfigError, FormatUnsupported: a bad argument, or the run takes no episode of this task.
        OSError: nothing can be written there. VerifierError, SandboxError, StoreError, ForkError: the starting state
        could not be made, or not forked in time.
    """
    _check(ttl_s, index, attempt)
    judge_of = judges(verifier=verifier, score=score)
    run = await _expecting(run, task)
    states = starts or await StartingStates.open(world)
    judge = judge_of(task)
    start = await states.get(task)
    sandbox = await _fork(start, task.limits.start_wall_s, index, seed=seed, ttl_s=ttl_s, detached=detached)
    now_s = SystemClock().now_s()
    facts = Facts(
        sandbox_id=sandbox.sandbox_id,
        task_hash=task.task_hash,
        verifier_id=judge.verifier_id,
        policy_id=policy_id,
        group_id=group_id,
        index=index,
        seed=sandbox.seed,
        attempt=attempt,
        opened_s=now_s,
        ends_s=now_s + ttl_s,
        world=states.world_id,
        start_snapshot_id=start.snapshot_id,
        run=run,
    )
    try:
        ledger = await _begun(facts, task)
    except BaseException:
        await to_its_end(sandbox.terminate())
        raise
    rollout = AsyncRollout(ledger, facts, task, sandbox, judge, start=start)
    rollout.watch()
    return rollout


class AsyncRollout:
    """An open rollout. Made by `open_rollout` or `attach`; every call may be made again, and from any process.

    It pickles as its id and attaches where it is unpickled, to grade by the verifier that it was opened with.
    """

    def __init__(
        self,
        ledger: Ledger,
        facts: Facts,
        task: Task,
        sandbox: AsyncSandbox | None,
        verifier: Verifier | None,
        *,
        start: StartingState | None = None,
        other_verifier: bool = False,
    ) -> None:
        self._pid = os.getpid()
        self._ledger = ledger
        self._facts = facts
        self._task = task
        self._inner = sandbox
        self._verifier = verifier
        self._other_verifier = other_verifier
        self._ending = Ending(ledger, facts, task, sandbox, start)
        self._recorder = Recorder(ago_s=max(0.0, SystemClock().now_s() - facts.opened_s), log=ledger.add_step)
        self._recorded = None if sandbox is None else RecordedSandbox(sandbox, self._recorder)

    @classmethod
    async def attach(cls, rollout_id: str, *, verifier: Verifier | None = None, other_verifier: bool = False) -> Self:
        """Take up a rollout by id, in this process or another than opened it; graded or dead ones too.

        Args:
            rollout_id: its id.
            verifier: what grades it if this handle is asked to, where it was opened with one of its own; for a score
                function `ScoreVerifier(score)`.
            other_verifier: whether that may be another one than it was opened with; without one, the task's own.

        Raises:
            NotFound: no rollout of this home is called so, or its lease was over long ago.
            ConfigError: the verifier is another one than it was opened with.
        """
        here = await in_thread(place)
        ledger = Ledger(here.home.scratch / "rollouts", rollout_id)
        facts = await here.work(ledger.facts)
        if verifier is not None and not other_verifier:
            facts.expect(verifier.verifier_id)
        task = await here.work(ledger.task)
        try:
            sandbox = await AsyncSandbox.connect(rollout_id)
        except NotFound:
            sandbox = None
        return cls(ledger, facts, task, sandbox, verifier, other_verifier=other_verifier)

    def watch(self) -> None:
        """Write down how the sandbox ends, as long as this event loop runs: other processes cannot see that."""
        if self._inner is not None:
            watching = asyncio.ensure_future(note_death(self._ledger, self._inner))
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
            keep: whether the state at the end stays, as the episode's `final_snapshot_id`; the caller deletes it. To be
                said by who asks first: what nobody is to keep goes once it was read.

        Returns:
            The episode: scored, or with a failure where that is a fault of ours. What could be read or graded yet, on a
            machine that is less busy, may be asked for again. One that cannot be added to its run now is so when it is
            next asked for, or closed; the log tells.

        Raises:
            ConfigError: it was opened with a verifier that this handle was not given; the turn goes on.
            NotFound: its lease was over long ago, and the episode is forgotten.
            SandboxError: this handle belongs to the process that this one was forked from; the turn goes on.
            OSError: nothing can be written down; ask again.
        """
        self._check_process()
        here, asked_s = place(), SystemClock().now_s()
        known = await here.work(self._ledger.episode)
        if known is None:
            async with self._ledger.turn(_GRADE_WAIT_S):
                known = await here.work(lambda: self._ledger.episode() or self._ledger.failed(asked_s))
                if known is None:
                    return await self._grade(policy_end, keep=keep)
        await to_its_end(self._ending.add_to_run())
        return known

    async def _grade(self, policy_end: str, *, keep: bool) -> Episode:
        try:
            episode = await self._ending.grade(self._judge(), self._recorder, policy_end, keep=keep)
            if episode.failure is not None:
                # Not for ever: but who waited for this grading would only see the same moment again.
                now_s = SystemClock().now_s()
                await place().work(lambda: self._ledger.set_failed(episode, now_s))
            return episode
        finally:
            if self._ledger.closed:
                with self._told("closing"):
                    await to_its_end(self._ending.clear())

    def _judge(self) -> Verifier:
        if self._verifier is None:
            judge = judges()(self._task)
            if not self._other_verifier:
                self._facts.expect(judge.verifier_id)
            self._verifier = judge
        return self._verifier

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise SandboxError(
                f"this handle on {self.rollout_id} belongs to the process that this one was forked from",
                remedy=f"attach again: Rollout.attach({self.rollout_id!r})",
                sandbox_id=self.rollout_id,
            )

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Let no error of ours pass, but tell of it."""
        try:
            yield
        except NotFound:
            pass  # it was over long ago
        except (WorldforkError, OSError) as error:
            _log.warning("%s %s did not come to its end: %s", what, self.rollout_id, error)

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
        """End it and clear it away; while it is graded, that goes to its end first. Never raises: the log tells.

        In a child that inherited this handle by a fork, nothing: it is the parent's.
        """
        if self._pid != os.getpid():
            return
        with self._told("closing"):
            self._ledger.set_closed()
        with self._told("closing"):
            async with self._ledger.turn(0.0 if self._is_dead() else self._task.limits.stop_wall_s):
                await to_its_end(self._ending.clear())
                await to_its_end(self._ending.add_to_run())

    def _is_dead(self) -> bool:
        return not self._ledger.path.exists()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.rollout_id,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rollout_id!r})"


def _attached(rollout_id: str) -> AsyncRollout:
    """Attach where nothing can be awaited."""
    return through(AsyncRollout.attach, rollout_id)


def _check(ttl_s: float, index: int, attempt: int) -> None:
    if not 0 < ttl_s < float("inf"):
        raise ConfigError(f"ttl_s {ttl_s!r} is not a time", field="ttl_s")
    if index < 0 or attempt < 1:
        raise ConfigError("index begins at 0, attempt at 1", field="index")


async def _expecting(run: RunDirectory | str | Path | None, task: Task) -> str | None:
    """Return where a task's episode will be added. What would refuse it does so now, before anybody acts for it."""
    if run is None:
        return None
    directory = run if isinstance(run, RunDirectory) else RunDirectory(run)
    await in_thread(directory.expect, task)
    return str(directory.path.absolute())


async def _begun(facts: Facts, task: Task) -> Ledger:
    """Write down a new rollout, and let go of what others left long ago."""
    here = place()
    root = here.home.scratch / "rollouts"
    ledger = Ledger(root, facts.sandbox_id)
    await here.work(lambda: ledger.begin(facts, task))
    await here.work(lambda: forget_old(root, facts.opened_s))
    await sweep_once(here)
    return ledger


async def _fork(start: StartingState, limit_s: float, index: int, **options: Any) -> AsyncSandbox:
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await start.open(index, **options)
    except TimeoutError:
        if not limit.expired():
            raise
        raise ForkError(
            f"a start took more than {limit_s:g} s",
            remedy="open fewer rollouts at once, or raise the task's start_wall_s",
        ) from None
