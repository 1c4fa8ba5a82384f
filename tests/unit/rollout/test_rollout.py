from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.reward.played import PlayedSandbox, PlayedStart, a_result, a_task

from worldfork.core.clock import ManualClock
from worldfork.core.errors import (
    CommandTimeout,
    ConfigError,
    LaunchFailed,
    OutOfSpace,
    PathError,
    PolicyError,
    SandboxDied,
    VerifierError,
)
from worldfork.records.episode import Episode, FailureKind
from worldfork.records.sandbox import SandboxStatus
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.calibration import Calibration
from worldfork.reward.pytest_verifier import Grade
from worldfork.reward.report import Report
from worldfork.reward.trial import Trial
from worldfork.rollout import rollout
from worldfork.rollout.group import Group, run_rollouts
from worldfork.rollout.policies import NopPolicy
from worldfork.rollout.rollout import run_rollout

CALIBRATION = Calibration("", "sn-played", ("a", "b"), ("a",), (), 0.1)
GRADE = Grade(
    reward=0.5,
    parts={"fraction": 0.5},
    passed=("a",),
    failed=("b",),
    calibration=CALIBRATION,
    trial=Trial(Report(), "exited", 0.2, 0.3),
    sandbox_id="sb-g",
    calibrate_s=0.0,
    grade_s=0.4,
)


class PlayedVerifier:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.edits: list[Mapping[str, bytes]] = []

    async def grade(self, task: Any, start: Any, edits: Mapping[str, bytes]) -> Grade:
        self.edits.append(edits)
        if self.error is not None:
            raise self.error
        return GRADE

    async def calibrate(self, task: Any, start: Any) -> Calibration:
        return CALIBRATION


