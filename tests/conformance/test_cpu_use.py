"""What a sandbox took of the CPU, as the host counts it."""

from __future__ import annotations

import time

import pytest
from tests.conformance.conftest import Sandboxes
from tests.conformance.inside import python

from worldfork import Sandbox
from worldfork.records.cpu import CpuUse

VANISHING = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(4):
    if os.fork() == 0:
        if os.fork() == 0:
            while time.thread_time() < 0.5:
                pass
        os._exit(0)
print("on", flush=True)
try:
    os.wait()
except ChildProcessError:
    pass
"""


def counted(box: Sandbox) -> CpuUse:
    use = box.cpu_use()
    if use is None:
        pytest.skip("no cgroup of this host counts CPU use")
    return use


@pytest.mark.behaviour("limit-10")
def test_what_is_gone_and_was_never_waited_for_has_used_its_cpu(sandboxes: Sandboxes) -> None:
    box = sandboxes.create()
    before = counted(box)
    result = box.run("python", ["-c", VANISHING], check=True)
    ends_s = time.monotonic() + 30
    while counted(box).threads and time.monotonic() < ends_s:
        time.sleep(0.02)
    # No command says so: nobody waited for them.
    assert result.cpu_s < 1.0
    assert 1.9 <= counted(box).used_s - before.used_s < 4.0


@pytest.mark.behaviour("limit-10")
def test_threads_that_want_a_cpu_are_told_from_those_that_sleep(sandboxes: Sandboxes) -> None:
    box = sandboxes.create()
    counted(box)
    quiet = box.start_process("sleep", ["1000"])
    loud = box.start_process("sh", ["-c", "while :; do :; done"])
    lowered = box.start_process("nice", ["-n", "5", "sh", "-c", "while :; do :; done"])
    ends_s = time.monotonic() + 30
    while len(seen := counted(box).threads) < 3 or not any(each.stands_back for each in seen.values()):
        assert time.monotonic() < ends_s
    assert sorted((each.wants, each.stands_back) for each in seen.values()) == [
        (False, False),
        (True, False),
        (True, True),
    ]
    for process in (quiet, loud, lowered):
        box.send_signal(process.pid, 9)


@pytest.mark.behaviour("limit-10")
def test_two_sandboxes_count_apart_and_a_dead_one_counts_nothing(sandboxes: Sandboxes) -> None:
    busy, idle = sandboxes.create(), sandboxes.create()
    # A start is counted too; that of a machine takes as long as the work below.
    began_s = counted(busy).used_s, counted(idle).used_s
    python(busy, "import time\nwhile time.thread_time() < 0.5: pass")
    assert counted(busy).used_s - began_s[0] >= 0.5
    assert counted(idle).used_s - began_s[1] < 0.4
    busy.terminate()
    assert busy.cpu_use() is None
