"""The program that runs pytest inside a verifier's fork and says how each test ended.

Its text is sent to the fork's Python through stdin; the library never runs it in its own process. It writes
one JSON object a line to what was the command's stdout, so that the only reader is outside: what was written
cannot be taken back, and nothing else is on that stream, because everything that the tests print goes to stderr.

Arguments: seconds of CPU that one test may use (0: no limit), the task's directory, directories for the import path
(with `:` between; one before all of them stands for the task's directory), then the arguments for pytest. It starts in
a directory that no task can write to, and it runs on Python 3.8 too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shlex
import signal
import sys
import time
from typing import Any, Iterable, Iterator, NoReturn  # noqa: UP035 - Python 3.8 cannot subscribe the other ones

WALL_FACTOR = 4
"""A test's limit counts CPU seconds; its wall time may be this many times as long."""

LEFT_OUT = ("cov", "no-cov", "flake8", "black", "isort", "mypy", "pylint", "ruff", "pycodestyle", "pydocstyle", "html",
            "self-contained-html", "alluredir", "random-order", "instafail", "sugar", "force-sugar", "testmon",
            "numprocesses", "dist", "tx", "maxprocesses", "max-worker-restart", "looponfail", "strict")  # fmt: skip
"""Options of configured plug-ins that measure, show, spread or check something else than how tests end. `strict` ones
concern what the configuration may name, and not all that it names is loaded."""

NAMED_BY_OPTION = {
    "timeout": "pytest_timeout",
    "asyncio": "pytest_asyncio.plugin",
    "anyio": "anyio.pytest_plugin",
    "reruns": "pytest_rerunfailures",
    "only-rerun": "pytest_rerunfailures",
    "forked": "pytest_forked",
    "benchmark": "pytest_benchmark.plugin",
    "hypothesis": "_hypothesis_pytestplugin",
    "ds": "pytest_django.plugin",
    "reuse-db": "pytest_django.plugin",
    "create-db": "pytest_django.plugin",
    "no-migrations": "pytest_django.plugin",
    "nomigrations": "pytest_django.plugin",
    "doctest-plus": "pytest_doctestplus.plugin",
    "doctest-rst": "pytest_doctestplus.plugin",
    "remote-data": "pytest_remotedata.plugin",
    "disable-socket": "pytest_socket",
    "allow-hosts": "pytest_socket",
    "numprocesses": "xdist.plugin",
    "dist": "xdist.plugin",
}
"""Beginning of an option in a configuration -> the plug-in that knows it."""

NAMED_BY_KEY = {
    "timeout": "pytest_timeout",
    "asyncio_": "pytest_asyncio.plugin",
    "anyio_": "anyio.pytest_plugin",
    "reruns": "pytest_rerunfailures",
    "env_files": "pytest_dotenv.plugin",
    "env": "pytest_env.plugin",
    "DJANGO_": "pytest_django.plugin",
    "django_": "pytest_django.plugin",
    "mock_": "pytest_mock",
    "qt_api": "pytestqt.plugin",
    "trio_mode": "pytest_trio",
    "doctest_plus": "pytest_doctestplus.plugin",
}
"""Beginning of a key in a configuration -> the plug-in that reads it."""

FLAGS = ("cov-branch", "cov-append", "cov-reset", "no-cov", "no-cov-on-fail", "flake8", "black", "isort", "mypy",
         "pylint", "ruff", "ruff-format", "pycodestyle", "pydocstyle", "self-contained-html", "instafail", "sugar",
         "force-sugar", "testmon", "random-order", "looponfail", "strict", "strict-markers", "strict-config", "forked",
         "reuse-db", "create-db", "no-migrations", "nomigrations", "doctest-plus", "doctest-rst", "disable-socket",
         "benchmark-disable", "benchmark-skip", "benchmark-only", "benchmark-autosave", "hypothesis-show-statistics",
         "hypothesis-explain")  # fmt: skip
"""Options without a value of their own."""