class Acting:
    policy_id = "acting"

    def __init__(self, error: BaseException | None = None, *, dies: bool = False) -> None:
        self.error = error
        self.dies = dies

    async def act(self, sandbox: Any, task: Any, index: int) -> None:
        if self.dies:
            sandbox.life = SandboxStatus.TERMINATED
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def carried(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What carrying out meets, where it meets anything; reading a sandbox is tried with real ones."""
    trouble: list[Exception] = []

    async def carry_out(sandbox: Any, task: Any) -> dict[str, bytes]:
        if trouble:
            raise trouble[0]
        return {"a.py": b"mine"}

    monkeypatch.setattr(rollout, "carry_out", carry_out)
    return trouble


def run(policy: Any, *, verifier: PlayedVerifier | None = None, start: PlayedStart | None = None) -> Episode:
    start = start or PlayedStart(PlayedSandbox(a_result(b"")))
    task = a_task(limits=TaskLimits(policy_wall_s=0.05))
    judge: Any = verifier or PlayedVerifier()
    source: Any = start
    episode = asyncio.run(run_rollout(task, policy, 3, source, judge, ManualClock()))
    assert start.ended == (0 if episode.sandbox_id is None else 1)
    return episode


def test_a_scored_episode_tells_all() -> None:
    episode = run(Acting())
    assert (episode.reward, episode.failure, episode.policy_end) == (0.5, None, "finished")
    assert (episode.expected, episode.passed, episode.failed) == (("a", "b"), ("a",), ("b",))
    assert (episode.snapshot_id, episode.sandbox_id, episode.grading_sandbox_id) == ("sn-played", "sb-played", "sb-g")
    assert episode.key == (a_task(limits=TaskLimits(policy_wall_s=0.05)).task_hash, "acting", 3)


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (PolicyError("no model"), FailureKind.POLICY, "policy"),
        (RuntimeError("defect"), FailureKind.POLICY, "RuntimeError"),
        (TimeoutError("its own"), FailureKind.POLICY, "TimeoutError"),
        (OutOfSpace("full", scope="host"), FailureKind.SPACE, "out_of_space"),
        (PathError("full", path="/a", errno=errno.ENOSPC), FailureKind.SPACE, "path"),
        (PathError("broken", path="/a", errno=errno.EIO), FailureKind.POLICY, "path"),
        (ConfigError("defect"), FailureKind.POLICY, "config"),
    ],
)
def test_what_breaks_on_the_host_is_no_score(error: Exception, kind: FailureKind, code: str) -> None:
    episode = run(Acting(error))
    assert episode.reward is None
    assert episode.failure is not None
    assert (episode.failure.kind, episode.failure.code) == (kind, code)


@pytest.mark.parametrize(
    "error",
    [
        PathError("a FIFO", path="/a", errno=errno.EINVAL),
        CommandTimeout("late", result=None),
    ],
)
def test_what_a_policy_meets_in_its_sandbox_ends_its_turn(error: Exception) -> None:
    episode = run(Acting(error))
    assert episode.reward == 0.5
    assert episode.policy_end == error.code  # type: ignore[attr-defined]


def test_a_turn_that_lasts_too_long_is_graded() -> None:
    class Stalls(Acting):
        async def act(self, sandbox: Any, task: Any, index: int) -> None:
            await asyncio.sleep(60)

    episode = run(Stalls())
    assert (episode.reward, episode.policy_end) == (0.5, "timed_out")


@pytest.mark.parametrize(
    ("policy", "trouble", "end"),
    [
        (Acting(SandboxDied("gone"), dies=True), SandboxDied("gone"), "sandbox_died"),
        (Acting(RuntimeError("tool broken"), dies=True), SandboxDied("gone"), "sandbox_died"),
        (Acting(), SandboxDied("gone"), "sandbox_died"),
        (Acting(), OutOfSpace("full", scope="sandbox"), "out_of_space"),
    ],
)
def test_a_dead_sandbox_earns_nothing(policy: Acting, trouble: Exception, end: str, carried: list[Exception]) -> None:
    carried.append(trouble)
    verifier = PlayedVerifier()
    episode = run(policy, verifier=verifier)
    assert (episode.reward, episode.policy_end) == (0.0, end)
    assert (episode.expected, episode.passed) == (("a", "b"), ())
    assert verifier.edits == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (VerifierError("late", kind=FailureKind.OVERLOAD), FailureKind.OVERLOAD),
        (VerifierError("odd"), FailureKind.GRADING),
        (LaunchFailed("no"), FailureKind.GRADING),
        (SandboxDied("gone"), FailureKind.GRADING),
        (OutOfSpace("full", scope="host"), FailureKind.SPACE),
        (OSError(errno.ENOSPC, "full"), FailureKind.SPACE),
        (KeyError("defect"), FailureKind.GRADING),
    ],
)
def test_trouble_of_the_verifier_is_no_score(error: Exception, kind: FailureKind) -> None:
    episode = run(Acting(), verifier=PlayedVerifier(error))
    assert episode.reward is None
    assert episode.failure is not None
    assert episode.failure.kind is kind


def test_reading_that_fails_for_our_reasons_is_no_score(carried: list[Exception]) -> None:
    carried.append(PathError("broken", path="/a", errno=errno.EIO))
    failure = run(Acting()).failure
    assert failure is not None
    assert failure.kind is FailureKind.CARRY


def test_a_fork_that_fails_is_no_score() -> None:
    failure = run(Acting(), start=PlayedStart(LaunchFailed("no"))).failure
    assert failure is not None
    assert (failure.kind, failure.code) == (FailureKind.FORK, "launch_failed")


def test_cancellation_passes() -> None:
    with pytest.raises(asyncio.CancelledError):
        run(Acting(asyncio.CancelledError()))


def test_bad_arguments_start_nothing() -> None:
    task = a_task()
    for tasks, options in (([task], {"n": 0}), ([task, task], {}), ([task], {"concurrency": 0})):
        with pytest.raises(ConfigError):
            asyncio.run(run_rollouts(tasks, NopPolicy(), **options))


def test_no_tasks_no_episodes() -> None:
    assert asyncio.run(run_rollouts([], NopPolicy())) == []


def test_a_group_compares_its_episodes() -> None:
    group = Group(a_task(), (run(Acting()), run(Acting(PolicyError("no")))))
    assert group.rewards == [0.5, None]
    assert group.advantages == [0.0, None]
