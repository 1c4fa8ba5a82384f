from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reward.played import PlayedSandbox, PlayedStart, a_result, a_task, report, row

from worldfork.core.errors import LaunchFailed, OutOfSpace, PathError, SandboxDied, VerifierError
from worldfork.records.death import Death, DeathCause, LimitHits
from worldfork.records.edits import Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.calibration import Calibration, CalibrationStore
from worldfork.reward.final_verifier import BROKEN, NOT_READY, FinalSpec, FinalVerifier
from worldfork.reward.judge_program import JudgeSpec
from worldfork.reward.trial import Trial
from worldfork.reward.verifier import Case, Grade
from worldfork.sandbox.command import Reason


class Stuck(PlayedSandbox):
    """Hidden tests cannot be laid down in it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def write_file(self, path: str, content: bytes | str, *, mode: int | None = None) -> None:
        raise self.error


def grade(directory: Path, *forks: PlayedSandbox | Exception, task: Any = None, **spec: Any) -> Grade:
    start: Any = PlayedStart(*forks)
    verifier = FinalVerifier(FinalSpec(judge=JudgeSpec(("judge",)), **spec), CalibrationStore(directory))
    case = Case(task or a_task(), start, Edits(), end_snapshot_id="sn-end")
    found = asyncio.run(verifier.grade(case))
    assert not start.forks
    return found


def right() -> PlayedSandbox:
    return PlayedSandbox(a_result(b""))


REFUSED = LaunchFailed("no", step="the overlay", errno=errno.ENOTDIR)


@pytest.mark.parametrize("trouble", [REFUSED, Stuck(PathError("no", path="x", errno=errno.EACCES))])
def test_a_state_in_which_nothing_can_be_done_is_worth_0_and_a_fault_of_the_moment_is_not(
    tmp_path: Path, trouble: Any
) -> None:
    fresh = PlayedSandbox()
    assert grade(tmp_path, trouble, fresh, right()).reward == 1.0
    found = grade(tmp_path, trouble, fresh, trouble, right())
    assert (found.reward, found.end) == (0.0, BROKEN)
    with pytest.raises(LaunchFailed):
        grade(tmp_path, trouble, LaunchFailed("none at all"))


@pytest.mark.parametrize(
    "ours",
    [
        LaunchFailed("it took more than 30 s to start"),
        LaunchFailed("the host is at a limit", step="namespaces", errno=errno.EMFILE),
        LaunchFailed("the sandbox did not start", step="a fork", errno=errno.EAGAIN),
    ],
)
def test_a_start_that_is_late_or_meets_a_limit_of_the_host_is_never_the_states_doing(
    tmp_path: Path, ours: LaunchFailed
) -> None:
    with pytest.raises(LaunchFailed):
        grade(tmp_path, ours)


def found(
    tmp_path: Path, solved: PlayedSandbox, untouched: PlayedSandbox, *more: PlayedSandbox, **changes: Any
) -> Calibration:
    start: Any = PlayedStart(solved, untouched, *more, task=a_task(**changes), twice=True)
    return asyncio.run(FinalVerifier(FinalSpec(), CalibrationStore(tmp_path)).calibrate(a_task(**changes), start))


def ran(*passed: str, failed: tuple[str, ...] = (), **changes: Any) -> PlayedSandbox:
    rows = [*map(row, passed), *(row(name, "failed", wall_s=33.0) for name in failed)]
    return PlayedSandbox(a_result(report(*rows), **changes))


def test_what_counts_is_what_the_reference_passes_and_as_declared(tmp_path: Path) -> None:
    known = found(tmp_path / "a", ran("a", "b"), ran("a", failed=("b",)), pass_to_pass=("a", "c"))
    assert (known.expected, known.untouched, known.unmet) == (("a", "b"), ("a",), ("c",))
    with pytest.raises(VerifierError) as raised:
        found(tmp_path / "b", ran("a", "b"), ran("a"), ran("a"), fail_to_pass=("c",))
    assert raised.value.fields["kind"] is FailureKind.CALIBRATION


@pytest.mark.parametrize("late", ["solved", "untouched"])
def test_a_machine_that_is_full_teaches_nothing(tmp_path: Path, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "is_starved", lambda trial, ids: bool(ids & trial.late().keys()))
    quick, slow = ran("a", "b"), ran("a", failed=("b",), wall_s=40.0)
    with pytest.raises(VerifierError) as raised:
        found(tmp_path, *((slow, quick) if late == "solved" else (quick, slow)))
    assert raised.value.fields["kind"] is FailureKind.OVERLOAD


def test_what_the_reference_passes_once_does_not_count(tmp_path: Path) -> None:
    start: Any = PlayedStart(ran("a", "b", "c"), ran("a"), ran("a", "b"))
    verifier = FinalVerifier(FinalSpec(), CalibrationStore(tmp_path))
    known = asyncio.run(verifier.calibrate(a_task(), start))
    assert (known.expected, known.flaky, known.need.wall_s) == (("a", "b"), ("c",), 1.0)
    # Nor does what is found to be flaky later.
    asyncio.run(verifier.leave_out(a_task(), start, ("b",)))
    with pytest.raises(VerifierError, match="worth 1"):
        asyncio.run(verifier.calibrate(a_task(), start))


def test_a_file_that_the_start_cannot_load_is_known(tmp_path: Path) -> None:
    known = found(tmp_path, ran("t::a", "t::b", "u::c"), ran("u::c"))
    assert known.unloaded == ("t::a", "t::b")


class Unready(PlayedSandbox):
    """Its services never come up."""

    async def run(self, command: str, args: list[str], **options: Any) -> Any:
        return a_result(b"", exit_code=1)


def test_services_that_come_up_with_the_reference_alone_are_what_it_brings(tmp_path: Path) -> None:
    def up() -> PlayedSandbox:
        return PlayedSandbox(a_result(b""), *ran("t::a", "t::b").results)

    verifier = FinalVerifier(FinalSpec(services=(("serve",),)), CalibrationStore(tmp_path))
    start: Any = PlayedStart(up(), Unready(), up())
    known = asyncio.run(verifier.calibrate(a_task(), start))
    # Of a file that nobody tried to load it is not said that it cannot be.
    assert (known.expected, known.untouched, known.unloaded) == (("t::a", "t::b"), (), ())
    start = PlayedStart(Unready())
    with pytest.raises(VerifierError, match="services that are not up") as raised:
        asyncio.run(verifier.calibrate(a_task(prompt="another"), start))
    assert raised.value.fields["kind"] is FailureKind.CALIBRATION


class Serves(PlayedSandbox):
    """Its services are started by a shell that ends so."""

    def __init__(self, *shells: Any, **options: Any) -> None:
        super().__init__(*shells, a_result(b""), **options)


def test_services_that_could_not_be_started_are_no_rollout_without_them(tmp_path: Path) -> None:
    assert grade(tmp_path, Serves(a_result(b"")), services=(("serve",),)).reward == 1.0
    gone = grade_left(tmp_path, Serves(a_result(b"", reason=Reason.NOT_STARTED, exit_code=127)))
    assert (gone.reward, gone.end) == (0.0, NOT_READY)


def test_a_service_that_the_host_ended_for_its_memory_is_no_score(tmp_path: Path) -> None:
    lost = Serves(a_result(b"", reason=Reason.NOT_STARTED, exit_code=127))
    lost.hits = LimitHits(host_memory=1)
    with pytest.raises(VerifierError) as raised:
        grade_left(tmp_path, lost)
    assert raised.value.fields["kind"] is FailureKind.MEMORY


def grade_left(directory: Path, fork: PlayedSandbox) -> Grade:
    """Grade with a service; the program is not asked."""
    fork.results = fork.results[:1]
    return grade(directory, fork, services=(("serve",),))


@pytest.mark.parametrize("error", [OutOfSpace("full", scope="sandbox"), SandboxDied("gone")])
def test_a_state_that_is_full_or_dies_is_the_policys(tmp_path: Path, error: Exception) -> None:
    assert grade(tmp_path, Stuck(error), right()).reward == 0.0
    lost = Stuck(error)
    lost.death = Death(DeathCause.OUTSIDE, "seen")
    with pytest.raises(VerifierError):
        grade(tmp_path, lost)


def test_a_host_that_is_full_is_no_score(tmp_path: Path) -> None:
    with pytest.raises(OutOfSpace):
        grade(tmp_path, Stuck(OutOfSpace("full", scope="host")))


def test_services_get_no_more_time_than_the_grading(tmp_path: Path) -> None:
    class Never(PlayedSandbox):
        async def run(self, command: str, args: list[str], **options: Any) -> Any:
            self.calls.append({"timeout": options["timeout"]})
            return a_result(b"", exit_code=1)

    sandbox = Never()
    task = a_task(limits=TaskLimits(grade_wall_s=0.3))
    found = grade(tmp_path, sandbox, task=task, services=(("serve",),), ready=("probe",), ready_wall_s=1000)
    assert (found.reward, found.end) == (0.0, NOT_READY)
    assert all(call["timeout"] <= 0.3 for call in sandbox.calls)
