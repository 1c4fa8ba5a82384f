from __future__ import annotations

import asyncio
import copy
import errno
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reward.played import PlayedSandbox, PlayedStart, a_result, a_task, report, row

from worldfork.core.errors import LaunchFailed, PathError, VerifierError
from worldfork.records.cpu import CpuUse, ThreadUse
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.needs import Need
from worldfork.reward.pytest_verifier import PytestVerifier
from worldfork.reward.verifier import Case, Grade, Verifier
from worldfork.sandbox.command import Reason

START = {"/workspace/a.py": b"old", "/workspace/b.py": b"kept"}
WAITED = {"/proc/9/schedstat": b"1 32000000000 2\n"}


def fork(stdout: bytes, **result: Any) -> PlayedSandbox:
    return PlayedSandbox(a_result(stdout, **result), files=START | WAITED)


def reference(*names: str) -> PlayedSandbox:
    return fork(report(*(row(name) for name in names)))


MINE = Edits({"a.py": EditedFile(b"mine")})


def a_case(*forks: PlayedSandbox | Exception, twice: bool = True, **changes: Any) -> Case:
    task = a_task(**changes)
    start: Any = PlayedStart(*forks, task=task, twice=twice)
    return Case(task, start, MINE)


def grade(tmp_path: Path, *forks: PlayedSandbox | Exception, **changes: Any) -> Grade:
    verifier: Verifier = PytestVerifier(CalibrationStore(tmp_path))
    return asyncio.run(verifier.grade(a_case(*forks, **changes)))


def test_reward_is_passed_of_expected(tmp_path: Path) -> None:
    untouched = fork(report(row("a"), row("b", "failed"), row("c", "failed"), row("d", "failed")))
    mine = fork(report(row("a"), row("b"), row("c", "skipped"), row("extra")))
    result = grade(tmp_path, reference("a", "b", "c", "d"), untouched, mine)
    assert result.reward == 0.5
    assert result.parts == {"fraction": 0.5, "fail_to_pass": pytest.approx(1 / 3)}
    assert (result.passed, result.failed) == (("a", "b"), ("c",))
    assert result.untouched == ("a",)


def test_the_exit_code_decides_nothing(tmp_path: Path) -> None:
    mine = fork(report(row("a"), finished=False), exit_code=-9, reason=Reason.SIGNALED)
    assert grade(tmp_path, reference("a", "b"), fork(report()), mine).reward == 0.5


def test_what_worked_before_must_still_work(tmp_path: Path) -> None:
    mine = fork(report(row("b")))
    result = grade(tmp_path, reference("a", "b"), fork(report(row("a"))), mine)
    assert result.reward == 0.5
    assert result.parts["fail_to_pass"] == 0.0


@pytest.mark.parametrize("score", ["fraction", "fail_to_pass"])
def test_a_task_that_needs_no_change_is_no_score(tmp_path: Path, score: str) -> None:
    store = CalibrationStore(tmp_path)
    for forks in ([reference("a"), reference("a")], []):
        # Known from the first time on.
        with pytest.raises(VerifierError, match="worth 1 without any change") as raised:
            asyncio.run(PytestVerifier(store).grade(a_case(*forks, score=score)))
        assert raised.value.fields["kind"] is FailureKind.CALIBRATION


def test_a_task_in_which_flaky_tests_alone_failed_is_no_score(tmp_path: Path) -> None:
    verifier = PytestVerifier(CalibrationStore(tmp_path))
    case = a_case(*both(), fork(report()))
    asyncio.run(verifier.grade(case))
    asyncio.run(verifier.leave_out(case.task, case.start, ("b", "c")))
    with pytest.raises(VerifierError, match="worth 1"):
        asyncio.run(verifier.grade(case))


def test_tests_that_the_reference_fails_are_not_expected(tmp_path: Path) -> None:
    solved = fork(report(row("a"), row("b", "failed"), row("c", "skipped")))
    result = grade(tmp_path, solved, fork(report()), reference("a"))
    assert result.reward == 1.0
    assert result.expected == ("a",)


