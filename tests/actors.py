"""Processes that stop at named steps until a test lets them go on: every interleaving can be played."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.stores import exit_code_of, start_child

from worldfork.core.errors import WorldforkError
from worldfork.store import faultpoints

_PATIENCE_S = 30.0


_living: set[Actor] = set()


def end_all() -> None:
    """Kill the processes that a test which failed has left, stopped or not."""
    for actor in list(_living):
        actor.kill()


class Actor:
    """A process that does its work and stops at steps: at the first of these, then at the next one after it.

    Args:
        work: runs in a forked child; what it returns or raises is told at the end, if it is plain or typed.
        stops: names of steps, in the order in which they are to be met.
    """

    def __init__(self, work: Callable[[], object], *stops: str) -> None:
        told, tell = os.pipe()
        allowed, allow = os.pipe()
        waiting = list(stops)

        def hook(name: str) -> None:
            if waiting and name == waiting[0]:
                waiting.pop(0)
                os.write(tell, json.dumps({"step": name}).encode() + b"\n")
                os.read(allowed, 1)

        def live() -> None:
            os.close(allow)
            faultpoints.install(hook)
            try:
                facts: dict[str, Any] = {"value": work()}
            except WorldforkError as error:
                facts = {"error": type(error).__name__, "message": str(error)}
            faultpoints.install(None)
            os.write(tell, json.dumps(facts).encode() + b"\n")
            os._exit(0)

        self.pid = start_child(live)
        _living.add(self)
        os.close(tell)
        os.close(allowed)
        self._allow = allow
        self._lines = os.fdopen(told, encoding="utf-8")
        self.error = ""
        """Name of the class of the error that it ended with."""
        self.message = ""
        self.value: Any = None
        """What its work returned."""

    def meet(self, name: str) -> None:
        """Wait until it stands at this step."""
        line = self._lines.readline()
        assert line, f"it died before {name}"
        assert json.loads(line) == {"step": name}, line

    def go_on(self) -> None:
        """Let it leave the step."""
        os.write(self._allow, b".")

    def end(self) -> Actor:
        """Let it leave the step and wait for its end."""
        self.go_on()
        return self.join()

    def join(self) -> Actor:
        """Wait for its end."""
        line = self._lines.readline()
        assert line, "it died"
        facts = json.loads(line)
        assert "step" not in facts, facts
        self.error, self.message = facts.get("error", ""), facts.get("message", "")
        self.value = facts.get("value")
        assert self._reap() == 0
        return self

    def kill(self) -> None:
        """End it where it stands."""
        os.kill(self.pid, signal.SIGKILL)
        assert self._reap() == -signal.SIGKILL

    def _reap(self) -> int:
        _living.discard(self)
        os.close(self._allow)
        self._lines.close()
        return exit_code_of(self.pid)

    def stand_still(self) -> None:
        """Stop all its threads."""
        os.kill(self.pid, signal.SIGSTOP)
        end_s = time.monotonic() + _PATIENCE_S
        while self._state() != "T":
            assert time.monotonic() < end_s
            time.sleep(0.001)

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def wake(self) -> None:
        """Let its threads run again."""
        os.kill(self.pid, signal.SIGCONT)
