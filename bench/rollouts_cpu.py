"""Graded rollouts of the demo task against the same pytest runs by hand, in CPU seconds; the owner's memory; leaks."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.by_hand import ByHand
from bench.harness import Options, Skip, bar, figure, own_memory_bytes, say, summary_ms
from bench.leaks import footprint, kernel_group_counts, leak_check
from bench.worlds import checked, library

GROUP, GROUPS = 8, 1000
BLOCK = 10
WARM_UP = 3
BAR_CPU, BAR_MEMORY = 1.2, 0.05
_HIERARCHY = Path("/sys/fs/cgroup/cpuacct")


class _Meter:
    """CPU seconds of this process and all that it starts, by an accounting group that only it uses.

    Where the accounting hierarchy is not one of its own (version 2, or mounted together with `cpu`, in which
    sandboxes have groups of their own), the whole machine's busy time is taken.
    """

    def __init__(self) -> None:
        own = next(
            (line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.split(":")[1] == "cpuacct"),
            None,
        )
        self._home = _HIERARCHY / own.split(":", 2)[2].lstrip("/") if own and _HIERARCHY.is_dir() else None
        self._groups: dict[str, Path] = {}
        self.pids = [os.getpid()]
        """Whose use is counted, with that of what they start."""

    @property
    def kind(self) -> str:
        """What is counted."""
        return "cpuacct group" if self._home else "the whole machine's busy time"

    @contextmanager
    def charge(self, name: str) -> Iterator[None]:
        """Count what is used within the block under `name`."""
        if self._home is not None:
            if name not in self._groups:
                self._groups[name] = self._home / f"worldfork-bench-{name}-{os.getpid()}"
                self._groups[name].mkdir()
            self._move(self._groups[name])
        _settle()
        try:
            yield
        finally:
            if self._home is not None:
                self._move(self._home)
            _settle()

    def _move(self, group: Path) -> None:
        for pid in self.pids:
            (group / "cgroup.procs").write_text(str(pid))

    def used_s(self, name: str) -> float:
        """CPU seconds under `name`, those of the processes that ended included."""
        return int((self._groups[name] / "cpuacct.usage").read_text()) / 1e9 if name in self._groups else 0.0

    def close(self) -> None:
        """Remove the groups; what is left in one is put back, since it may live as long as this process."""
        for group in self._groups.values():
            for _ in range(100):
                for pid in (group / "cgroup.procs").read_text().split():
                    with suppress(OSError):  # it ended meanwhile
                        (group.parent / "cgroup.procs").write_text(pid)
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.05)


def _settle() -> None:
    """Have sandboxes make their groups below this process's own from now on: what they use counts as its use, then."""
    from worldfork.lineage.place import place
    from worldfork.sandbox.cgroups import detect_layout

    driver: Any = place().driver
    driver.layout = detect_layout()


def _machine_busy_s() -> float:
    fields = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _pytest_world(options: Options) -> Any:
    """A world whose pytest is the one that this interpreter has."""
    import importlib.metadata

    try:
        wanted = [f"{name}=={importlib.metadata.version(name)}" for name in ("pytest", "pytest-timeout")]
    except importlib.metadata.PackageNotFoundError as error:
        raise Skip(f"this interpreter has no {error.name}: install the dev extra") from error

    def build(sandbox: Any) -> None:
        checked(sandbox.run("python", ["-m", "pip", "install", "--quiet", *wanted], timeout=600), "pip install")

    return library(options).world("bench-" + "-".join(wanted), build=build)


def run(options: Options) -> dict[str, Any]:
    """Blocks of ten groups and of the same number of runs by hand, in turn; memory is read after each group."""
    world = _pytest_world(options)
    from worldfork.rollout.demo_task import demo_candidates, demo_task
    from worldfork.rollout.group import run_group
    from worldfork.rollout.policies import CandidatesPolicy

    task, policy = demo_task(), CandidatesPolicy(demo_candidates())
    groups, block = options.samples(GROUPS, 4), options.samples(BLOCK, 2)
    meter = _Meter()
    memory: list[int] = []
    walls: dict[str, list[float]] = {"group": [], "by_hand_group": []}
    machine = {"rollouts": 0.0, "by_hand": 0.0}
    wrong: list[str] = []

    async def groups_of_rollouts(count: int) -> None:
        for _ in range(count):
            start = time.perf_counter()
            done = await run_group(task, policy, GROUP, world=world)
            walls["group"].append(time.perf_counter() - start)
            wrong.extend(e.failure.message for e in done.episodes if e.failure is not None)
            memory.append(own_memory_bytes())

    asyncio.run(groups_of_rollouts(WARM_UP))
    before, kernel = footprint(options.home / "home"), kernel_group_counts()
    memory.clear()
    walls["group"].clear()
    with ByHand() as hand, closing(meter):
        meter.pids.append(hand.pid)
        for number in range(0, groups, block):
            for name in ("rollouts", "by_hand") if number // block % 2 == 0 else ("by_hand", "rollouts"):
                busy = _machine_busy_s()
                with meter.charge(name):
                    if name == "rollouts":
                        asyncio.run(groups_of_rollouts(block))
                    else:
                        walls["by_hand_group"] += hand.run(block)
                machine[name] += _machine_busy_s() - busy
            say(f"  {number + block} of {groups} groups")
        cpu = {name: meter.used_s(name) or machine[name] for name in machine}
    gc.collect()
    left = leak_check(options.home / "home", before)
    tenth = max(1, len(memory) // 10)
    first, last = sum(memory[:tenth]) / tenth, sum(memory[-tenth:]) / tenth
    share, growth = cpu["rollouts"] / cpu["by_hand"], last / first - 1
    values: dict[str, Any] = {
        "rollouts_n": groups * GROUP,
        "failures": wrong[:10],
        "cpu_counted_by": meter.kind,
        "rollouts_cpu_s": round(cpu["rollouts"], 2),
        "by_hand_cpu_s": round(cpu["by_hand"], 2),
        "cpu_ratio": round(share, 3),
        "machine_busy_rollouts_s": round(machine["rollouts"], 2),
        "machine_busy_by_hand_s": round(machine["by_hand"], 2),
        "owner_first_tenth_bytes": round(first),
        "owner_last_tenth_bytes": round(last),
        "kernel_group_count_growth_n": {k: v - kernel[k] for k, v in kernel_group_counts().items() if v != kernel[k]},
        **{f"{name}_wall": summary_ms(taken) for name, taken in walls.items()},
    }
    bars = [
        bar("CPU seconds against pytest by hand", share, BAR_CPU, unit="ratio"),
        bar("owner's memory, last tenth over first less 1", growth, BAR_MEMORY, unit="ratio"),
        {"what": "every rollout is scored", "passed": not wrong},
        left,
    ]
    return figure("rollouts_cpu", f"8 x {groups} graded rollouts of the demo task", values, bars)
