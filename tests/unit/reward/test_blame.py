"""Who took the CPU: what is seen of a sandbox while something in it runs."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reward.played import PlayedSandbox, a_result

from worldfork.core.clock import ManualClock
from worldfork.core.errors import SandboxDied
from worldfork.records.cpu import CpuUse, ThreadUse
from worldfork.reward import blame
from worldfork.reward.blame import Looks, is_most, is_starved, look_until, run_watched, settle_looks
from worldfork.reward.priority import is_confined, stands_back
from worldfork.reward.split.use import Use, sandbox_use
from worldfork.sandbox.command import Reason


@pytest.fixture(autouse=True)
def _others_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine does meanwhile is nothing to a test."""
    monkeypatch.setattr(blame, "machine_used_s", lambda: math.inf)


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
    assert seen({7: process("S", 0.1), **children}, {7: process("S", 0.2)}).took_it_all(wall_s=10.0)
    assert not seen({7: process("S", 0.1)}, {7: process("S", 0.2)}).took_it_all(wall_s=10.0)


def test_a_process_counts_once_however_often_it_is_seen() -> None:
    assert not seen(*[{7: process("S", 2.0)}] * 5).took_it_all(wall_s=10.0)


def test_a_sandbox_whose_processes_often_want_more_than_one_cpu_waits_for_itself() -> None:
    alone, crowd = {7: process("R", 0.0)}, {7: process("R", 0.0), 8: process("R", 0.0)}
    assert seen(alone, alone, crowd).took_it_all(wall_s=10.0)
    assert not seen(alone, alone, alone, crowd).took_it_all(wall_s=10.0)


def test_pid_1_is_ours() -> None:
    assert not seen({1: process("R", 0.0), 7: process("R", 0.0)}).took_it_all(wall_s=10.0)


def test_the_longest_wait_is_kept() -> None:
    found = Looks()
    files = {"/proc/7/stat": process("R", 0.0), "/proc/7/schedstat": b"1 9000000000 2\n"}
    asyncio.run(found.look(PlayedSandbox(files=files)))  # type: ignore[arg-type]
    asyncio.run(found.look(PlayedSandbox(files={**files, "/proc/7/schedstat": b"odd"})))  # type: ignore[arg-type]
    assert found.missed_s(10.0) == pytest.approx(9.0)


@pytest.mark.parametrize("lowered", [{"nice": 19}, {"nice": 1}, {"policy": os.SCHED_IDLE}, {"policy": os.SCHED_BATCH}])
def test_what_leaves_the_cpu_to_others_is_not_starved_by_them(lowered: dict[str, int]) -> None:
    as_ours = {7: process("R", 0.0)}
    # Once is enough: what it waited by then is not told from what it waits afterwards.
    assert seen(as_ours, {7: process("R", 0.0, **lowered)}, as_ours).took_it_all(wall_s=10.0)
    assert not seen(as_ours, as_ours).took_it_all(wall_s=10.0)


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
    assert (found.missed_s(10.0), found.took_it_all(wall_s=10.0)) == (0.0 if held else 9.0, held)


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

    found = seen({7: process("R", 0.0)})
    asyncio.run(settle_looks(Dead(), found))  # type: ignore[arg-type]
    assert found.took_it_all(10.0)


def counted(used_s: float, ran_s: float, waited_s: float, wants: bool = True) -> CpuUse:
    return CpuUse(used_s, 0.0, {7: ThreadUse(ran_s, waited_s, wants, False)})


def looked(*uses: CpuUse | None) -> Looks:
    """Look once for each use, five seconds after the other; None where the group is gone by then."""
    clock = ManualClock()
    found, box = Looks(clock), PlayedSandbox()

    async def run() -> None:
        for use in uses:
            box.uses = [] if use is None else [use]
            await found.look(box)  # type: ignore[arg-type]
            clock.advance_s(5.0)

    asyncio.run(run())
    return found


def test_where_a_cgroup_counts_nothing_inside_is_asked() -> None:
    class Unasked(PlayedSandbox):
        async def list_directory(self, path: str) -> object:  # type: ignore[override]
            raise AssertionError("it was asked")

    box, found = Unasked(), Looks()
    box.uses = [counted(0.0, 0.0, 0.0), counted(0.1, 0.1, 9.0)]
    for _ in range(2):
        assert asyncio.run(found.look(box)) == 1  # type: ignore[arg-type]
    assert found.counted
    assert found.missed_s(10.0) == pytest.approx(9.0)