def test_what_is_expected_is_found_out_once_and_kept(tmp_path: Path) -> None:
    start: Any = PlayedStart(reference("a"), fork(report()), *(reference("a") for _ in range(4)))

    async def both() -> None:
        verifier = PytestVerifier(CalibrationStore(tmp_path))
        await asyncio.gather(*(verifier.grade(Case(a_task(), start, MINE)) for _ in range(2)))

    asyncio.run(both())
    assert grade(tmp_path, reference("a")).reward == 1.0
    assert (len(start.forks), start.ended) == (1, 5)


@pytest.mark.parametrize(
    "solved",
    [
        fork(report(row("a"), finished=False)),
        fork(report(row("a")), reason=Reason.TIMED_OUT),
        fork(report(row("a", "failed"))),
        fork(report()),
    ],
)
def test_a_reference_that_shows_nothing_is_no_score(tmp_path: Path, solved: PlayedSandbox) -> None:
    with pytest.raises(VerifierError) as raised:
        grade(tmp_path, solved, copy.deepcopy(solved))
    assert raised.value.fields["kind"] is FailureKind.CALIBRATION
    # Nothing of it was kept.
    assert grade(tmp_path, reference("a"), fork(report()), reference("a")).reward == 1.0


STARVED = row("a", "failed", wall_s=32.0, cpu_s=1.0, waited_s=31.0)


def test_an_overloaded_machine_is_no_score(tmp_path: Path) -> None:
    late = {"wall_s": 33.0, "cpu_s": 1.0}
    for forks in (
        [fork(report(STARVED), **late)],
        [reference("a"), fork(report(STARVED), **late)],
        [reference("a"), fork(report()), fork(report(STARVED), **late)],
    ):
        with pytest.raises(VerifierError) as raised:
            grade(tmp_path, *forks)
        assert raised.value.fields["kind"] is FailureKind.OVERLOAD


def test_a_late_test_that_is_not_expected_voids_nothing(tmp_path: Path) -> None:
    mine = fork(report({**STARVED, "id": "x"}, row("a", "failed")), wall_s=33.0, cpu_s=1.0)
    assert grade(tmp_path, reference("a"), fork(report()), mine).reward == 0.0


def test_a_fork_that_fails_passes_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed):
        grade(tmp_path, reference("a"), fork(report()), LaunchFailed("no"))


def both() -> tuple[PlayedSandbox, PlayedSandbox]:
    return reference("a", "b", "c"), fork(report(row("a"), row("b", "failed")))


def test_a_task_can_be_scored_by_what_it_repairs(tmp_path: Path) -> None:
    mine = fork(report(row("a"), row("b")))
    whole = grade(tmp_path, *both(), mine, score="fail_to_pass")
    assert (whole.reward, whole.parts["fraction"]) == (0.5, pytest.approx(2 / 3))
    broke = grade(tmp_path, fork(report(row("b"), row("c"))), score="fail_to_pass")
    assert (broke.reward, broke.failed) == (0.0, ())


def test_declared_ids_are_what_counts_as_repaired(tmp_path: Path) -> None:
    mine = fork(report(row("a"), row("b")))
    result = grade(tmp_path, *both(), mine, score="fail_to_pass", fail_to_pass=("b",), pass_to_pass=("a",))
    assert result.reward == 1.0


def test_only_what_is_declared_must_not_be_lost(tmp_path: Path) -> None:
    for kept, reward in ((("a",), 1.0), (("a", "b"), 0.0), ((), 0.0)):
        solved, untouched = reference("a", "b", "c"), fork(report(row("a"), row("b")))
        mine = fork(report(row("a"), row("b", "failed"), row("c")))
        declared: dict[str, Any] = {"score": "fail_to_pass", "fail_to_pass": ("c",), "pass_to_pass": kept}
        assert grade(tmp_path / f"{len(kept)}", solved, untouched, mine, **declared).reward == reward


