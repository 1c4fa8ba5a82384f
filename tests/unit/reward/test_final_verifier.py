from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reward.played import PlayedSandbox, PlayedStart, a_result, a_task

from worldfork.core.errors import LaunchFailed, OutOfSpace, PathError, SandboxDied, VerifierError
from worldfork.records.death import Death, DeathCause
from worldfork.records.edits import Edits
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.final_verifier import BROKEN, NOT_READY, FinalSpec, FinalVerifier
from worldfork.reward.judge_program import JudgeSpec
from worldfork.reward.verifier import Case, Grade


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


@pytest.mark.parametrize("trouble", [LaunchFailed("no"), Stuck(PathError("no", path="x", errno=errno.EACCES))])
def test_a_state_in_which_nothing_can_be_done_is_worth_0_and_a_fault_of_the_moment_is_not(
    tmp_path: Path, trouble: Any
) -> None:
    fresh = PlayedSandbox()
    assert grade(tmp_path, trouble, fresh, right()).reward == 1.0
    found = grade(tmp_path, trouble, fresh, trouble, right())
    assert (found.reward, found.end) == (0.0, BROKEN)
    with pytest.raises(LaunchFailed):
        grade(tmp_path, trouble, LaunchFailed("none at all"))


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
