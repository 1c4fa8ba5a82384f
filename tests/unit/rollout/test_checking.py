from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reward.played import PlayedSandbox, PlayedStart, a_result, a_task, report, row

from worldfork.core.errors import LaunchFailed
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.calibration import CalibrationStore
from worldfork.rollout.checking import Checker, TaskCheck
from worldfork.sandbox.command import Reason


def fork(*passed: str, failed: tuple[str, ...] = (), **result: Any) -> PlayedSandbox:
    rows = [*(row(name) for name in passed), *(row(name, "failed") for name in failed)]
    return PlayedSandbox(a_result(report(*rows), **result))


STARVED = row("b", "failed", wall_s=32.0, cpu_s=1.0, waited_s=31.0)


def starved() -> PlayedSandbox:
    waited = {"/proc/9/schedstat": b"1 32000000000 2\n"}
    return PlayedSandbox(a_result(report(STARVED), wall_s=33.0, cpu_s=1.0), files=waited)


def check(tmp_path: Path, *forks: PlayedSandbox | Exception, times: int = 2, **changes: Any) -> TaskCheck:
    task = a_task(**{"verifier": {"kind": "pytest"}, **changes})

    async def start_of(_: Task) -> Any:
        return PlayedStart(*forks, task=task)

    checker = Checker(start_of, CalibrationStore(tmp_path))
    seen: list[TaskCheck] = []
    (found,) = asyncio.run(checker.check_all([task], times, seen.append))
    assert seen == [found]
    assert found.to_json()["task_id"] == task.task_id
    return found


CALIBRATION = (("a", "b", "c"), ("a",), ("a", "b", "c"))


def calibrated() -> list[PlayedSandbox]:
    return [fork(*names) for names in CALIBRATION]


def test_a_task_that_is_fit(tmp_path: Path) -> None:
    whole = fork("a", "b", "c", cpu_s=3.0), fork("a", "b", "c", cpu_s=1.0)
    found = check(tmp_path, *calibrated(), *whole, fork("a"), fork("a"))
    assert (found.fit, found.why, found.reference) == (True, "", (1.0, 1.0))
    assert found.nop == (pytest.approx(1 / 3),) * 2
    assert (found.expected, found.nop_passes, found.flaky) == (("a", "b", "c"), ("a",), ())
    assert (found.cpu_s, found.split, found.tight) == (2.0, None, {})


def test_a_reference_that_takes_much_of_a_limit_is_told(tmp_path: Path) -> None:
    for cpu_s in (22.0, 44.0):
        slow = [fork("a", "b", "c", cpu_s=cpu_s) for _ in range(2)]
        found = check(tmp_path / f"{cpu_s}", *calibrated(), *slow, fork("a"), fork("a"))
        # Of the default limit of 60 s, which gives way to what the reference takes.
        assert (found.fit, found.tight) == (True, {"grade_cpu_s": cpu_s})
        assert found.to_json()["tight"] == {"grade_cpu_s": cpu_s}


class Slow(PlayedSandbox):
    """Each run takes so long."""

    takes_s = 0.02

    async def run(self, command: str, args: list[str], **options: Any) -> Any:
        await asyncio.sleep(self.takes_s)
        return replace(await super().run(command, args, **options), wall_s=self.takes_s)


def slow(*passed: str, rebuilds: bool = False) -> Slow:
    results = [a_result(b"")] if rebuilds else []
    return Slow(*results, *fork(*passed).results)


@pytest.mark.parametrize(
    ("limit_s", "fit", "tight"), [(1.0, True, []), (0.05, True, ["grade_wall_s"]), (0.03, False, ["grade_wall_s"])]
)
def test_a_reference_that_takes_more_than_half_of_a_wall_limit_is_refused(
    tmp_path: Path, limit_s: float, fit: bool, tight: list[str]
) -> None:
    forks = [slow("a", "b"), slow("a"), slow("a", "b"), slow("a", "b"), slow("a")]
    found = check(tmp_path, *forks, times=1, limits=TaskLimits(grade_wall_s=limit_s))
    assert (found.fit, list(found.tight)) == (fit, tight)
    if not fit:
        assert "takes 0.0 s of the 0.03 s of grade_wall_s" in found.why
        assert "raise it to 1 s or more" in found.why