def test_what_is_declared_must_not_be_lost_though_the_start_could_not_load_it(tmp_path: Path) -> None:
    declared: dict[str, Any] = {"score": "fail_to_pass", "fail_to_pass": ("t::new",), "pass_to_pass": ("t::old",)}
    for kept, reward in (("failed", 0.0), ("passed", 1.0)):
        solved, mine = reference("t::new", "t::old"), fork(report(row("t::new"), row("t::old", kept)))
        forks = solved, fork(report()), copy.deepcopy(solved), fork(report()), mine
        assert grade(tmp_path / kept, *forks, twice=False, **declared).reward == reward


def test_what_is_declared_and_passed_by_chance_does_not_count(tmp_path: Path) -> None:
    solved, first, second = reference("a", "b", "c"), fork(report(row("c", "failed"))), fork(report(row("a")))
    declared: dict[str, Any] = {"fail_to_pass": ("c",), "pass_to_pass": ("a", "b"), "twice": False}
    case = a_case(solved, first, copy.deepcopy(solved), second, **declared)
    found = asyncio.run(PytestVerifier(CalibrationStore(tmp_path)).calibrate(case.task, case.start))
    assert (found.expected, found.untouched, found.flaky, found.unmet) == (("b", "c"), (), ("a",), ())


def test_what_the_reference_passes_once_does_not_count(tmp_path: Path) -> None:
    forks = reference("a", "b", "at 0x1"), fork(report(row("a", "failed"))), reference("a", "at 0x2")
    case = a_case(*forks, twice=False)
    found = asyncio.run(PytestVerifier(CalibrationStore(tmp_path)).calibrate(case.task, case.start))
    assert (found.expected, found.flaky) == (("a",), ("at 0x1", "at 0x2", "b"))
    forks = reference("1"), fork(report(row("a", "failed"))), reference("2")
    with pytest.raises(VerifierError, match="no test twice"):
        grade(tmp_path / "other", *forks, twice=False)


@pytest.mark.parametrize("declared", [(), ("t::new", "t::old1", "t::old2")])
def test_whoever_makes_a_file_of_tests_load_has_repaired_nothing(tmp_path: Path, declared: tuple[str, ...]) -> None:
    solved = reference("t::new", "t::old1", "t::old2", "u::new", "u::old")
    untouched = fork(report(row("u::old"), row("u::new", "failed")))
    for names, reward in (("", 0.0), ("u::new", 0.25), ("t::new", 0.75), ("t::new u::new", 1.0)):
        mine = fork(report(*map(row, ["t::old1", "t::old2", "u::old", *names.split()])))
        forks = [copy.deepcopy(each) for each in (solved, untouched)]
        changes: dict[str, Any] = {"fail_to_pass": (*declared, "u::new")} if declared else {}
        result = grade(tmp_path / (names or "none"), *forks, mine, score="fail_to_pass", **changes)
        assert result.reward == reward


def test_what_is_declared_and_passes_beside_a_file_that_cannot_be_loaded_earns_nothing(tmp_path: Path) -> None:
    declared: dict[str, Any] = {"score": "fail_to_pass", "fail_to_pass": ("t::new", "u::early"), "pass_to_pass": ("v",)}
    for names, reward in (("u::early v", 0.0), ("t::new v", 0.0), ("t::new u::early", 0.0), ("t::new u::early v", 1.0)):
        forks = reference("t::new", "u::early", "v"), reference("u::early", "v"), reference(*names.split())
        assert grade(tmp_path / names, *forks, **declared).reward == reward


