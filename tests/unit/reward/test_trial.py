from __future__ import annotations

import ast
import asyncio
import math
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reward.played import PlayedSandbox, PlayedStart, a_result, a_task, report, row

from worldfork import reward
from worldfork.core.errors import ConfigError, OutOfSpace, PathError, SandboxDied, VerifierError
from worldfork.records.cpu import CpuUse, ThreadUse
from worldfork.records.death import Death, DeathCause, LimitHits
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward import blame
from worldfork.reward.blame import Looks
from worldfork.reward.needs import Need
from worldfork.reward.report import Report, TestRecord
from worldfork.reward.trial import Trial, find_starved, run_tests
from worldfork.sandbox.command import Reason


@pytest.fixture(autouse=True)
def _others_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine does meanwhile is nothing to a test."""
    monkeypatch.setattr(blame, "machine_used_s", lambda: math.inf)


PASSED = report(row("t::a"))
START = {"/workspace/a.py": b"old", "/workspace/b.py": b"kept"}


def edits(*removed: str, **files: bytes) -> Edits:
    return Edits({name.replace("_py", ".py"): EditedFile(content) for name, content in files.items()}, removed)


def run(sandbox: PlayedSandbox, task: Task, left: Edits | None = None, need: Need | None = None) -> Trial:
    return asyncio.run(run_tests(played(sandbox), task, played(PlayedStart(task=task)), left or Edits(), need))


def played(part: object) -> Any:
    return part


def test_edits_are_laid_down_and_hidden_tests_win() -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    task = a_task(editable=("a.py", "test_a.py", "new.py"))
    trial = run(sandbox, task, edits(a_py=b"mine", test_a_py=b"forged", b_py=b"not mine to change"))
    assert sandbox.files == {
        "/workspace/a.py": b"mine",
        "/workspace/b.py": b"kept",
        "/workspace/test_a.py": b"hidden",
    }
    assert trial.notes == ("not laid down: b.py",)


def test_a_hidden_script_that_names_its_interpreter_can_be_run() -> None:
    modes: dict[str, int | None] = {}

    class Keeps(PlayedSandbox):
        async def write_file(self, path: str, content: bytes | str, *, mode: int | None = None) -> None:
            modes[path] = mode
            await super().write_file(path, content, mode=mode)

    task = a_task(hidden_tests={"check.sh": "#!/bin/sh\ntrue\n", "test_a.py": "hidden"})
    run(Keeps(a_result(PASSED), files=START), task)
    assert modes == {"/workspace/check.sh": 0o755, "/workspace/test_a.py": 0o644}


def test_a_removed_file_does_not_exist_for_the_tests() -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    run(sandbox, a_task(), edits("a.py", "b.py", new_py=b"new"))
    assert sandbox.files == {
        "/workspace/b.py": b"kept",
        "/workspace/new.py": b"new",
        "/workspace/test_a.py": b"hidden",
    }


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py",
        "pkg/conftest.py",
        "conftest/__init__.py",
        "sitecustomize.py",
        "usercustomize/__init__.py",
        "sitecustomize.cpython-311-x86_64-linux-gnu.so",
        "lib/evil.pth",
        "__pycache__/a.cpython-311.pyc",
        "a.pyc",
        "evil-1.dist-info/entry_points.txt",
    ],
)
def test_nothing_that_runs_before_the_tests_is_laid_down(path: str) -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files={**START, "/workspace/" + path: b"the world's"})
    left = Edits({path: EditedFile(b"mine"), "ok.py": EditedFile(b"mine")})
    trial = run(sandbox, a_task(editable=("**",)), left)
    assert sandbox.files["/workspace/" + path] == b"the world's"
    assert sandbox.files["/workspace/ok.py"] == b"mine"
    assert trial.notes == (f"not laid down: {path}",)


def test_start_up_files_of_the_hidden_tests_are_theirs() -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    task = a_task(editable=("**",), hidden_tests={"test_a.py": "hidden", "conftest.py": "hidden too"})
    trial = run(sandbox, task, edits(conftest_py=b"mine"))
    assert sandbox.files["/workspace/conftest.py"] == b"hidden too"
    assert trial.notes == ()


def test_what_is_planted_where_tests_belong_is_gone() -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files={**START, "/workspace/tests/old.py": b"the world's"})
    task = a_task(editable=("**",), test_roots=("tests",), hidden_tests={"tests/test_a.py": "hidden"})
    run(sandbox, task, Edits({"tests/test_b.py": EditedFile(b"planted")}))
    assert {path for path in sandbox.files if "/tests/" in path} == {"/workspace/tests/test_a.py"}


def test_how_pytest_is_called() -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    limits = TaskLimits(grade_cpu_s=7.5, grade_wall_s=20)
    run(sandbox, a_task(limits=limits, env={"PYTHONPATH": "src:lib"}), edits(a_py=b""))
    call = sandbox.calls[0]
    args = call["args"]
    assert args[:6] == ["-B", "-s", "-", "8", "/workspace", "src:lib"]
    assert args[args.index("-c") + 1] == "/dev/null"
    assert "no:cacheprovider" in args
    assert args[-4:] == ["-p", "pytest_timeout", "--timeout=32", "test_a.py"]
    assert call["env"]["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] == "1"
    # Nothing of the task is on the import path before pytest is loaded.
    assert (call["env"]["PYTHONPATH"], call["working_dir"]) == ("", "/")
    assert (resource.RLIMIT_CPU, 8, 9) in call["rlimits"]
    assert call["timeout"] > 20
    assert b"class Reporter" in call["stdin"]


def test_a_world_without_python_may_have_python3() -> None:
    missing = a_result(b"", reason=Reason.NOT_STARTED, exit_code=127)
    sandbox = PlayedSandbox(missing, a_result(PASSED), files=START)
    assert run(sandbox, a_task()).report.passed == {"t::a"}
    assert [call["command"] for call in sandbox.calls] == ["python", "python3"]


REBUILT = ("make", "-s")


def test_sources_are_rebuilt_before_there_are_tests() -> None:
    sandbox = PlayedSandbox(a_result(b""), a_result(PASSED), files=START)
    task = a_task(rebuild=REBUILT)
    start = PlayedStart(task=task)
    trial = asyncio.run(run_tests(played(sandbox), task, played(start), edits(a_py=b"mine")))
    assert [call["command"] for call in sandbox.calls] == ["make", "python"]
    assert sandbox.seen[0]["/workspace/a.py"] == b"mine"
    assert "/workspace/test_a.py" not in sandbox.seen[0]
    assert trial.report.passed == {"t::a"}
    # Nothing that the rebuild step left running sees a test: they run in a fork of what it left on its disk.
    assert start.stilled_ones == [sandbox]
    assert start.asked == [{"index": 0, "grading": True, "snapshot_id": "sn-stilled"}]
    assert start.ended == 1


@pytest.mark.parametrize("error", [SandboxDied("gone"), OutOfSpace("full", scope="sandbox")])
def test_a_rebuild_step_that_breaks_its_sandbox_is_the_policys(error: Any) -> None:
    for stilling in (False, True):
        sandbox = PlayedSandbox(a_result(b"") if stilling else error, files=START)
        start = PlayedStart(task=a_task(rebuild=REBUILT))
        start.stands_in_the_way = error
        task = a_task(rebuild=REBUILT)
        trial = asyncio.run(run_tests(played(sandbox), task, played(start), edits(a_py=b"mine")))
        assert (trial.end, trial.report.passed) == (error.code, frozenset())
        assert "/workspace/test_a.py" not in sandbox.files
        sandbox = PlayedSandbox(a_result(b"") if stilling else error, files=START)
        sandbox.death = Death(DeathCause.OUTSIDE, "seen")
        with pytest.raises(VerifierError):
            asyncio.run(run_tests(played(sandbox), task, played(start), edits(a_py=b"mine")))


def test_an_untouched_state_is_not_rebuilt() -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    assert run(sandbox, a_task(rebuild=REBUILT)).end == "exited"


def test_sources_that_do_not_build_pass_nothing() -> None:
    sandbox = PlayedSandbox(a_result(b"no such header", exit_code=1), files=START)
    trial = run(sandbox, a_task(rebuild=REBUILT), edits(a_py=b"mine"))
    assert (trial.end, trial.report.passed, trial.last_words) == ("build_failed", frozenset(), "no such header")


def test_a_rebuild_step_that_sleeps_is_no_overload() -> None:
    late = a_result(b"", reason=Reason.TIMED_OUT, exit_code=-9, wall_s=300.0, cpu_s=2.0)
    trial = run(PlayedSandbox(late, files=START), a_task(rebuild=REBUILT), edits(a_py=b"mine"))
    assert trial.end == "build_failed"


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (a_result(b"", reason=Reason.NOT_STARTED, exit_code=127), FailureKind.BUILD),
        (a_result(b"", reason=Reason.OOM_KILLED, exit_code=-9), FailureKind.MEMORY),
        # A compiler that the step started, or a helper of it that it does without.
        (a_result(b"", exit_code=2), FailureKind.MEMORY),
        (a_result(b""), FailureKind.MEMORY),
    ],
)
def test_a_rebuild_step_that_the_machine_failed_is_no_score(result: Any, kind: FailureKind) -> None:
    sandbox = PlayedSandbox(result, files=START)
    sandbox.hits = LimitHits(host_memory=1)
    with pytest.raises(VerifierError) as raised:
        run(sandbox, a_task(rebuild=REBUILT), edits(a_py=b"mine"))
    assert raised.value.fields["kind"] is kind


@pytest.mark.parametrize(
    ("test_args", "first", "last"),
    [
        (("t.py",), "0", ["t.py"]),
        (("--timeout=0", "t.py"), "0", ["-p", "pytest_timeout", "--timeout=0", "t.py"]),
        (("--timeout", "9", "t.py"), "0", ["-p", "pytest_timeout", "--timeout", "9", "t.py"]),
        (("--timeout=0.5", "t.py"), "0.5", ["-p", "pytest_timeout", "--timeout=2", "t.py"]),
        (("--forked", "t.py"), "0", ["-p", "pytest_forked", "--forked", "t.py"]),
        (("-p", "xdist.plugin", "t.py"), "0", ["-p", "xdist.plugin", "t.py"]),
    ],
)
def test_a_tests_own_limit_counts_cpu_seconds(test_args: tuple[str, ...], first: str, last: list[str]) -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    run(sandbox, a_task(test_args=test_args))
    args = sandbox.calls[0]["args"]
    assert args[3] == first
    assert args[-len(last) :] == last


def test_a_limit_that_is_no_number_is_the_tasks_fault() -> None:
    with pytest.raises(VerifierError) as raised:
        run(PlayedSandbox(files=START), a_task(test_args=("--timeout=soon",)))
    assert raised.value.fields["kind"] is FailureKind.CALIBRATION


def test_hidden_configuration_is_used() -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    run(sandbox, a_task(hidden_tests={"test_a.py": "", "tox.ini": "", "pytest.ini": ""}))
    args = sandbox.calls[0]["args"]
    assert args[args.index("-c") + 1] == "/workspace/pytest.ini"


@pytest.mark.parametrize("result", [a_result(b""), a_result(b"", reason=Reason.NOT_STARTED, exit_code=127)])
def test_tests_that_did_not_start_are_no_score(result: Any) -> None:
    with pytest.raises(VerifierError) as raised:
        run(PlayedSandbox(result, result, files=START), a_task())
    assert raised.value.fields["kind"] is FailureKind.GRADING


def test_what_the_code_under_test_does_to_its_fork_is_its_own() -> None:
    died = run(PlayedSandbox(SandboxDied("gone"), files=START), a_task())
    assert (died.end, died.report.passed) == ("sandbox_died", frozenset())
    full = run(PlayedSandbox(OutOfSpace("full", scope="sandbox"), files=START), a_task())
    assert full.end == "out_of_space"
    with pytest.raises(OutOfSpace):
        run(PlayedSandbox(OutOfSpace("full", scope="host"), files=START), a_task())


def test_the_worlds_configuration_is_used_where_no_policy_may_change_it() -> None:
    files = {**START, "/workspace/pyproject.toml": b"[tool.other]", "/workspace/tox.ini": b"[pytest]"}
    for editable, expected in ((("a.py",), "/workspace/tox.ini"), (("**",), "/dev/null")):
        sandbox = PlayedSandbox(a_result(PASSED), files=files)
        run(sandbox, a_task(editable=editable))
        args = sandbox.calls[0]["args"]
        assert args[args.index("-c") + 1] == expected


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (DeathCause.HOST_MEMORY, FailureKind.MEMORY),
        (DeathCause.HOST_DISK, FailureKind.SPACE),
        (DeathCause.OUTSIDE, FailureKind.LOST),
        (DeathCause.UNKNOWN, FailureKind.LOST),
    ],
)
def test_a_death_that_the_code_under_test_did_not_cause_is_no_score(cause: DeathCause, kind: FailureKind) -> None:
    sandbox = PlayedSandbox(SandboxDied("gone"), files=START)
    sandbox.death = Death(cause, "seen")
    with pytest.raises(VerifierError) as raised:
        run(sandbox, a_task())
    assert raised.value.fields["kind"] is kind


def test_a_kill_for_memory_is_the_codes_own_unless_the_host_had_none() -> None:
    killed = a_result(PASSED, reason=Reason.OOM_KILLED, exit_code=-9)
    assert run(PlayedSandbox(killed, files=START), a_task()).end == "oom_killed"
    sandbox = PlayedSandbox(killed, files=START)
    sandbox.hits = LimitHits(host_memory=1)
    with pytest.raises(VerifierError) as raised:
        run(sandbox, a_task())
    assert raised.value.fields["kind"] is FailureKind.MEMORY


@pytest.mark.parametrize(
    ("said", "judged"),
    [
        (report(row("t::a", "failed")), False),
        (report(row("t::a"), finished=False), False),
        (report(), False),
        (report(ready=False), False),
        (PASSED, True),
    ],
)
def test_a_child_that_the_host_ended_for_its_memory_fails_no_test(said: bytes, judged: bool) -> None:
    sandbox = PlayedSandbox(a_result(said), files=START)
    sandbox.hits = LimitHits(host_memory=1)
    if judged:
        assert run(sandbox, a_task()).report.passed == {"t::a"}
        return
    with pytest.raises(VerifierError) as raised:
        run(sandbox, a_task())
    assert raised.value.fields["kind"] is FailureKind.MEMORY
    # One that met its own limit is the code's.
    sandbox.results, sandbox.hits = [a_result(report(row("t::a", "failed")))], LimitHits(memory=1)
    assert run(sandbox, a_task()).report.passed == set()


def test_trouble_before_the_tests_is_ours() -> None:
    sandbox = PlayedSandbox(files={})
    sandbox.delete_file = _refuse  # type: ignore[method-assign]
    with pytest.raises(PathError):
        run(sandbox, a_task())


JUNIT = (
    b'<testsuite><testcase classname="t" name="a"/><testcase classname="t" name="b"><failure/></testcase></testsuite>'
)


def test_results_of_another_program_are_read_and_those_that_were_planted_are_not() -> None:
    class Writes(PlayedSandbox):
        async def run(self, command: str, args: list[str], **options: Any) -> Any:
            result = await super().run(command, args, **options)
            self.files["/workspace/out.xml"] = JUNIT
            return result

    task = a_task(test_command=("make", "test"), reader="junit:out.xml")
    planted = {**START, "/workspace/out.xml": b"planted"}
    sandbox = Writes(a_result(b"", exit_code=2), files=planted)
    trial = run(sandbox, task, edits(a_py=b"mine"))
    assert "/workspace/out.xml" not in sandbox.seen[0]
    assert (trial.report.passed, sorted(trial.report.tests), trial.report.finished) == (
        {"t::a"},
        ["t::a", "t::b"],
        True,
    )
    silent = run(PlayedSandbox(a_result(b""), files=planted), task)
    assert (silent.report.passed, silent.report.finished) == (frozenset(), False)


def test_a_command_that_is_pytest_is_run_under_the_verifiers_eyes() -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    run(sandbox, a_task(test_command=("python3.12", "-m", "pytest", "-x", "t.py")))
    assert sandbox.calls[0]["args"][-2:] == ["-x", "t.py"]
    with pytest.raises(ConfigError):
        run(PlayedSandbox(files=START), a_task(test_command=("make", "test")))


async def _refuse(path: str, **_: object) -> None:
    raise PathError("no", path=path, errno=5)


def trial(*, end: str = "exited", tests: dict[str, TestRecord] | None = None, **changes: Any) -> Trial:
    values: dict[str, Any] = {"cpu_s": 1.0, "wall_s": 40.0, "test_wall_s": 32.0, **changes}
    return Trial(Report(ready=True, tests=tests or {}), end=end, **values)


LATE = TestRecord("failed", wall_s=32.0, cpu_s=1.0, waited_s=30.0)
ASLEEP = TestRecord("failed", wall_s=32.0, cpu_s=0.0, waited_s=0.1)
FORGED = TestRecord("failed", wall_s=1e9, cpu_s=0.0, waited_s=1e9)
QUICK = TestRecord("failed", wall_s=0.1, cpu_s=0.0, waited_s=0.1)


@pytest.mark.parametrize(
    ("case", "starved"),
    [
        (trial(tests={"a": LATE}), False),
        (trial(tests={"a": LATE}, starved=frozenset({"a"})), True),
        (trial(tests={"a": LATE}, starved=frozenset({"b"})), False),
        (trial(end="timed_out", missed_s=30.0), True),
        (trial(end="timed_out", missed_s=17.5), True),
        (trial(end="timed_out", missed_s=1.0), False),
        # By several processes at once.
        (trial(end="timed_out", missed_s=30.0, cpu_s=30.0), True),
        (trial(end="timed_out", missed_s=1.0, starved=frozenset({"a"})), False),
        (trial(end="signaled"), False),
    ],
)
def test_only_a_machine_without_a_free_cpu_is_an_overload(case: Trial, starved: bool) -> None:
    assert case.is_starved(frozenset({"a"})) is starved


def asked(case: Trial, *waits_s: float) -> frozenset[str]:
    """Of the late tests, those that were starved by what a cgroup counts: so many seconds of waiting at each look."""
    looks, box = Looks(), PlayedSandbox()
    box.uses = [CpuUse(0.1, 0.0, {7: ThreadUse(0.1, waited_s, True, False)}) for waited_s in waits_s]

    async def look() -> None:
        for _ in waits_s:
            await looks.look(box)  # type: ignore[arg-type]

    asyncio.run(look())
    return find_starved(case, looks)


@pytest.mark.parametrize(
    ("case", "waits_s", "starved"),
    [
        (trial(tests={"a": LATE}), (0.0, 30.0), True),
        (trial(tests={"a": ASLEEP}), (0.0, 30.0), True),
        (trial(tests={"a": LATE}), (0.0, 0.1), False),
        (trial(tests={"a": LATE}), (30.0, 30.1), False),
        (trial(tests={"a": QUICK}), (0.0, 30.0), False),
        (trial(tests={"a": FORGED}), (0.0, 30.0), False),
        (trial(tests={"a": FORGED, "b": FORGED}), (0.0, 0.1), False),
        (trial(tests={"a": LATE}, test_wall_s=None), (0.0, 30.0), False),
        (trial(tests={"a": LATE}, end="timed_out"), (0.0, 30.0), False),
        (trial(tests={"a": LATE}), (), False),
        (trial(tests={"a": replace(LATE, limit_s=32.0)}, test_wall_s=4.0), (0.0, 30.0), True),
        (trial(tests={"a": replace(LATE, limit_s=36.0)}), (0.0, 30.0), False),
        (trial(tests={"a": replace(QUICK, limit_s=0.001)}), (0.0, 30.0), False),
    ],
)
def test_where_a_cgroup_counts_the_report_proves_nothing(
    case: Trial, waits_s: tuple[float, ...], starved: bool
) -> None:
    assert asked(case, *waits_s) == (frozenset("a") if starved else frozenset())


@pytest.mark.parametrize(("others", "missed_s"), [(0, 9.0), (1, 0.0)])
def test_at_the_wall_limit_the_kernel_is_asked_who_waited(others: int, missed_s: float) -> None:
    class Stalled(PlayedSandbox):
        async def run(self, command: str, args: list[str], **options: Any) -> Any:
            await asyncio.sleep(0.2)
            return await super().run(command, args, **options)

    files = {**START, "/proc/7/schedstat": b"100 9000000000 3\n", "/proc/8/schedstat": b"odd", "/proc/self/stat": b""}
    late = a_result(report(finished=False), reason=Reason.TIMED_OUT, wall_s=10.0, cpu_s=0.1)
    task = a_task(limits=TaskLimits(grade_wall_s=0.05))
    files |= {f"/proc/{20 + each}/stat": stat("R", 0) for each in range(1 + others)}
    assert run(Stalled(late, files=files), task).missed_s == pytest.approx(missed_s)


class Waits(PlayedSandbox):
    """Goes on until after the limit, and waits for a CPU for so long in all."""

    waited_s = 0.0
    looked = False

    async def run(self, command: str, args: list[str], **options: Any) -> Any:
        await asyncio.sleep(0.3)
        return await super().run(command, args, **options)

    async def cpu_use(self) -> CpuUse | None:
        waited_s, self.looked = self.waited_s if self.looked else 0.0, True
        return CpuUse(0.0, 0.0, {7: ThreadUse(0.0, waited_s, False, False)})


# Of a limit of 0.2 s it had 0.14 s.
ENDED = {"reason": Reason.TIMED_OUT, "exit_code": -9, "wall_s": 5.2, "cpu_s": 0.14}


@pytest.mark.parametrize(("needed_s", "starved"), [(0.0, False), (0.06, False), (0.08, True), (0.15, True)])
def test_a_wall_limit_is_held_against_what_the_reference_needs_of_it(needed_s: float, starved: bool) -> None:
    sandbox = Waits(a_result(report(finished=False), **ENDED), files=START)
    sandbox.waited_s = 0.06
    task = a_task(limits=TaskLimits(grade_wall_s=0.2))
    assert run(sandbox, task, need=Need(wall_s=needed_s)).is_starved(frozenset("a")) is starved


@pytest.mark.parametrize(("needed_s", "starved"), [(0.0, False), (0.06, False), (0.08, True), (0.15, True)])
def test_so_is_the_limit_of_the_rebuild_step(needed_s: float, starved: bool) -> None:
    sandbox = Waits(a_result(b"", **ENDED), files=START)
    sandbox.waited_s = 0.06
    task, need = a_task(rebuild=REBUILT, limits=TaskLimits(rebuild_wall_s=0.2)), Need(rebuild_s=needed_s)
    if not starved:
        assert run(sandbox, task, edits(a_py=b"mine"), need).end == "build_failed"
        return
    with pytest.raises(VerifierError) as raised:
        run(sandbox, task, edits(a_py=b"mine"), need)
    assert raised.value.fields["kind"] is FailureKind.OVERLOAD


def test_what_is_not_known_is_measured() -> None:
    sandbox = Waits(a_result(b"", wall_s=30.0), a_result(PASSED, wall_s=40.0), files=START)
    sandbox.waited_s = 10.0
    trial = run(sandbox, a_task(rebuild=REBUILT), edits(a_py=b"mine"))
    # The second run is asked from its own beginning, by when the thread has waited already.
    assert (trial.rebuild_s, trial.missed_s) == (pytest.approx(20.0), 0.0)
    assert trial.rebuild_cpu_s == 0.9


@pytest.mark.parametrize(("used_s", "limit"), [(0.0, 8), (3.0, 8), (6.0, 12), (7.5, 15), (80.0, 15)])
@pytest.mark.parametrize("commanded", [{}, {"test_command": ("make", "test"), "reader": "tap"}])
def test_a_process_may_use_twice_the_cpu_seconds_of_the_reference(
    used_s: float, limit: int, commanded: dict[str, Any]
) -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    run(sandbox, a_task(limits=TaskLimits(grade_cpu_s=7.5), **commanded), need=Need(cpu_s=used_s))
    assert (resource.RLIMIT_CPU, limit, limit + 1) in sandbox.calls[0]["rlimits"]


def stat(state: str, ticks: int) -> bytes:
    return f"9 (python) {state} 1 9 9 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 {'0 ' * 21}0".encode()


LATE_ROW = row("a", "failed", wall_s=32.0, cpu_s=0.5, waited_s=31.0)


@pytest.mark.parametrize(
    ("proc", "starved"),
    [
        ({}, True),
        ({"/proc/1/stat": stat("R", 0), "/proc/9/stat": stat("S", 10)}, True),
        ({"/proc/9/stat": stat("R", 10)}, False),
        ({"/proc/1/stat": stat("S", 2000)}, False),
    ],
)
def test_a_sandbox_that_took_the_cpu_from_its_own_tests_starved_nobody_else(
    proc: dict[str, bytes], starved: bool
) -> None:
    late = a_result(report(LATE_ROW), wall_s=33.0, cpu_s=0.5)
    proc = {**START, "/proc/9/schedstat": b"1 31000000000 2\n", **proc}
    assert run(PlayedSandbox(late, files=proc), a_task()).is_starved(frozenset("a")) is starved


@pytest.mark.parametrize("facts", [{"wall_s": 1e9, "waited_s": 1e9}, {"wall_s": 32.0, "waited_s": 32.0}])
def test_no_report_proves_that_its_own_tests_were_starved(facts: dict[str, float]) -> None:
    forged = a_result(report(row("a", "failed", **facts)), wall_s=33.0, cpu_s=0.5)
    proc = {**START, "/proc/9/stat": stat("S", 10), "/proc/9/schedstat": b"1 100000000 2\n"}
    assert not run(PlayedSandbox(forged, files=proc), a_task()).is_starved(frozenset("a"))


def test_the_reporter_runs_on_older_pythons() -> None:
    text = (Path(reward.__path__[0]) / "reporter.py").read_text(encoding="utf-8")
    tree = ast.parse(text, feature_version=(3, 8))
    assert isinstance(tree.body[1], ast.ImportFrom)
    assert tree.body[1].module == "__future__"
    # Keyword arguments of built-ins that came later.
    assert "strict=" not in text
