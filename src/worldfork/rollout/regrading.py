"""A run graded again from what it stored, without any policy: by another verifier, or by the tasks' own once more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worldfork.core.clock import SystemClock
from worldfork.core.errors import ConfigError, NotFound
from worldfork.core.ids import content_id
from worldfork.core.shielded import to_its_end
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.snapshots import SnapshotInfo
from worldfork.records.edits import Edits
from worldfork.records.episode import Episode, FailureKind, Timings
from worldfork.records.task import Task
from worldfork.reward.verifier import Case, Start, Verifier
from worldfork.rollout.faults import failure_of
from worldfork.rollout.journal import Journal
from worldfork.rollout.judges import cpus, judges
from worldfork.rollout.orders import Starts
from worldfork.rollout.outcome import checked_grade, graded
from worldfork.rollout.standing import start_of
from worldfork.rollout.starts import StartingStates
from worldfork.rollout.stored import StoredRun

REGRADED = "regraded"
"""Below the run's directory: a journal of its own for each verifier."""


@dataclass(frozen=True)
class Regraded:
    """One episode, before and after."""

    before: Episode
    after: Episode

    @property
    def changed(self) -> bool:
        """Whether the reward is another one."""
        return self.before.reward != self.after.reward


async def regrade(
    run: StoredRun,
    *,
    verifier: Mapping[str, Any] | Verifier | None = None,
    world: SnapshotInfo | None = None,
    concurrency: int | None = None,
    on_episode: Callable[[Regraded], None] | None = None,
) -> list[Regraded]:
    """Grade every episode of a run again of which it is known what the policy left.

    The results are written below the run's directory, in a journal for each verifier; what is there with a reward is
    not graded again. The run itself stays as it is.

    Args:
        run: the run; its tasks must be known.
        verifier: what grades: an object, or what a task's `verifier` may be; by default each task's own.
        world: as of `run_rollouts`.
        concurrency: gradings at a time; by default the number of CPUs.
        on_episode: called with each as it ends, once it is written.

    Returns:
        By group and index. Episodes of which nobody knows what their policy left are not among them, nor, for a
        verifier that looks at whole final states, those whose state was not kept; one whose stored edits are gone or
        damaged has a failure of kind `carry`, never the reward 0. Each is graded by the starting state that it stood
        on; where that is gone, and what its task has by now does not hold the same, it has one of kind `start`.

    Raises:
        ConfigError: the verifier is none, or looks at whole final states and there is not one. NotFound: a task is
        not known.
        OSError: the results could not be written.
    """
    judge = _judge(verifier)
    ordered = [each for group in run.groups for each in group.episodes]
    chosen = [each for each in ordered if each.edits is not None or _left_nothing(each)]
    jobs = await _gradable([(each, _task_of(run, each, verifier)) for each in chosen], judge)
    if not jobs:
        return []
    name = content_id(*sorted({judge(task).verifier_id.encode() for _, task in jobs}))[:16]
    states = await StartingStates.open(world)
    with Journal.open(run.directory / REGRADED / f"{name}.jsonl") as journal:
        work = _Work(run, judge, states, journal, on_episode)
        return await work.do(jobs, concurrency or cpus())


def regraded_journals(directory: Path) -> list[Path]:
    """Return the journals of what was graded again below a run's directory."""
    return sorted((directory / REGRADED).glob("*.jsonl"))


