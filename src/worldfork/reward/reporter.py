"""The program that runs pytest inside a verifier's fork and says how each test ended.

Its text is sent to the fork's Python through stdin; the library never runs it in its own process. It writes
one JSON object a line to what was the command's stdout, so that the only reader is outside: what was written
cannot be taken back, and nothing else is on that stream, because everything that the tests print goes to stderr.

Arguments: seconds of CPU that one test may use (0: no limit), the task's directory, directories for the import path
(with `:` between), then the arguments for pytest. It starts in a directory that no task can write to, and it runs on
Python 3.8 too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any, Iterator, NoReturn  # noqa: UP035 - Python 3.8 cannot subscribe the other one


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
        self.phases: dict[str, str] = {}
        self.began = (0.0, 0.0, 0.0)

    def say(self, **facts: Any) -> None:
        """Write one line. A process that the tests forked off says nothing."""
        if os.getpid() != self.owner_pid:
            return
        line = json.dumps(facts).encode("ascii") + b"\n"
        while line:
            line = line[os.write(self.out, line) :]

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), waited_s()

    def _out_of_time(self, _signal: int, _frame: object) -> NoReturn:
        import pytest

        pytest.fail(f"more than {self.test_cpu_s:g} s of CPU time")

    def pytest_load_initial_conftests(self) -> Iterator[None]:
        """Open the import path: pytest and its plug-ins are loaded by now, and nothing of the task is."""
        sys.path[:0] = self.paths
        if self.paths:
            # For the programs that the tests start.
            os.environ["PYTHONPATH"] = os.pathsep.join(self.paths)
        yield

    def pytest_runtest_setup(self, item: object) -> None:
        """Start the clock of a test that a plug-in runs in a process of its own."""
        if self.test_cpu_s and os.getpid() != self.owner_pid:
            self._limit()

    def pytest_collection_finish(self, session: Any) -> None:
        """Say how many tests there are."""
        self.say(collected=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        """Start the test's clock. CPU time, because wall time would punish it for its neighbours."""
        self.phases = {}
        self.began = self._now()
        if self.test_cpu_s:
            self._limit()

    def _limit(self) -> None:
        signal.signal(signal.SIGPROF, self._out_of_time)
        signal.setitimer(signal.ITIMER_PROF, self.test_cpu_s)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst outcome of each phase; a failed subtest fails its test."""
        outcome = "other" if hasattr(report, "wasxfail") else report.outcome
        if self.phases.get(report.when) != "failed":
            self.phases[report.when] = outcome

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        """Say how the test ended: passed only if set-up, call and clean-up all passed."""
        if self.test_cpu_s:
            signal.setitimer(signal.ITIMER_PROF, 0)
        ended = self._now()
        outcomes = set(self.phases.values())
        if "failed" in outcomes:
            outcome = "failed"
        elif outcomes == {"passed"} and "call" in self.phases:
            outcome = "passed"
        else:
            outcome = "skipped"
        wall_s, cpu_s, waited = (round(ended[each] - self.began[each], 4) for each in range(3))
        self.say(id=nodeid, outcome=outcome, wall_s=wall_s, cpu_s=cpu_s, waited_s=waited)


def main() -> NoReturn:
    """Run pytest and leave at once."""
    # A program that is read from stdin has its directory on the import path.
    sys.path[:] = [each for each in sys.path if each not in ("", ".")]
    # The private stream: not inherited by programs that the tests start.
    out = os.dup(1)
    os.dup2(2, 1)
    import pytest

    os.chdir(sys.argv[2])
    reporter = Reporter(out, float(sys.argv[1]))
    reporter.paths = [os.path.abspath(each) for each in sys.argv[3].split(os.pathsep) if each]
    pytest.hookimpl(hookwrapper=True, tryfirst=True)(Reporter.pytest_load_initial_conftests)
    # From here on a missing report is the doing of the code under test; before, it is ours.
    reporter.say(ready=1, python=sys.version.split()[0], pytest=pytest.__version__)
    code = pytest.main(sys.argv[4:], plugins=[reporter])
    reporter.say(finished=int(code))
    sys.stderr.flush()
    # Threads and exit handlers of the code under test would keep a finished run waiting.
    os._exit(0)


if __name__ == "__main__":
    main()
