"""The program that runs pytest inside a verifier's fork and says how each test ended.

Its text is sent to the fork's Python through stdin; the library never runs it in its own process. It writes
one JSON object a line to what was the command's stdout, so that the only reader is outside: what was written
cannot be taken back, and nothing else is on that stream, because everything that the tests print goes to stderr.

Arguments: seconds of CPU that one test may use (0: no limit), then the arguments for pytest.
"""

import json
import os
import signal
import sys
import time
from typing import Any, NoReturn


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

    def pytest_collection_finish(self, session: Any) -> None:
        """Say how many tests there are."""
        self.say(collected=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        """Start the test's clock. CPU time, because wall time would punish it for its neighbours."""
        self.phases = {}
        self.began = self._now()
        if self.test_cpu_s:
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
        wall_s, cpu_s, waited = (round(after - before, 4) for before, after in zip(self.began, ended, strict=True))
        self.say(id=nodeid, outcome=outcome, wall_s=wall_s, cpu_s=cpu_s, waited_s=waited)


def main() -> NoReturn:
    """Run pytest and leave at once."""
    # The private stream: not inherited by programs that the tests start.
    out = os.dup(1)
    os.dup2(2, 1)
    import pytest

    reporter = Reporter(out, float(sys.argv[1]))
    # From here on a missing report is the doing of the code under test; before, it is ours.
    reporter.say(ready=1, python=sys.version.split()[0], pytest=pytest.__version__)
    code = pytest.main(sys.argv[2:], plugins=[reporter])
    reporter.say(finished=int(code))
    sys.stderr.flush()
    # Threads and exit handlers of the code under test would keep a finished run waiting.
    os._exit(0)


if __name__ == "__main__":
    main()