class _Work:
    """One call's gradings."""

    def __init__(
        self,
        run: StoredRun,
        judge: Callable[[Task], Verifier],
        states: Starts,
        journal: Journal,
        on_episode: Callable[[Regraded], None] | None,
    ) -> None:
        self._run = run
        self._judge = judge
        self._states = states
        self._journal = journal
        self._on_episode = on_episode
        self._writing = asyncio.Lock()

    async def do(self, jobs: Sequence[tuple[Episode, Task]], width: int) -> list[Regraded]:
        known = {_state_of(each): each for each in self._journal.episodes() if each.valid}
        results: dict[int, Regraded] = {}
        waiting = iter(enumerate(jobs))

        async def take_turns() -> None:
            for place, (before, task) in waiting:
                after = known.get(_state_of(before))
                if after is None or not _stood_alike(before, after):
                    after = await self._grade(before, task)
                    async with self._writing:
                        # Not left half done: the journal is closed after this.
                        await to_its_end(in_thread(self._journal.append, [after]))
                results[place] = Regraded(before, after)
                if self._on_episode is not None:
                    self._on_episode(results[place])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(width, len(jobs))):
                    group.create_task(take_turns())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [results[place] for place in sorted(results)]

    async def _grade(self, before: Episode, task: Task) -> Episode:
        clock = SystemClock()
        began_s = clock.monotonic_s()
        judge = self._judge(task)
        after = replace(
            before, verifier_id=judge.verifier_id, trust=judge.trust, started_s=clock.now_s(), parts={}, expected=(),
            passed=(), failed=(), untouched=(), grade_end=None, grading_sandbox_id=None, judged_by="", reward=0.0,
            failure=None,
        )  # fmt: skip
        stage = FailureKind.CARRY
        try:
            edits = self._edits(before)
            stage = FailureKind.START
            start = await start_of(self._states, before.snapshot_id, before.start_content, task)
            stage = FailureKind.GRADING
            case = self._case(before, task, start, edits, judge)
            grade = await (judge.grade_nothing(case) if edits is None else judge.grade(case))
            grade = checked_grade(grade, judge)
        except Exception as error:
            return replace(after, reward=None, failure=failure_of(stage, error))
        timings = Timings(
            calibrate_s=grade.calibrate_s,
            grade_s=grade.grade_s,
            grade_cpu_s=grade.cpu_s,
            total_s=clock.monotonic_s() - began_s,
        )
        return replace(graded(after, grade, edits), timings=timings, snapshot_id=start.snapshot_id)

    def _edits(self, before: Episode) -> Edits | None:
        """Return what the policy left; None only where it is known that this was nothing."""
        edits = self._run.edits(before)
        if edits is None and before.edits is not None:
            raise NotFound(f"the run does not hold what rollout {before.index} left", digest=before.edits)
        return edits

    def _case(self, before: Episode, task: Task, start: Start, edits: Edits | None, judge: Verifier) -> Case:
        return Case(
            task,
            start,
            edits or Edits(),
            fork_id=before.sandbox_id or "",
            index=before.index,
            attempt=before.attempt,
            end_snapshot_id=before.final_snapshot_id if judge.needs_end else None,
            trajectory=self._run.trajectory(before),
        )


async def _gradable(
    jobs: Sequence[tuple[Episode, Task]], judge: Callable[[Task], Verifier]
) -> list[tuple[Episode, Task]]:
    """Return those that can be graded: all, but where a verifier needs final states those whose state is there.

    Raises:
        ConfigError: all need final states, and there is not one.
    """
    needed = {each.key: judge(task) for each, task in jobs if each.edits is not None and judge(task).needs_end}
    if not needed:
        return list(jobs)
    there = await kept_states()
    missing = {each.key for each, _ in jobs if each.key in needed and each.final_snapshot_id not in there}
    if len(missing) == sum(each.edits is not None for each, _ in jobs):
        named = sum(each.final_snapshot_id is not None for each, _ in jobs if each.key in needed)
        why = f"all {named} that the run kept were deleted" if named else "the run kept none"
        raise ConfigError(
            f"{next(iter(needed.values())).verifier_id} looks at whole final states, of which there is not one: {why}",
            remedy="roll out again with --keep all, or name a verifier that grades what the policies left",
            field="verifier",
        )
    return [(each, task) for each, task in jobs if each.key not in missing]


async def kept_states() -> set[str]:
    """Return the ids of all snapshots of this home."""
    return {each.snapshot_id for each in await AsyncSandbox.list_all_snapshots()}


def _left_nothing(episode: Episode) -> bool:
    """Tell whether the sandbox did not live to be read, by the policy's own doing."""
    return episode.valid and episode.edits is None and episode.policy_end not in ("finished", "timed_out")


def _state_of(episode: Episode) -> tuple[object, ...]:
    """Return what was graded: a rollout that was run again left another state."""
    return episode.key, episode.edits, episode.sandbox_id, episode.attempt


def _stood_alike(before: Episode, after: Episode) -> bool:
    """Tell whether a rollout was graded by the state that it stood on, or by an equal one."""
    alike = before.start_content is not None and before.start_content == after.start_content
    return alike or after.snapshot_id == before.snapshot_id


def _judge(verifier: Mapping[str, Any] | Verifier | None) -> Callable[[Task], Verifier]:
    if verifier is not None and not isinstance(verifier, Mapping):
        return lambda _: verifier
    return judges()


def _task_of(run: StoredRun, episode: Episode, verifier: Mapping[str, Any] | Verifier | None) -> Task:
    task = run.tasks.get(episode.task_hash)
    if task is None:
        raise NotFound(
            f"the run does not hold the task {episode.task_id}",
            remedy="name the file of its tasks with --tasks",
            task_hash=episode.task_hash,
        )
    return replace(task, verifier=dict(verifier)) if isinstance(verifier, Mapping) else task