def test_so_is_one_whose_rebuild_step_does(tmp_path: Path) -> None:
    whole = [slow("a", "b", rebuilds=True) for _ in range(3)]
    forks = [whole[0], slow("a"), whole[1], whole[2], slow("a")]
    limits = TaskLimits(rebuild_wall_s=0.03)
    found = check(tmp_path, *forks, times=1, rebuild=("make",), limits=limits)
    assert (found.fit, found.tight) == (False, {"rebuild_wall_s": 0.02})
    assert "of rebuild_wall_s" in found.why


@pytest.mark.parametrize(("cpu_s", "fit"), [(22.0, True), (44.0, False)])
def test_where_a_program_judges_no_limit_gives_way(tmp_path: Path, cpu_s: float, fit: bool) -> None:
    forks = PlayedSandbox(a_result(b"", cpu_s=cpu_s)), PlayedSandbox(a_result(b"", exit_code=1))
    found = check(tmp_path, *forks, times=1, verifier={"kind": "command", "command": ["judge"]})
    assert (found.fit, found.tight) == (fit, {"grade_cpu_s": cpu_s})


UNSTEADY = (("a", "b", "c"), ("a", "b"), ("a",), ("a",))


def test_tests_that_the_reference_does_not_pass_each_time_count_no_more(tmp_path: Path) -> None:
    again = [fork(*names) for names in (("a", "b"), ("a", "b"), ("a",), ("a",))]
    found = check(tmp_path, *calibrated(), *(fork(*names) for names in UNSTEADY), *again)
    assert (found.fit, found.expected, found.flaky) == (True, ("a", "b"), ("c",))
    # Whoever grades from now on does without them.
    later = check(tmp_path, fork("a", "b"), fork("a"), times=1)
    assert (later.fit, later.expected) == (True, ("a", "b"))


def test_a_reference_that_goes_on_to_fail_is_refused(tmp_path: Path) -> None:
    again = [fork(*names) for names in (("a",), ("a", "b"), ("a",), ("a",))]
    found = check(tmp_path, *calibrated(), *(fork(*names) for names in UNSTEADY), *again)
    assert (found.fit, found.flaky) == (False, ("b", "c"))
    assert "such as b" in found.why


def test_a_declared_test_that_is_flaky_is_refused(tmp_path: Path) -> None:
    found = check(tmp_path, *calibrated(), *(fork(*names) for names in UNSTEADY), fail_to_pass=("c",))
    assert (found.fit, found.flaky) == (False, ("c",))
    assert "such as c" in found.why


def test_a_state_that_is_right_already_is_refused(tmp_path: Path) -> None:
    whole = ("a", "b", "c")
    found = check(tmp_path, *calibrated(), fork(*whole), fork(*whole), fork("a"), fork(*whole))
    assert (found.fit, found.why) == (False, "it is worth 1 without any change")
    assert found.flaky == ("b", "c")


def test_a_task_without_a_reference_is_refused(tmp_path: Path) -> None:
    assert "no reference" in check(tmp_path, solution={}).why


def test_what_the_world_does_not_pass_is_told(tmp_path: Path) -> None:
    found = check(tmp_path, *calibrated(), fork("a", "b", "c"), fork("a"), times=1, pass_to_pass=("a", "z"))
    assert (found.fit, found.unmet) == (True, ("z",))


def test_what_calibration_found_to_be_flaky_is_told(tmp_path: Path) -> None:
    forks = [fork("a", "b", "at 1"), fork("a"), fork("a", "b", "at 2")]
    found = check(tmp_path, *forks, fork("a", "b"), fork("a"), times=1)
    assert (found.fit, found.expected, found.flaky) == (True, ("a", "b"), ("at 1", "at 2"))


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (fork("a", "b", "c", reason=Reason.TIMED_OUT), "calibration: "),
        (LaunchFailed("no room"), "launch_failed: no room"),
    ],
)
def test_a_task_that_cannot_be_judged_says_why(tmp_path: Path, trouble: Any, words: str) -> None:
    found = check(tmp_path, trouble)
    assert not found.fit
    assert found.why.startswith(words)


def test_an_overload_of_the_moment_is_no_verdict(tmp_path: Path) -> None:
    forks = [starved(), *calibrated(), starved(), starved(), fork("a", "b", "c"), fork("a")]
    assert check(tmp_path, *forks, times=1).fit
    assert check(tmp_path, starved(), starved(), starved(), times=1).why.startswith("overload: ")


def test_a_verifier_that_is_malformed_refuses_its_task(tmp_path: Path) -> None:
    async def start_of(_: Task) -> Any:
        raise AssertionError

    checker = Checker(start_of, CalibrationStore(tmp_path), {"kind": "magic"})
    assert "magic" in asyncio.run(checker.check(a_task(), 1)).why
