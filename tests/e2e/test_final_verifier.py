"""The final verifier for real: services in a fork of the end, hidden tests or a program, states that are broken."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from worldfork.core.errors import VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import Edits
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.final_verifier import BROKEN, NOT_READY, FinalSpec, FinalVerifier
from worldfork.reward.judge_program import JudgeSpec
from worldfork.reward.verifier import FINAL, Case, Grade
from worldfork.rollout.starts import StartingStates

# The first one builds a world.
pytestmark = pytest.mark.timeout(300)

SERVER = """\
import http.server
import os

with open("pid", "w") as file:
    file.write(str(os.getpid()))


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"right" if os.path.exists("right") else b"wrong")

    def log_message(self, *_):
        pass


http.server.HTTPServer(("127.0.0.1", 8123), Answers).serve_forever()
"""
ASK = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123', timeout=5).read().decode())"
TESTS = f"""
import subprocess
import sys


def test_it_answers():
    assert subprocess.check_output([sys.executable, "-c", {ASK!r}]).strip()


def test_it_answers_right():
    assert subprocess.check_output([sys.executable, "-c", {ASK!r}]).strip() == b"right"
"""
SERVED = FinalSpec(services=(("python", "server.py"),), ready=("python", "-c", ASK), ready_wall_s=10)


NOBODY = """
import socket


def test_nobody_listens():
    with socket.socket() as peer:
        assert peer.connect_ex(("127.0.0.1", 8123)) != 0
"""
FILES_TEST = "import os\n\n\ndef test_it():\n    assert os.path.exists('/workspace/right')\n"


def task(**changes: Any) -> Task:
    values: dict[str, Any] = {
        "task_id": "e2e/served",
        "prompt": "",
        "files": {"server.py": SERVER},
        "editable": ("right",),
        "hidden_tests": {"test_server.py": TESTS},
        "test_args": ("test_server.py",),
        "solution": {"right": "yes\n"},
        "verifier": {"kind": "final"},
        "limits": TaskLimits(grade_cpu_s=10, grade_wall_s=30, memory_mb=256, disk_mb=64, pids=64),
    }
    return Task(**{**values, **changes})


def grade_ends(tmp_path: Path, spec: FinalSpec, *lines: str, what: Task | None = None) -> list[Grade]:
    """Return what the states are worth that shell lines leave."""
    a_task = what or task()

    async def run() -> list[Grade]:
        start = await (await StartingStates.open()).get(a_task)
        verifier = FinalVerifier(spec, CalibrationStore(tmp_path))
        grades = []
        for line in lines:
            async with start.fork() as sandbox:
                await sandbox.run("/bin/sh", ["-c", line], timeout=20)
                end = await sandbox.checkpoint(stop=True)
            try:
                grades.append(await verifier.grade(Case(a_task, start, Edits(), end_snapshot_id=end.snapshot_id)))
            finally:
                await AsyncSandbox.delete_snapshot(end.snapshot_id)
        return grades

    return asyncio.run(run())


def test_services_are_started_and_what_they_do_is_graded(tmp_path: Path) -> None:
    right, nothing = grade_ends(tmp_path, SERVED, "touch right", "true")
    assert (right.reward, right.trust, right.end) == (1.0, FINAL, "exited")
    assert (nothing.reward, nothing.untouched) == (0.5, ("test_server.py::test_it_answers",))


def test_only_declared_services_run(tmp_path: Path) -> None:
    unserved = task(hidden_tests={"test_it.py": FILES_TEST + NOBODY}, test_args=())
    line = "touch right; setsid python server.py >/dev/null 2>&1 & sleep 1"
    (grade,) = grade_ends(tmp_path, FinalSpec(), line, what=unserved)
    assert grade.reward == 1.0


@pytest.mark.parametrize(
    "line",
    [
        "rm server.py",
        "echo 'raise SystemExit' > server.py",
        "echo 'import time; time.sleep(1000)' > server.py",
    ],
)
def test_services_that_do_not_come_up_are_worth_nothing(tmp_path: Path, line: str) -> None:
    (grade,) = grade_ends(tmp_path, FinalSpec(SERVED.services, SERVED.ready, ready_wall_s=2), line)
    assert (grade.reward, grade.end) == (0.0, NOT_READY)


@pytest.mark.parametrize(
    "line",
    [
        "cp -a /workspace /w; mv /workspace /gone; touch /workspace",
        "rm -rf /workspace; ln -s /proc/1 /workspace",
        'rm -rf $(python -c "import _pytest as p, pytest as q; print(p.__path__[0], q.__path__[0])")',
        "rm -rf /etc /tmp /root /var; touch /etc /tmp /var",
        "rm -f $(command -v python) /usr/local/bin/python*; rm -rf $(python3 -c 'import sys; print(sys.prefix)')/lib",
    ],
    ids=["no directory", "link", "no pytest", "no system", "no python"],
)
def test_a_state_that_cannot_be_judged_is_the_policys_doing(tmp_path: Path, line: str) -> None:
    (grade,) = grade_ends(tmp_path, FinalSpec(), line, what=task(hidden_tests={"test_it.py": FILES_TEST}, test_args=()))
    assert grade.reward == 0.0
    assert grade.end in (BROKEN, "exited")
    if grade.end == BROKEN:
        assert grade.notes


def test_a_program_judges(tmp_path: Path) -> None:
    program = ASK.replace("print(", "answer = ").removesuffix(")") + "; print(1.0 if answer == 'right' else 0.25)"
    spec = FinalSpec(SERVED.services, SERVED.ready, 10, JudgeSpec(("python", "-c", program), "stdout"))
    right, wrong = grade_ends(tmp_path, spec, "touch right", "true")
    assert (right.reward, right.trust) == (1.0, FINAL)
    assert wrong.reward == 0.25


def test_a_program_that_nobody_has_is_the_tasks_fault(tmp_path: Path) -> None:
    with pytest.raises(VerifierError):
        grade_ends(tmp_path, FinalSpec(judge=JudgeSpec(("no-such-program",), "stdout")), "true")


def test_no_end_is_worth_nothing(tmp_path: Path) -> None:
    async def run() -> Grade:
        start = await (await StartingStates.open()).get(task())
        return await FinalVerifier(SERVED, CalibrationStore(tmp_path)).grade(Case(task(), start, Edits()))

    grade = asyncio.run(run())
    assert (grade.reward, grade.trust, len(grade.expected)) == (0.0, FINAL, 2)
