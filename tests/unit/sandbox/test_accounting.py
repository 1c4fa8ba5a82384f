"""CPU use as the cgroups of made-up hosts count it, and of this one's kernel."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from worldfork.records.cpu import CpuUse
from worldfork.sandbox.accounting import Account, find_account, machine_used_s


def make_group(directory: Path, **files: str) -> str:
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return str(directory)


def make_thread(
    proc: Path, number: int, state: str = "S", ran_s: float = 0.0, waited_s: float = 0.0, **low: int
) -> None:
    directory = proc / str(number)
    directory.mkdir(parents=True)
    nice, policy = os.getpriority(os.PRIO_PROCESS, 0) + low.get("nice", 0), low.get("policy", os.sched_getscheduler(0))
    (directory / "stat").write_text(f"{number} (odd ) name) {state} {'0 ' * 15}{nice} {'0 ' * 21}{policy}")
    (directory / "schedstat").write_text(f"{int(ran_s * 1e9)} {int(waited_s * 1e9)} 3\n")
    (directory / "autogroup").write_text(f"/autogroup-7 nice {low.get('group', 0)}\n")


def read(account: Account | None, proc: Path, init_pid: int | None = None) -> CpuUse:
    assert account is not None
    use = replace(account, proc=str(proc)).read(init_pid)
    assert use is not None
    return use


def test_version_1_counts_in_a_group_of_its_own(tmp_path: Path) -> None:
    groups = [
        make_group(tmp_path / "cpu", cpu__stat="nr_periods 3\nnr_throttled 1\nthrottled_time 500000000\n"),
        make_group(tmp_path / "cpuacct", cpuacct__usage="2500000000\n", tasks="11\n12\n13\n"),
    ]
    make_thread(tmp_path / "proc", 11, "R", 1.0, 4.0)
    make_thread(tmp_path / "proc", 12)
    use = read(find_account(groups), tmp_path / "proc")
    assert (use.used_s, use.throttled_s, sorted(use.threads)) == (2.5, 0.5, [11, 12])
    first = use.threads[11]
    assert (first.ran_s, first.waited_s, first.wants, first.stands_back) == (1.0, 4.0, True, False)
    assert not use.threads[12].wants


@pytest.mark.parametrize("limited", ["", "nr_periods 1\nnr_throttled 1\nthrottled_usec 250000\n"])
def test_version_2_counts_in_its_one_group(tmp_path: Path, limited: str) -> None:
    text = f"usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\n{limited}"
    group = make_group(tmp_path / "one", cpu__stat=text, cgroup__threads="11\n", memory__max="max\n")
    make_thread(tmp_path / "proc", 11, "R")
    use = read(find_account([group]), tmp_path / "proc")
    assert (use.used_s, use.throttled_s, list(use.threads)) == (1.5, 0.25 if limited else 0.0, [11])


def test_a_host_that_counts_nothing_says_so(tmp_path: Path) -> None:
    group = make_group(tmp_path / "cpu", cpu__stat="nr_periods 0\nnr_throttled 0\nthrottled_time 0\n")
    assert find_account([group, str(tmp_path / "gone")]) is None
    assert find_account([]) is None


def test_a_group_that_is_gone_has_no_use(tmp_path: Path) -> None:
    group = make_group(tmp_path / "cpuacct", cpuacct__usage="5\n", tasks="")
    account = find_account([group])
    assert account is not None
    (tmp_path / "cpuacct/cpuacct.usage").unlink()
    assert account.read() is None


def test_what_pid_1_is_made_to_do_counts(tmp_path: Path) -> None:
    group = make_group(tmp_path / "cpuacct", cpuacct__usage="1000000000", tasks="")
    make_thread(tmp_path / "proc", 50, ran_s=0.5)
    account = find_account([group])
    assert (read(account, tmp_path / "proc", 50).used_s, read(account, tmp_path / "proc", 50).init_s) == (1.5, 0.5)
    assert read(account, tmp_path / "proc", 51).used_s == 1.0


def test_only_the_first_of_many_threads_are_read_and_that_is_told(tmp_path: Path) -> None:
    many = [str(number) for number in range(100, 400)]
    for number in many:
        make_thread(tmp_path / "proc", int(number), "R")
    for names, whole in ((many, False), (many[:5], True), ([*many[:5], "999"], False)):
        group = make_group(tmp_path / f"g{len(names)}", cpuacct__usage="0", tasks="\n".join(names))
        use = read(find_account([group]), tmp_path / "proc")
        assert (use.whole, len(use.threads) <= 64) == (whole, True)


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({"cpu__max": "150000 100000\n"}, 1),
        ({"cpu__max": "250000 100000\n"}, 2),
        ({"cpu__max": "max 100000\n"}, None),
        ({"cpu__cfs_quota_us": "100000\n", "cpu__cfs_period_us": "100000\n"}, 1),
        ({"cpu__cfs_quota_us": "-1\n", "cpu__cfs_period_us": "100000\n"}, None),
        ({"cpu__max": "1000 100000\n"}, 1),
    ],
)
def test_a_quota_of_any_group_above_bounds_the_cpus(tmp_path: Path, files: dict[str, str], share: int | None) -> None:
    make_group(tmp_path / "above", **files)
    kind = {"cgroup__controllers": "cpu\n"} if "cpu__max" in files else {"cpu__cfs_quota_us": "-1\n"}
    group = make_group(tmp_path / "above/between/own", cpuacct__usage="0", tasks="", **kind)
    ours = len(os.sched_getaffinity(0))
    assert read(find_account([group]), tmp_path / "proc").cpus == min(ours, share or ours)


@pytest.mark.parametrize("low", [{"nice": 1}, {"policy": os.SCHED_IDLE}, {"policy": os.SCHED_BATCH}, {"group": 19}])
def test_what_leaves_the_cpu_to_others_is_seen_to(tmp_path: Path, low: dict[str, int]) -> None:
    group = make_group(tmp_path / "cpuacct", cpuacct__usage="0", tasks="11\n12\n")
    make_thread(tmp_path / "proc", 11, "R", **low)
    make_thread(tmp_path / "proc", 12, "R")
    make_thread(tmp_path / "proc", 1)
    (tmp_path / "proc/self").symlink_to("12")
    use = read(find_account([group]), tmp_path / "proc")
    assert [use.threads[number].stands_back for number in (11, 12)] == [True, False]


def test_what_the_machine_ran_is_without_interrupts_and_idle_time(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(f"cpu  {2 * ticks} {ticks} {3 * ticks} 900 80 70 60 {4 * ticks} 5 5\ncpu0 1 1\n")
    assert machine_used_s(str(tmp_path / "stat")) == 10.0
    (tmp_path / "stat").write_text("odd\n")
    assert machine_used_s(str(tmp_path / "stat")) == math.inf
    assert machine_used_s(str(tmp_path / "none")) == math.inf
    assert 0 < machine_used_s() < math.inf


def test_a_thread_of_this_machine_is_read_as_the_kernel_has_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        group = make_group(tmp_path / "cpuacct", cpuacct__usage="0", tasks=f"{child.pid}\n99999999\n")
        account = find_account([group])
        try:
            assert account is not None
            check(account, child.pid)
        finally:
            child.kill()


def check(account: Account, pid: int) -> None:
    seen = []
    ends_s = time.monotonic() + 30
    while time.monotonic() < ends_s:
        use = account.read()
        assert use is not None
        seen.append(use.threads[pid])
        if seen[-1].wants and seen[-1].ran_s > 0.05:
            break
        os.sched_yield()
    assert seen[-1].ran_s > 0.05
    assert not seen[-1].stands_back
    if len(ours := os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(pid, {min(ours)})
        confined = account.read()
        assert confined is not None
        assert confined.threads[pid].stands_back
