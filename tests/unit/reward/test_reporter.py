"""The program that runs pytest in a fork, without a fork: what it says of tests, and what it lets in."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worldfork import reward
from worldfork.reward import reporter
from worldfork.reward.arguments import TEST_ENV
from worldfork.reward.reporter import Reporter, configured

TEXT = (Path(reward.__path__[0]) / "reporter.py").read_bytes()


def run(tmp_path: Path, files: dict[str, str], *args: str, path: str = "", cpu_s: float = 0) -> list[dict[str, Any]]:
    """Run the program as the verifier does; returns its lines."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    configuration = next((name for name in files if name.endswith((".toml", ".ini", ".cfg"))), None)
    chosen = ["-c", str(tmp_path / configuration) if configuration else "/dev/null", f"--rootdir={tmp_path}"]
    ended = subprocess.run(
        [
            sys.executable,
            "-B",
            "-s",
            "-",
            f"{cpu_s:g}",
            str(tmp_path),
            path,
            "-q",
            *chosen,
            "-p",
            "no:cacheprovider",
            *args,
        ],
        input=TEXT,
        capture_output=True,
        timeout=60,
        cwd="/",
        env={**TEST_ENV, "PATH": "/usr/bin:/bin"},
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert lines[:1], ended.stderr
    return lines


def outcomes(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {line["id"].rpartition("::")[2]: line["outcome"] for line in lines if "id" in line}


SPAWNS = """
import concurrent.futures, multiprocessing, os
import pytest


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_pool(method):
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(abs, -1).result() == 1
"""


def test_tests_may_spawn_processes(tmp_path: Path) -> None:
    found = outcomes(run(tmp_path, {"test_m.py": SPAWNS}))
    assert found == {"test_pool[spawn]": "passed", "test_pool[forkserver]": "passed"}


class Seen:
    """A report of one phase."""

    def __init__(self, nodeid: str, when: str, outcome: str) -> None:
        self.nodeid, self.when, self.outcome = nodeid, when, outcome


def test_outcomes_of_tests_that_run_interleaved_are_their_own() -> None:
    said: list[dict[str, Any]] = []

    class Told(Reporter):
        def say(self, **facts: Any) -> None:
            said.append(facts)

    told = Told(-1, 0)
    told.pytest_runtest_logstart("A", None)
    told.pytest_runtest_logreport(Seen("A", "setup", "passed"))
    told.pytest_runtest_logreport(Seen("A", "call", "failed"))
    told.pytest_runtest_logstart("B", None)
    for when in ("setup", "call", "teardown"):
        told.pytest_runtest_logreport(Seen("B", when, "passed"))
    told.pytest_runtest_logreport(Seen("A", "teardown", "passed"))
    told.pytest_runtest_logfinish("B", None)
    told.pytest_runtest_logfinish("A", None)
    assert {each["id"]: each["outcome"] for each in said} == {"A": "failed", "B": "passed"}


FLAT = {"mod.py": "WORD = 1\n", "tests/test_m.py": "from mod import WORD\n\ndef test_word(): assert WORD\n"}


def test_the_working_directory_is_on_the_path_where_python_puts_it_there(tmp_path: Path) -> None:
    assert outcomes(run(tmp_path, FLAT, "tests", path=":")) == {"test_word": "passed"}
    assert outcomes(run(tmp_path, FLAT, "tests")) == {}


ADDED = {
    "setup.cfg": "[tool:pytest]\naddopts = --cov=pkg --cov-report term --cov-branch -n auto --dist loadfile"
    " --strict-config --strict-markers -ra --html out.html --reruns 2 test_m.py\nrequired_plugins = pytest-cov\n",
    "pytest.ini": "[pytest]\naddopts = -nauto --no-cov -p no:warnings --mypy\nrequired_plugins = nothing-at-all>=2\n",
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = ["--cov", "pkg", "-n", "4", "-x"]\nunknown = 1\n',
}


@pytest.mark.parametrize("name", ADDED)
def test_options_of_plugins_that_are_not_there_break_nothing(tmp_path: Path, name: str) -> None:
    files = {name: ADDED[name], "test_m.py": "import pytest\n@pytest.mark.odd\ndef test_one(): pass\n"}
    assert outcomes(run(tmp_path, files)) == {"test_one": "passed"}


def test_options_of_pytest_itself_stay(tmp_path: Path) -> None:
    text = "[pytest]\naddopts = --cov=pkg --tb=short -m 'not slow' --durations 3\n"
    (tmp_path / "pytest.ini").write_text(text)
    told = configured(["-c", str(tmp_path / "pytest.ini")], str(tmp_path))
    assert told == ["-o", "addopts=--tb=short -m 'not slow' --durations 3"]
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    assert configured(["-c", str(tmp_path / "pytest.ini")], str(tmp_path)) == []
    assert configured(["-c", "/dev/null"], str(tmp_path)) == []


def test_no_plugin_is_loaded_from_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmock_anything = 1\ntimeout = 5\naddopts = --ds=settings\n")
    (tmp_path / "pytest_mock.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "pytest_django").mkdir()
    for name in ("__init__.py", "plugin.py"):
        (tmp_path / "pytest_django" / name).write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    told = configured(["-c", str(tmp_path / "pytest.ini")], str(tmp_path))
    assert told == ["-p", "pytest_timeout", "-o", "addopts="]


SLOW = """
import time
import pytest

def spin(s):
    end = time.process_time() + s
    while time.process_time() < end: pass

@pytest.mark.timeout(0.2)
def test_sleeps(): time.sleep(0.5)

@pytest.mark.timeout(0.2, method="thread")
def test_sleeps_long(): time.sleep(30)

@pytest.mark.timeout(timeout=0.2)
def test_spins(): spin(30)

def test_configured_sleeps(): time.sleep(0.6)

def test_configured_spins(): spin(30)

@pytest.mark.timeout(0.2, func_only=True)
def test_spins_itself(): spin(30)

@pytest.mark.timeout(5)
def test_has_more(): spin(0.6)

def test_afterwards(): pass
"""


def test_every_limit_of_a_test_counts_cpu_time(tmp_path: Path) -> None:
    files = {"pytest.ini": "[pytest]\ntimeout = 0.3\ntimeout_method = thread\n", "test_m.py": SLOW}
    lines = run(tmp_path, files)
    assert outcomes(lines) == {
        "test_sleeps": "passed",
        "test_sleeps_long": "failed",
        "test_spins": "failed",
        "test_configured_sleeps": "passed",
        "test_configured_spins": "failed",
        "test_spins_itself": "failed",
        "test_has_more": "passed",
        "test_afterwards": "passed",
    }
    by_name = {line["id"].rpartition("::")[2]: line for line in lines if "id" in line}
    assert by_name["test_sleeps_long"]["limit_s"] == pytest.approx(0.8)
    assert 0.75 < by_name["test_sleeps_long"]["wall_s"] < 5
    assert by_name["test_spins"]["cpu_s"] < 2
    assert by_name["test_configured_spins"]["limit_s"] == pytest.approx(1.2)


def test_the_limit_of_the_task_is_made_longer_only_once(tmp_path: Path) -> None:
    text = "import time\ndef test_sleeps(): time.sleep(30)\ndef test_short(): time.sleep(0.5)\n"
    lines = run(tmp_path, {"test_m.py": text}, "-p", "pytest_timeout", "--timeout=0.8", cpu_s=0.2)
    assert outcomes(lines) == {"test_sleeps": "failed", "test_short": "passed"}
    slow = next(line for line in lines if line.get("outcome") == "failed")
    assert 0.75 < slow["wall_s"] < 5
    assert slow["limit_s"] == pytest.approx(0.8)


def test_a_configuration_that_cannot_be_read_is_left_to_pytest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options\n")
    assert reporter.configured(["-c", str(tmp_path / "pyproject.toml")], str(tmp_path)) == []