def test_resolved_is_all_or_nothing(tmp_path: Path) -> None:
    for number, reward in ((2, 0.0), (3, 1.0)):
        mine = fork(report(*map(row, "abc"[:number])))
        result = grade(tmp_path / f"{number}", *both(), mine, score="resolved")
        assert (result.reward, result.parts["resolved"]) == (reward, reward)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fail_to_pass": ("gone",)}, "does not pass"),
        ({"fail_to_pass": ("a",)}, "without any change"),
    ],
)
def test_declared_ids_that_are_wrong_are_no_score(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(VerifierError, match=words) as raised:
        grade(tmp_path, *both(), fork(report()), **changes)
    assert raised.value.fields["kind"] is FailureKind.CALIBRATION


def test_why_a_reference_passes_nothing_is_told_of_it_alone(tmp_path: Path) -> None:
    failed = report(row("test_a.py::test_x", "failed"))
    telling = fork(
        failed, stderr_bytes=b"F\n===== FAILURES =====\n____ test_x ____\na.py:1: in test_x\nE   assert 9 == 6\n"
    )
    case = a_case(fork(failed), telling, twice=False)
    with pytest.raises(VerifierError, match=r"passes no test: test_a\.py::test_x: assert 9 == 6 \("):
        asyncio.run(PytestVerifier(CalibrationStore(tmp_path)).grade(case))
    assert "--tb=short" in telling.calls[0]["args"]
    assert "--no-summary" not in telling.calls[0]["args"]
    mine = fork(failed)
    grade(tmp_path, reference("test_a.py::test_x"), fork(report()), mine)
    assert {"--tb=no", "--no-summary"} < set(mine.calls[0]["args"])


def test_a_task_without_a_reference_is_no_score(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match="no reference"):
        grade(tmp_path, solution={})


def test_what_the_world_cannot_pass_is_told(tmp_path: Path) -> None:
    case = a_case(*both(), pass_to_pass=("a", "z"))
    found = asyncio.run(PytestVerifier(CalibrationStore(tmp_path)).calibrate(case.task, case.start))
    assert found.unmet == ("z",)


def test_a_reference_that_does_not_build_is_no_score(tmp_path: Path) -> None:
    with pytest.raises(VerifierError) as raised:
        grade(tmp_path, fork(b"", exit_code=1), rebuild=("make",))
    assert raised.value.fields["kind"] is FailureKind.BUILD


def test_an_end_that_left_nothing_is_worth_0(tmp_path: Path) -> None:
    verifier = PytestVerifier(CalibrationStore(tmp_path))
    nothing = asyncio.run(verifier.grade_nothing(a_case(*both())))
    assert (nothing.reward, nothing.expected, nothing.untouched) == (0.0, ("a", "b", "c"), ("a",))
    assert nothing.parts == {"fraction": 0.0, "fail_to_pass": 0.0}


def test_graded_forks_are_those_of_verifiers(tmp_path: Path) -> None:
    case = a_case(*both(), fork(report()))
    asyncio.run(PytestVerifier(CalibrationStore(tmp_path)).grade(case))
    start: Any = case.start
    assert all(asked["grading"] is True for asked in start.asked)
    assert len(start.asked) == 4


def built(*results: Any) -> PlayedSandbox:
    """A fork in which the rebuild step and then the tests run."""
    return PlayedSandbox(a_result(b""), *results, files=START)


def without_pytest() -> PlayedSandbox:
    return built(a_result(b"no module named pytest"))


def test_a_policy_whose_rebuild_step_removes_pytest_is_worth_0(tmp_path: Path) -> None:
    forks = built(a_result(report(row("a")))), fork(report()), without_pytest(), fork(report()), without_pytest()
    result = grade(tmp_path, *forks, rebuild=("make",))
    assert (result.reward, result.end, result.sandbox_id) == (0.0, "broken", None)


def test_a_policy_that_takes_its_rebuild_step_away_is_worth_0(tmp_path: Path) -> None:
    missing = [fork(b"", reason=Reason.NOT_STARTED, exit_code=127) for _ in range(2)]
    forks = built(a_result(report(row("a")))), fork(report()), missing[0], fork(report()), missing[1]
    assert grade(tmp_path, *forks, rebuild=("make",)).reward == 0.0


def test_a_fault_of_the_moment_is_not_the_policys(tmp_path: Path) -> None:
    mine = built(a_result(report(row("a"))))
    forks = built(a_result(report(row("a")))), fork(report()), without_pytest(), fork(report()), mine
    assert grade(tmp_path, *forks, rebuild=("make",)).reward == 1.0


def test_a_world_that_has_no_pytest_any_more_is_no_score(tmp_path: Path) -> None:
    solved = built(a_result(report(row("a"))))
    with pytest.raises(VerifierError) as raised:
        grade(tmp_path, solved, fork(report()), without_pytest(), fork(b""), rebuild=("make",))
    assert raised.value.fields["kind"] is FailureKind.GRADING


@pytest.mark.parametrize(("number", "own"), [(errno.EDQUOT, True), (errno.EMFILE, False)])
@pytest.mark.parametrize("rebuild", [(), ("make",)])
def test_what_stands_in_the_way_with_the_edits_alone_is_the_policys(
    tmp_path: Path, number: int, own: bool, rebuild: tuple[str, ...]
) -> None:
    class Stuck(PlayedSandbox):
        async def write_file(self, path: str, content: bytes | str, *, mode: int | None = None) -> None:
            if path.endswith("test_a.py"):
                raise PathError("no", path=path, errno=number)
            await super().write_file(path, content, mode=mode)

    stuck = [Stuck(*(a_result(b"") for _ in rebuild), files=START) for _ in range(2)]
    solved = built(a_result(report(row("a")))) if rebuild else reference("a")
    forks = solved, fork(report()), stuck[0], fork(report()), stuck[1]
    if own:
        assert grade(tmp_path, *forks, rebuild=rebuild).reward == 0.0
        return
    with pytest.raises(PathError):
        grade(tmp_path, *forks, rebuild=rebuild)


@pytest.mark.parametrize("again", [True, False])
def test_what_a_rebuild_step_left_so_that_it_cannot_be_started_is_the_policys(tmp_path: Path, again: bool) -> None:
    class Start(PlayedStart):
        refused = 0

        def fork(self, index: int = 0, **options: Any) -> Any:
            if options.get("snapshot_id") and len(self.asked) > 5 and (again or not self.refused):
                self.refused += 1
                raise LaunchFailed("no", step="the overlay", errno=errno.ENOTDIR)
            return super().fork(index, **options)

    task = a_task(rebuild=("make",))
    passes = [built(a_result(report(row("a")))) for _ in range(3)]
    start: Any = Start(passes[0], fork(report()), passes[1], fork(report()), passes[2], task=task, twice=True)
    found = asyncio.run(PytestVerifier(CalibrationStore(tmp_path)).grade(Case(task, start, MINE)))
    assert found.reward == (0.0 if again else 1.0)
    assert start.refused == (2 if again else 1)


@pytest.mark.parametrize(("needed_s", "judged"), [(0.05, True), (0.15, False)])
def test_a_wall_limit_strikes_code_that_had_what_the_reference_needs(
    tmp_path: Path, needed_s: float, judged: bool
) -> None:
    class Waits(PlayedSandbox):
        looked = False

        async def run(self, command: str, args: list[str], **options: Any) -> Any:
            await asyncio.sleep(0.3)
            return await super().run(command, args, **options)

        async def cpu_use(self) -> CpuUse | None:
            waited_s, self.looked = 0.06 if self.looked else 0.0, True
            return CpuUse(0.0, 0.0, {7: ThreadUse(0.0, waited_s, False, False)})

    late = a_result(report(finished=False), reason=Reason.TIMED_OUT, exit_code=-9, wall_s=5.2)
    solved = fork(report(row("a"), row("b")), wall_s=needed_s)
    case = a_case(solved, fork(report(row("a"))), Waits(late, files=START), limits=TaskLimits(grade_wall_s=0.2))
    if judged:
        assert asyncio.run(PytestVerifier(CalibrationStore(tmp_path)).grade(case)).reward == 0.0
        return
    with pytest.raises(VerifierError) as raised:
        asyncio.run(PytestVerifier(CalibrationStore(tmp_path)).grade(case))
    assert raised.value.fields["kind"] is FailureKind.OVERLOAD


def test_what_the_reference_needs_is_the_less_of_two(tmp_path: Path) -> None:
    forks = fork(report(row("a")), wall_s=9.0, cpu_s=3.0), fork(report()), fork(report(row("a")), wall_s=7.0, cpu_s=5.0)
    case = a_case(*forks, twice=False)
    found = asyncio.run(PytestVerifier(CalibrationStore(tmp_path)).calibrate(case.task, case.start))
    assert found.need == Need(cpu_s=3.0, wall_s=7.0)