def waited_s() -> float:
    """Return how long this thread was ready to run and had no CPU, in seconds (kernel: sched-stats, field 2)."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Reporter:
    """A pytest plug-in: one line per test, written when the test is over."""

    def __init__(self, out: int, test_cpu_s: float) -> None:
        self.out = out
        self.test_cpu_s = test_cpu_s
        self.owner_pid = os.getpid()
        self.paths: list[str] = []
        self.own_paths: list[str] = []
        """For this process alone."""
        self.phases: dict[str, dict[str, str]] = {}
        """Of each test under way, by its id: several are where they run in processes of their own."""
        self.began: dict[str, tuple[float, float, float]] = {}
        self.limits: dict[str, tuple[float, float]] = {}
        """CPU and wall seconds of tests that have a limit of their own."""

    def open_path(self, text: str) -> None:
        """Take the directories for the import path."""
        if text.startswith(os.pathsep):
            self.own_paths = [os.getcwd()]
        self.paths = [os.path.abspath(each) for each in text.split(os.pathsep) if each]

    def say(self, **facts: Any) -> None:
        """Write one line. A process that the tests forked off says nothing."""
        if os.getpid() != self.owner_pid:
            return
        line = json.dumps(facts).encode("ascii") + b"\n"
        while line:
            line = line[os.write(self.out, line) :]

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), waited_s()

    def _out_of_time(self, number: int, _frame: object) -> NoReturn:
        import pytest

        pytest.fail("more than its limit of " + ("CPU" if number == signal.SIGPROF else "wall") + " time")

    def pytest_load_initial_conftests(self) -> Iterator[None]:
        """Open the import path: pytest and its plug-ins are loaded by now, and nothing of the task is."""
        sys.path[:0] = [*self.own_paths, *self.paths]
        if self.paths:
            # For the programs that the tests start.
            os.environ["PYTHONPATH"] = os.pathsep.join(self.paths)
        yield

    def pytest_runtest_setup(self, item: Any) -> None:
        """Start the clock of a test that a plug-in runs in a process of its own."""
        if os.getpid() != self.owner_pid:
            self._limit(item.nodeid)

    def pytest_collection_finish(self, session: Any) -> None:
        """Say how many tests there are."""
        self.say(collected=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        """Start the test's clock. CPU time, because wall time would punish it for its neighbours."""
        self.phases[nodeid] = {}
        self.began[nodeid] = self._now()
        self._limit(nodeid)

    def _limit(self, nodeid: str) -> None:
        cpu_s, _ = self.limits.get(nodeid, (self.test_cpu_s, 0.0))
        if cpu_s:
            signal.signal(signal.SIGPROF, self._out_of_time)
            signal.setitimer(signal.ITIMER_PROF, cpu_s)

    def pytest_timeout_set_timer(self, item: Any, settings: Any) -> bool:
        """Set the limit that pytest-timeout has found for a test; in its place, and never by ending the process.

        A limit that a mark or a configuration gives is one in CPU seconds too, and its wall time is longer.
        """
        limit_s = float(settings.timeout)
        mark = item.get_closest_marker("timeout")
        is_own = mark is not None and bool(mark.args or "timeout" in mark.kwargs)
        given = item.config.getoption("timeout", None)
        if not is_own and given is not None and float(given) == limit_s and self.test_cpu_s:
            # Of the task, and made longer already.
            wall_s = limit_s
        else:
            wall_s = self.own_wall_s(limit_s)
            self.limits[item.nodeid] = limit_s, WALL_FACTOR * limit_s
            self._limit(item.nodeid)
        signal.signal(signal.SIGALRM, self._out_of_time)
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        return True

    def own_wall_s(self, limit_s: float) -> float:
        """Return the wall seconds of a test with a limit of its own."""
        return WALL_FACTOR * limit_s

    def pytest_timeout_cancel_timer(self, item: Any) -> bool:
        """Take it back."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst outcome of each phase; a failed subtest fails its test."""
        outcome = "other" if hasattr(report, "wasxfail") else report.outcome
        phases = self.phases.setdefault(report.nodeid, {})
        if phases.get(report.when) != "failed":
            phases[report.when] = outcome

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        """Say how the test ended: passed only if set-up, call and clean-up all passed."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        ended = self._now()
        phases, began = self.phases.pop(nodeid, {}), self.began.pop(nodeid, ended)
        outcomes = set(phases.values())
        if "failed" in outcomes:
            outcome = "failed"
        elif outcomes == {"passed"} and "call" in phases:
            outcome = "passed"
        else:
            outcome = "skipped"
        wall_s, cpu_s, waited = (round(ended[each] - began[each], 4) for each in range(3))
        _, limit_s = self.limits.get(nodeid, (0.0, WALL_FACTOR * self.test_cpu_s))
        limit = {"limit_s": limit_s} if limit_s else {}
        self.say(id=nodeid, outcome=outcome, wall_s=wall_s, cpu_s=cpu_s, waited_s=waited, **limit)


def configured(args: list[str], directory: str) -> list[str]:
    """Return what pytest is told besides, so that the task's own configuration finds the plug-ins that it names.

    Installed ones that decide how tests end are loaded, by name and from where no task can write; options of others
    are taken out.
    """
    found = _configuration(args)
    words = found.get("addopts", "")
    words = shlex.split(words) if isinstance(words, str) else list(words)
    modules = [module for key in found for begin, module in NAMED_BY_KEY.items() if key.startswith(begin)]
    kept: list[str] = []
    is_value = False
    for word in words:
        name, equals, _ = (
            word.lstrip("-").partition("=") if word.startswith("--") else (_long(word), "=" * len(word[2:]), "")
        )
        if not word.startswith("-"):
            kept += [] if is_value else [word]
            is_value = False
            continue
        module = next((each for begin, each in NAMED_BY_OPTION.items() if _begins(name, begin)), None)
        modules += [module] if module else []
        left_out = any(_begins(name, begin) for begin in LEFT_OUT) or (
            module is not None and not _is_there(module, directory)
        )
        kept += [] if left_out else [word]
        is_value = left_out and not equals and name not in FLAGS
    required = found.get("required_plugins", "")
    modules += _required(required.split() if isinstance(required, str) else required)
    told = [part for module in dict.fromkeys(modules) if _is_there(module, directory) for part in ("-p", module)]
    if kept != words:
        told += ["-o", "addopts=" + " ".join(map(shlex.quote, kept))]
    for key in ("strict", "strict_config", "strict_markers"):
        told += ["-o", key + "=false"] if key in found else []
    return told + (["-o", "required_plugins="] if required else [])


def _begins(name: str, begin: str) -> bool:
    return name == begin or name.startswith(begin + "-")


def _long(word: str) -> str:
    return {"-n": "numprocesses", "-d": "looponfail", "-f": "looponfail"}.get(word[:2], "")


def _configuration(args: list[str]) -> dict[str, Any]:
    """Return what pytest will read from the file that `-c` names; nothing where that cannot be told."""
    try:
        from _pytest.config.findpaths import load_config_dict_from_file

        found: Any = load_config_dict_from_file(pathlib.Path(args[args.index("-c") + 1])) or {}
    except Exception:
        # pytest itself says what is wrong with it.
        return {}
    return {key: getattr(value, "value", value) for key, value in found.items()}


def _required(names: Iterable[str]) -> list[str]:
    modules = []
    for each in names:
        try:
            points = importlib.metadata.distribution(re.split(r"[^\w.-]", each)[0]).entry_points
        except Exception:
            continue
        modules += [
            point.value for point in points if point.group == "pytest11" and not point.value.startswith("pytest_cov")
        ]
    return modules


def _is_there(module: str, directory: str) -> bool:
    """Whether a plug-in is installed, and where nothing of the task lies, or beside pytest itself."""
    import pytest

    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
        if spec is None or not spec.origin:
            return False
        place = os.path.realpath(spec.origin)
        beside = os.path.dirname(os.path.dirname(os.path.realpath(pytest.__file__)))
        is_out = not place.startswith(os.path.realpath(directory) + os.sep) or place.startswith(beside + os.sep)
        return is_out and importlib.util.find_spec(module) is not None
    except Exception:
        return False


def hook(reporter: type[Reporter]) -> None:
    """Say of the plug-in's methods what pytest needs to know of them. Not at its import: pytest is loaded later."""
    import pytest

    pytest.hookimpl(hookwrapper=True, tryfirst=True)(reporter.pytest_load_initial_conftests)
    for each in (reporter.pytest_timeout_set_timer, reporter.pytest_timeout_cancel_timer):
        pytest.hookimpl(tryfirst=True, optionalhook=True)(each)


def main() -> NoReturn:
    """Run pytest and leave at once."""
    # A program that is read from stdin has its directory on the import path.
    sys.path[:] = [each for each in sys.path if each not in ("", ".")]
    # The private stream: not inherited by programs that the tests start.
    out = os.dup(1)
    os.dup2(2, 1)
    import pytest

    # As of `python -m pytest`: processes that tests spawn run that file, and code that finds none takes itself for code
    # that is typed in.
    vars(sys.modules["__main__"])["__file__"] = os.path.join(os.path.dirname(pytest.__file__), "__main__.py")
    os.chdir(sys.argv[2])
    reporter = Reporter(out, float(sys.argv[1]))
    reporter.open_path(sys.argv[3])
    hook(Reporter)
    more = configured(sys.argv[4:], sys.argv[2])
    # From here on a missing report is the doing of the code under test; before, it is ours.
    reporter.say(ready=1, python=sys.version.split()[0], pytest=pytest.__version__)
    code = pytest.main([*more, *sys.argv[4:]], plugins=[reporter])
    reporter.say(finished=int(code))
    sys.stderr.flush()
    # Threads and exit handlers of the code under test would keep a finished run waiting.
    os._exit(0)


if __name__ == "__main__":
    main()
