"""The program of the tests' fork: pytest over stub modules, every report and every call as a frame to the host."""

import json
import os
import sys
from typing import Any, NoReturn

from worldfork.reward.reporter import Reporter, configured, hook
from worldfork.reward.split import stubs
from worldfork.reward.split.plan_text import PLAN
from worldfork.reward.split.stream import Stream


class SplitReporter(Reporter):
    """The reporter, over the one stream that the stubs use too."""

    stream: Stream

    def say(self, **facts: Any) -> None:
        """Send one line. A process that the tests forked off says nothing."""
        if os.getpid() == self.owner_pid:
            self.stream.send(b"J", json.dumps(facts).encode("ascii"))

    def pytest_collectreport(self, report: Any) -> None:
        """Say why a module could not be loaded."""
        if report.failed:
            stubs.STUBS.note(str(report.longrepr)[-300:])

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        """Start the candidate's clock too."""
        stubs.STUBS.spoiled = ""
        cpu_s, _ = self.limits.get(nodeid, (0.0, 0.0))
        self.stream.send(b"B", f"{cpu_s:g}".encode("ascii") if cpu_s else b"")
        super().pytest_runtest_logstart(nodeid, location)

    def own_wall_s(self, limit_s: float) -> float:
        """Return none: here a test's wall time is mostly the way to the candidate, whose own the host knows."""
        return 0.0

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        """Fail a test that hid how its candidate ended."""
        if stubs.STUBS.spoiled:
            self.phases.setdefault(nodeid, {})["call"] = "failed"
        super().pytest_runtest_logfinish(nodeid, location)


def main() -> NoReturn:
    """Run pytest and leave at once."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    import pytest

    os.chdir(sys.argv[2])
    stream = Stream(source, sink)
    stubs.STUBS.open(stream, json.loads(PLAN), pytest.fail.Exception)
    sys.modules["_worldfork_split"] = stubs.STUBS  # type: ignore[assignment]
    reporter = SplitReporter(-1, float(sys.argv[1]))
    reporter.stream = stream
    reporter.open_path(sys.argv[3])
    hook(SplitReporter)
    more = configured(sys.argv[4:], sys.argv[2])
    reporter.say(ready=1, python=sys.version.split()[0], pytest=pytest.__version__)
    code = pytest.main([*more, *sys.argv[4:]], plugins=[reporter])
    seen = {place: sorted(names) for place, names in stubs.STUBS.seen.items()}
    reporter.say(finished=int(code), shapes=seen, notes=stubs.STUBS.notes)
    sys.stderr.flush()
    os._exit(0)
