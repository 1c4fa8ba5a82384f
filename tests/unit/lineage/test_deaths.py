from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from worldfork.core.errors import OutOfSpace
from worldfork.lineage.deaths import condemned, exit_of, found_dead
from worldfork.records.death import Death, DeathCause, LimitHits
from worldfork.sandbox.pressure import HostKills


class Played(HostKills):
    def __init__(self, kills: int = 0) -> None:
        super().__init__()
        self.kills = kills

    def lately(self) -> int:
        return self.kills


def ended(program: str, kill: Callable[[int], None] = lambda pid: None) -> os.waitid_result | None:
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(child.pid)
    try:
        assert exit_of(pidfd) is None  # it waits for its input
        kill(child.pid)
        assert child.stdin
        child.stdin.close()
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        return exit_of(pidfd)
    finally:
        os.close(pidfd)
        child.wait()


def ended_with(code: int) -> os.waitid_result | None:
    return ended(f"input = __import__('sys').stdin.read(); raise SystemExit({code})")


@pytest.mark.parametrize(
    ("code", "cause", "own"),
    [(0, DeathCause.ENDED, False), (2, DeathCause.TIME, True), (1, DeathCause.CRASHED, True)],
)
def test_an_exit_code_says_who_ended_it(code: int, cause: DeathCause, own: bool) -> None:
    death = found_dead(ended_with(code), Played(), LimitHits(pids=3))
    assert (death.cause, death.own, death.hits) == (cause, own, LimitHits(pids=3))


def test_a_kill_is_from_outside_unless_the_host_had_no_memory_left() -> None:
    status = ended("input()", lambda pid: os.kill(pid, signal.SIGKILL))
    assert found_dead(status, Played(), LimitHits()).cause is DeathCause.OUTSIDE
    assert found_dead(status, Played(1), LimitHits()).cause is DeathCause.HOST_MEMORY
    # The one that was counted is a command of its own.
    assert found_dead(status, Played(1), LimitHits(memory=1)).cause is DeathCause.OUTSIDE
    assert not found_dead(status, Played(1), LimitHits()).own


def test_any_other_signal_is_a_crash() -> None:
    death = found_dead(ended("input()", lambda pid: os.kill(pid, signal.SIGSEGV)), Played(1), LimitHits())
    assert (death.cause, death.own) == (DeathCause.CRASHED, True)


def test_nobody_knows_without_a_status() -> None:
    death = found_dead(None, Played(1), LimitHits())
    assert (death.cause, death.own) == (DeathCause.UNKNOWN, False)
    assert exit_of(-1) is None


@pytest.mark.parametrize(("scope", "cause"), [("sandbox", DeathCause.DISK), ("host", DeathCause.HOST_DISK)])
def test_whose_disk_it_was(scope: str, cause: DeathCause) -> None:
    death = condemned(OutOfSpace("too much", scope=scope))
    assert (death.cause, death.own) == (cause, scope == "sandbox")


def test_a_cause_compares_as_its_word() -> None:
    assert Death(DeathCause.DISK, "").cause == "disk"
