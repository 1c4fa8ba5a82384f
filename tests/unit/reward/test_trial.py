from __future__ import annotations

import asyncio
import resource
from typing import Any

import pytest
from tests.unit.reward.played import PlayedSandbox, a_result, a_task, report, row

from worldfork.core.errors import OutOfSpace, PathError, SandboxDied, VerifierError
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.report import Report, TestRecord
from worldfork.reward.trial import Trial, run_tests
from worldfork.sandbox.command import Reason

PASSED = report(row("t::a"))
START = {"/workspace/a.py": b"old", "/workspace/b.py": b"kept"}


def run(sandbox: PlayedSandbox, task: Task, edits: dict[str, bytes]) -> Trial:
    return asyncio.run(run_tests(sandbox, task, edits))  # type: ignore[arg-type]  # a played sandbox


def test_edits_are_laid_down_and_hidden_tests_win() -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    task = a_task(editable=("a.py", "test_a.py", "new.py"))
    run(sandbox, task, {"a.py": b"mine", "test_a.py": b"forged", "b.py": b"not mine to change"})
    assert sandbox.files == {
        "/workspace/a.py": b"mine",
        "/workspace/b.py": b"kept",
        "/workspace/test_a.py": b"hidden",
    }


def test_an_editable_file_that_was_not_carried_does_not_exist() -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    run(sandbox, a_task(), {"new.py": b"new"})
    assert "/workspace/a.py" not in sandbox.files
    assert sandbox.files["/workspace/new.py"] == b"new"


def test_how_pytest_is_called() -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    run(sandbox, a_task(limits=TaskLimits(grade_cpu_s=7.5, grade_wall_s=20)), {"a.py": b""})
    call = sandbox.calls[0]
    args = call["args"]
    assert args[:5] == ["-P", "-B", "-s", "-", "8"]
    assert args[args.index("-c") + 1] == "/dev/null"
    assert "no:cacheprovider" in args
    assert args[-4:] == ["-p", "pytest_timeout", "--timeout=32", "test_a.py"]
    assert call["env"]["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] == "1"
    assert (resource.RLIMIT_CPU, 8, 9) in call["rlimits"]
    assert call["timeout"] > 20
    assert b"class Reporter" in call["stdin"]


@pytest.mark.parametrize(
    ("test_args", "first", "last"),
    [
        (("t.py",), "0", ["t.py"]),
        (("--timeout=0", "t.py"), "0", ["-p", "pytest_timeout", "--timeout=0", "t.py"]),
        (("--timeout", "9", "t.py"), "0", ["-p", "pytest_timeout", "--timeout", "9", "t.py"]),
        (("--timeout=0.5", "t.py"), "0.5", ["-p", "pytest_timeout", "--timeout=2", "t.py"]),
    ],
)
def test_a_tests_own_limit_counts_cpu_seconds(test_args: tuple[str, ...], first: str, last: list[str]) -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    run(sandbox, a_task(test_args=test_args), {})
    args = sandbox.calls[0]["args"]
    assert args[4] == first
    assert args[-len(last) :] == last


def test_a_limit_that_is_no_number_is_the_tasks_fault() -> None:
    with pytest.raises(VerifierError) as raised:
        run(PlayedSandbox(files=START), a_task(test_args=("--timeout=soon",)), {})
    assert raised.value.fields["kind"] is FailureKind.CALIBRATION


def test_hidden_configuration_is_used() -> None:
    sandbox = PlayedSandbox(a_result(PASSED), files=START)
    run(sandbox, a_task(hidden_tests={"test_a.py": "", "tox.ini": "", "pytest.ini": ""}), {})
    args = sandbox.calls[0]["args"]
    assert args[args.index("-c") + 1] == "/workspace/pytest.ini"


@pytest.mark.parametrize("result", [a_result(b""), a_result(b"", reason=Reason.NOT_STARTED, exit_code=127)])
def test_tests_that_did_not_start_are_no_score(result: Any) -> None:
    with pytest.raises(VerifierError) as raised:
        run(PlayedSandbox(result, files=START), a_task(), {})
    assert raised.value.fields["kind"] is FailureKind.GRADING


def test_what_the_code_under_test_does_to_its_fork_is_its_own() -> None:
    died = run(PlayedSandbox(SandboxDied("gone"), files=START), a_task(), {})
    assert (died.end, died.report.passed) == ("sandbox_died", frozenset())
    full = run(PlayedSandbox(OutOfSpace("full", scope="sandbox"), files=START), a_task(), {})
    assert full.end == "out_of_space"
    with pytest.raises(OutOfSpace):
        run(PlayedSandbox(OutOfSpace("full", scope="host"), files=START), a_task(), {})


def test_trouble_before_the_tests_is_ours() -> None:
    sandbox = PlayedSandbox(files={})
    sandbox.delete_file = _refuse  # type: ignore[method-assign]
    with pytest.raises(PathError):
        run(sandbox, a_task(), {})


async def _refuse(path: str) -> None:
    raise PathError("no", path=path, errno=5)


def trial(*, end: str = "exited", tests: dict[str, TestRecord] | None = None, **changes: Any) -> Trial:
    values: dict[str, Any] = {"cpu_s": 1.0, "wall_s": 40.0, "test_wall_s": 32.0, **changes}
    return Trial(Report(ready=True, tests=tests or {}), end=end, **values)


LATE = TestRecord("failed", wall_s=32.0, cpu_s=1.0, waited_s=30.0)
ASLEEP = TestRecord("failed", wall_s=32.0, cpu_s=0.0, waited_s=0.1)
QUICK = TestRecord("failed", wall_s=0.1, cpu_s=0.0, waited_s=0.1)


@pytest.mark.parametrize(
    ("case", "starved"),
    [
        (trial(tests={"a": LATE}), True),
        (trial(tests={"a": ASLEEP}), False),
        (trial(tests={"a": QUICK}), False),
        (trial(tests={"b": LATE}), False),
        (trial(tests={"a": LATE}, test_wall_s=None), False),
        (trial(tests={"a": LATE}, cpu_s=39.0), False),
        (trial(end="timed_out", waited_s=30.0), True),
        (trial(end="timed_out", waited_s=1.0), False),
        (trial(end="timed_out", waited_s=30.0, cpu_s=30.0), False),
        (trial(end="signaled", waited_s=0.0), False),
    ],
)
def test_only_a_machine_without_a_free_cpu_is_an_overload(case: Trial, starved: bool) -> None:
    assert case.is_starved(frozenset({"a"})) is starved


def test_at_the_wall_limit_the_kernel_is_asked_who_waited() -> None:
    class Stalled(PlayedSandbox):
        async def run(self, command: str, args: list[str], **options: Any) -> Any:
            await asyncio.sleep(0.2)
            return await super().run(command, args, **options)

    files = {**START, "/proc/7/schedstat": b"100 9000000000 3\n", "/proc/8/schedstat": b"odd", "/proc/self/stat": b""}
    late = a_result(report(finished=False), reason=Reason.TIMED_OUT, wall_s=10.0, cpu_s=0.1)
    task = a_task(limits=TaskLimits(grade_wall_s=0.05))
    assert run(Stalled(late, files=files), task, {}).waited_s == pytest.approx(9.0)
