"""Deaths: how a sandbox ended, and how often it met its limits before."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from tests.conformance.conftest import Pace, Sandboxes

from worldfork import Sandbox, SandboxError
from worldfork.core.errors import OutOfSpace, SandboxDied
from worldfork.lineage.place import place
from worldfork.records.death import DeathCause, LimitHits

Needs = Callable[[str], None]


def cause(box: Sandbox) -> DeathCause:
    death = box.cause_of_death()
    assert death is not None
    assert death.detail
    return death.cause


def kill_init(box: Sandbox) -> None:
    pid = box._inner._live._pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxDied):
        box.run("sleep", ["30"])


@pytest.mark.behaviour("death-1")
def test_one_that_lives_has_no_cause(box: Sandbox) -> None:
    assert box.cause_of_death() is None
    assert box.limit_hits() == LimitHits()


@pytest.mark.behaviour("death-1")
def test_one_that_was_ended_says_so(box: Sandbox) -> None:
    box.terminate()
    assert cause(box) is DeathCause.ENDED
    with pytest.raises(SandboxDied) as caught:
        box.run("true")
    assert caught.value.fields["cause"] == "ended"


@pytest.mark.behaviour("death-1")
def test_one_that_another_handle_ended_says_so(box: Sandbox) -> None:
    Sandbox.connect(box.sandbox_id).terminate()
    assert cause(box) is DeathCause.ENDED


@pytest.mark.behaviour("death-1", "death-2")
def test_one_that_its_last_checkpoint_ended_says_so(box: Sandbox) -> None:
    snapshot = box.checkpoint(stop=True, level="volatile")
    assert cause(box) is DeathCause.ENDED
    Sandbox.delete_snapshot(snapshot.snapshot_id)


@pytest.mark.behaviour("death-2")
def test_its_own_time_is_its_own_doing(sandboxes: Sandboxes, pace: Pace) -> None:
    box = sandboxes.create(timeout_secs=pace.seconds(1))
    with pytest.raises(SandboxError):
        box.run("sleep", ["30"])
    death = box.cause_of_death()
    assert death is not None
    assert (death.cause, death.own) == (DeathCause.TIME, True)


@pytest.mark.behaviour("death-2")
def test_its_own_disk_is_its_own_doing(sandboxes: Sandboxes) -> None:
    box = sandboxes.create(disk_mb=4)
    with pytest.raises(OutOfSpace):
        box.sh("for n in 1 2 3; do head -c 3000000 /dev/zero > /root/$n; done; sleep 30")
    death = box.cause_of_death()
    assert death is not None
    assert (death.cause, death.own) == (DeathCause.DISK, True)


@pytest.mark.behaviour("death-3")
def test_a_kill_from_outside_is_nobodys_in_it(box: Sandbox) -> None:
    box.start_process("sleep", ["30"])
    kill_init(box)
    death = box.cause_of_death()
    assert death is not None
    assert (death.cause, death.own) == (DeathCause.OUTSIDE, False)
    box.terminate()  # clears away what showed it
    assert box.cause_of_death() == death


@pytest.mark.behaviour("death-3")
def test_it_is_known_also_once_all_of_it_is_cleared_away(box: Sandbox) -> None:
    kill_init(box)
    until_s = time.monotonic() + 10
    while box.sandbox_id in place().live:  # the watch clears it away of its own accord
        assert time.monotonic() < until_s
        time.sleep(0.02)
    assert cause(box) is DeathCause.OUTSIDE


@pytest.mark.behaviour("death-3")
def test_a_kill_without_memory_left_is_the_hosts(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place().host_kills, "lately", lambda: 1)
    kill_init(box)
    assert cause(box) is DeathCause.HOST_MEMORY


@pytest.mark.behaviour("death-3")
def test_nothing_inside_kills_its_init(box: Sandbox) -> None:
    box.sh("kill -9 1; kill -SEGV 1; kill -TERM 1; kill -9 -1")
    assert box.cause_of_death() is None
    assert box.run("echo", ["on"]).stdout == "on\n"


@pytest.mark.behaviour("death-4")
def test_limits_that_end_processes_are_counted(sandboxes: Sandboxes, needs: Needs) -> None:
    needs("limits")
    box = sandboxes.create(memory_mb=64, pids=16)
    box.run("python", ["-c", "bytearray(256 << 20)"])
    hits = box.limit_hits()
    assert (hits.memory, hits.host_memory, hits.pids) == (1, 0, 0)
    box.sh("for n in $(seq 30); do sleep 30 & done; true", timeout=5)
    hits = box.limit_hits()
    assert hits.memory == 1
    assert hits.pids > 0
    kill_init(box)
    death = box.cause_of_death()
    assert death is not None
    assert death.hits == hits
    box.terminate()
    assert box.limit_hits() == hits
