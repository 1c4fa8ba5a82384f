"""The demo task's tests by hand: plain pytest runs on the host, started by a process that does nothing else.

It is one of its own so that its threads and pipes are not in the memory of the owner of rollouts, and one that stays,
so that no run by hand is charged with its start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_PLUGINS = ("-p", "no:cacheprovider", "-p", "pytest_timeout")


class ByHand:
    """That process. Leaving the block ends it."""

    def __enter__(self) -> ByHand:
        """Start it, and wait until it has loaded the task."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.by_hand"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self.run(0)
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        # It ends with its input.
        self._process.communicate()

    def run(self, groups: int) -> list[float]:
        """Run so many groups, one pytest a candidate, and return the wall seconds of each."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{groups}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the runs by hand failed; see above")
        walls: list[float] = json.loads(answer)
        return walls


def main() -> None:
    """Serve numbers of groups until there are no more."""
    from worldfork.rollout.demo_task import demo_candidates, demo_task

    task, candidates = demo_task(), list(demo_candidates().values())
    for line in sys.stdin:
        walls = [run_group(task, candidates) for _ in range(int(line))]
        sys.stdout.write(json.dumps(walls) + "\n")
        sys.stdout.flush()


def run_group(task: Any, candidates: Sequence[Mapping[str, str]]) -> float:
    """One pytest run a candidate in a fresh directory, as many at a time as rollouts; wall seconds."""
    start = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as hands:
        list(hands.map(lambda files: _one(task, files), candidates))
    return time.perf_counter() - start


def _one(task: Any, files: Mapping[str, str]) -> None:
    # With the plugins of a grading and no others: those that this interpreter happens to have would cost the hand more.
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with tempfile.TemporaryDirectory() as place:
        for path, text in {**task.files, **files, **task.hidden_tests}.items():
            target = Path(place, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", *_PLUGINS, *task.test_args]
        done = subprocess.run(command, cwd=place, env=variables, capture_output=True, timeout=120)
    if done.returncode not in (0, 1, 2):  # passed, failed, or a candidate that cannot be imported
        raise RuntimeError(f"pytest by hand gave {done.returncode}: {done.stdout.decode()[-500:]}")


if __name__ == "__main__":
    main()
