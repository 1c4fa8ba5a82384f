"""Who took the CPU: what is seen of a sandbox while something in it runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.reward.played import PlayedSandbox

from worldfork.core.errors import SandboxDied
from worldfork.reward.blame import Looks, is_busy
from worldfork.reward.priority import is_confined, stands_back
from worldfork.reward.split.use import Use, sandbox_use

TICKS = os.sysconf("SC_CLK_TCK")


def process(state: str, used_s: float, nice: int = 0, policy: int = 0) -> bytes:
    ticks = int(used_s * TICKS)
    return f"9 (odd ) name) {state} 1 9 9 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 {nice} {'0 ' * 21}{policy}".encode()


def seen(*looks: dict[int, bytes]) -> Looks:
    found = Looks()

    async def run() -> None:
        for processes in looks:
            await found.look(PlayedSandbox(files={f"/proc/{pid}/stat": text for pid, text in processes.items()}))  # type: ignore[arg-type]

    asyncio.run(run())
    return found


def test_what_is_gone_at_the_end_still_used_what_it_was_seen_to_use() -> None:
    children = {20 + each: process("S", 2.0) for each in range(3)}
    assert seen({7: process("S", 0.1), **children}, {7: process("S", 0.2)}).busy(wall_s=10.0)
    assert not seen({7: process("S", 0.1)}, {7: process("S", 0.2)}).busy(wall_s=10.0)


def test_a_process_counts_once_however_often_it_is_seen() -> None:
    assert not seen(*[{7: process("S", 2.0)}] * 5).busy(wall_s=10.0)


def test_a_sandbox_whose_processes_often_want_more_than_one_cpu_waits_for_itself() -> None:
    alone, crowd = {7: process("R", 0.0)}, {7: process("R", 0.0), 8: process("R", 0.0)}
    assert seen(alone, alone, crowd).busy(wall_s=10.0)
    assert not seen(alone, alone, alone, crowd).busy(wall_s=10.0)


def test_pid_1_is_ours() -> None:
    assert not seen({1: process("R", 0.0), 7: process("R", 0.0)}).busy(wall_s=10.0)


def test_the_longest_wait_is_kept() -> None:
    found = Looks()
    files = {"/proc/7/stat": process("R", 0.0), "/proc/7/schedstat": b"1 9000000000 2\n"}
    asyncio.run(found.look(PlayedSandbox(files=files)))  # type: ignore[arg-type]
    asyncio.run(found.look(PlayedSandbox(files={**files, "/proc/7/schedstat": b"odd"})))  # type: ignore[arg-type]
    assert found.waited_s == pytest.approx(9.0)


@pytest.mark.parametrize("lowered", [{"nice": 19}, {"nice": 1}, {"policy": os.SCHED_IDLE}, {"policy": os.SCHED_BATCH}])
def test_what_leaves_the_cpu_to_others_is_not_starved_by_them(lowered: dict[str, int]) -> None:
    as_ours = {7: process("R", 0.0)}
    # Once is enough: what it waited by then is not told from what it waits afterwards.
    assert seen(as_ours, {7: process("R", 0.0, **lowered)}, as_ours).busy(wall_s=10.0)
    assert not seen(as_ours, as_ours).busy(wall_s=10.0)


@pytest.mark.parametrize(
    ("facts", "held"),
    [
        ({"status": b"Name:\tx\nCpus_allowed:\t%x\n"}, False),
        ({"status": b"Name:\tx\nCpus_allowed:\t0\n"}, True),
        ({"status": b"Cpus_allowed:\t%x\n", "autogroup": b"/autogroup-5 nice 19\n"}, True),
        ({"status": b"Cpus_allowed:\t%x\n", "autogroup": b"/autogroup-5 nice 0\n"}, False),
    ],
)
def test_what_keeps_off_cpus_is_not_starved_by_those_on_them(facts: dict[str, bytes], held: bool) -> None:
    ours = sum(1 << each for each in os.sched_getaffinity(0))
    found = Looks()
    files = {"/proc/7/stat": process("R", 0.0), "/proc/7/schedstat": b"1 9000000000 2\n"}
    files |= {f"/proc/7/{name}": text.replace(b"%x", b"%x" % ours) for name, text in facts.items()}
    asyncio.run(found.look(PlayedSandbox(files=files)))  # type: ignore[arg-type]
    assert (found.waited_s, found.busy(wall_s=10.0)) == (9.0, held)


@pytest.mark.parametrize("lowered", [{}, {"nice": 19}, {"policy": os.SCHED_IDLE}])
def test_a_candidate_that_leaves_the_cpu_to_others_is_late_by_itself(lowered: dict[str, int]) -> None:
    files = {"/proc/7/stat": process("R", 0.1, **lowered), "/proc/7/schedstat": b"1 9000000000 2\n"}
    use = asyncio.run(sandbox_use(PlayedSandbox(files=files), 7))  # type: ignore[arg-type]
    assert use.is_starved(Use(), 10.0) is not bool(lowered)


def test_a_process_of_this_machine_that_lowers_itself_is_seen_to() -> None:
    stay = "import os, sys; print(flush=True); sys.stdin.read()"
    lower = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); " + stay
    for text, lowered in ((stay, False), (lower, True)):
        command = [sys.executable, "-c", text]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            fields = Path(f"/proc/{child.pid}/stat").read_bytes().rpartition(b")")[2].split()
            assert stands_back(fields) is lowered
            assert not is_confined(Path(f"/proc/{child.pid}/status").read_bytes(), b"")


def test_a_sandbox_that_cannot_be_asked_is_busy() -> None:
    class Dead(PlayedSandbox):
        async def list_directory(self, path: str) -> object:  # type: ignore[override]
            raise SandboxDied("gone")

    assert asyncio.run(is_busy(Dead(), 10.0))  # type: ignore[arg-type]