def test_what_is_counted_to_have_run_did_not_wait_for_others() -> None:
    # Children that nobody waited for, and that are gone: no look at processes finds what they used.
    assert looked(counted(0.0, 0.0, 0.0), counted(9.0, 0.1, 9.0)).missed_s(10.0) < 5.0
    # Two workers of an honest program on a full machine.
    assert looked(counted(0.0, 0.0, 0.0), counted(2.5, 1.25, 8.75)).missed_s(10.0) >= 5.0


def test_a_sandbox_whose_group_is_gone_makes_no_claim() -> None:
    assert looked(counted(0.0, 0.0, 0.0), counted(0.1, 0.1, 9.0), None).missed_s(10.0) == 0.0


def test_what_still_runs_after_the_tests_is_their_own_where_nobody_counts() -> None:
    files = {"/proc/7/stat": process("R", 0.0), "/proc/7/schedstat": b"1 9000000000 2\n"}
    for uses, missed_s in (([], 0.0), ([counted(0.0, 0.0, 0.0)], 9.0)):
        box, found = PlayedSandbox(files=files), looked(*uses)
        box.uses = [counted(0.1, 0.1, 9.0)] if uses else []
        asyncio.run(settle_looks(box, found))  # type: ignore[arg-type]
        assert found.missed_s(10.0) == pytest.approx(missed_s)


class Hasty(ManualClock):
    """Who sleeps moves it."""

    async def sleep_s(self, duration_s: float) -> None:
        self.advance_s(duration_s)


@pytest.mark.parametrize(("counts", "fewest", "most"), [(True, 150, 1000), (False, 4, 10)])
def test_looks_are_often_where_they_cost_little(counts: bool, fewest: int, most: int) -> None:
    clock, taken = Hasty(), 0

    class Box(PlayedSandbox):
        async def cpu_use(self) -> CpuUse | None:
            nonlocal taken
            taken += 1
            return counted(0.0, 0.0, 0.0) if counts else None

    looks = Looks(clock)
    asyncio.run(look_until((Box(),), 10.0, looks, clock))  # type: ignore[arg-type]
    assert fewest <= taken <= most
    assert clock.monotonic_s() >= 10.0


@pytest.mark.parametrize(("waited_s", "starved"), [(0.0, False), (0.09, True)])
def test_a_short_limit_is_not_held_against_the_time_until_the_kill(waited_s: float, starved: bool) -> None:
    class Stalled(PlayedSandbox):
        async def run(self, command: str, args: list[str], **options: Any) -> Any:
            await asyncio.sleep(0.3)
            return await super().run(command, args, **options)

        async def cpu_use(self) -> CpuUse | None:
            self.seen.append({})
            return counted(0.0, 0.0, waited_s if len(self.seen) > 1 else 0.0, wants=False)

    late = a_result(b"", reason=Reason.TIMED_OUT, wall_s=5.1, cpu_s=0.01)
    result, missed_s = asyncio.run(run_watched(Stalled(late), 0.1, "x", []))  # type: ignore[arg-type]
    assert missed_s == pytest.approx(waited_s)
    assert is_starved(result, missed_s) is starved


@pytest.mark.parametrize(
    ("missed_s", "needed_s", "starved"),
    [
        # Nobody knows what is needed, or it is little: half of the limit is enough.
        (150.0, 0.0, True),
        (149.0, 0.0, False),
        (149.0, 75.0, False),
        # Twice what is needed.
        (101.0, 100.0, True),
        (99.0, 100.0, False),
        # 200 s on a machine whose load is 1.6, and 1.5 at the least that strikes.
        (112.5, 200.0, True),
        (100.0, 200.0, True),
        (31.0, 280.0, True),
        # It had the machine nearly whole, or slept.
        (29.0, 280.0, False),
        (0.0, 280.0, False),
        (0.0, 1e9, False),
    ],
)
def test_a_strike_is_the_codes_own_only_where_it_had_twice_what_the_reference_needs(
    missed_s: float, needed_s: float, starved: bool
) -> None:
    assert is_most(missed_s, 300.0, needed_s) is starved


@pytest.mark.parametrize("measured", [True, False])
def test_what_others_took_of_a_program_that_ends_in_time_is_known_where_it_is_asked(measured: bool) -> None:
    class Slow(PlayedSandbox):
        async def run(self, command: str, args: list[str], **options: Any) -> Any:
            while not self.looked:
                await asyncio.sleep(0)
            return await super().run(command, args, **options)

        looked = 0

        async def cpu_use(self) -> CpuUse | None:
            self.looked += 1
            return counted(0.0, 0.0, 0.4 if self.looked > 1 else 0.0, wants=False)

    ended = a_result(b"", wall_s=1.0)
    result, missed_s = asyncio.run(run_watched(Slow(ended), 300.0, "x", [], measured=measured))  # type: ignore[arg-type]
    assert (result, missed_s) == (ended, 0.4 if measured else 0.0)
