"""Where groups can be made, read from the kernel's tables of made-up hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from worldfork.records.sandbox import Limits
from worldfork.sandbox import cgroups
from worldfork.sandbox.cgroups import CgroupLayout, detect_layout, remove_groups


def make_host(top: Path, cgroup: str, mounts: dict[str, tuple[str, str]]) -> Path:
    """Write /proc/self of a host whose hierarchies lie below `top`; name -> (root, own path there)."""
    lines = []
    for number, (name, (root, own)) in enumerate(mounts.items()):
        point = top / (name or "unified")
        (point / own.lstrip("/")).mkdir(parents=True)
        kind, options = ("cgroup2", "rw") if not name else ("cgroup", f"rw,{name}")
        lines.append(f"{30 + number} 29 0:{number} {root} {point} rw,nosuid - {kind} none {options}")
    proc = top / "proc"
    proc.mkdir()
    (proc / "mountinfo").write_text("\n".join(lines) + "\n")
    (proc / "cgroup").write_text(cgroup)
    return proc


def test_version_1_with_a_path_of_its_own(tmp_path: Path) -> None:
    proc = make_host(
        tmp_path,
        "4:memory:/jobs/one\n3:pids:/\n2:cpu,cpuacct:/\n1:freezer:/\n0::/\n",
        {"memory": ("/", "/jobs/one"), "pids": ("/", "/"), "cpu,cpuacct": ("/", "/"), "freezer": ("/", "/")},
    )
    layout = detect_layout(proc)
    assert layout.limited
    assert layout.v2 is None
    assert layout.v1["memory"] == tmp_path / "memory/jobs/one"
    assert list(layout.v1) == ["memory", "pids", "cpu", "freezer"]


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ("4:cpuacct:/\n3:cpu:/\n", ["memory", "pids", "cpu", "cpuacct"]),
        ("3:cpu,cpuacct:/\n", ["memory", "pids", "cpu"]),
    ],
)
def test_cpu_use_is_counted_by_one_group(tmp_path: Path, own: str, wanted: list[str]) -> None:
    mounts = {line.split(":")[1]: ("/", "/") for line in own.splitlines()}
    proc = make_host(tmp_path, f"2:memory:/\n1:pids:/\n{own}", {"memory": ("/", "/"), "pids": ("/", "/"), **mounts})
    layout = detect_layout(proc)
    assert list(layout.v1) == wanted
    made = [value for key, value in layout.items("sb-x", Limits()) if key == "cgdir"]
    assert tuple(made) == layout.directories("sb-x")
    assert len(set(made)) == len(wanted)
    assert sum(key == "cgjoin" for key, _ in layout.items("sb-x", Limits())) == len(wanted)


def test_a_group_that_counts_and_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    proc = make_host(tmp_path, "2:memory:/\n1:pids:/\n", {"memory": ("/", "/"), "pids": ("/", "/")})
    with (proc / "cgroup").open("a") as file:
        file.write("3:cpuacct:/\n")
    assert list(detect_layout(proc).v1) == ["memory", "pids"]


def test_in_a_container_the_own_path_is_below_the_mounted_root(tmp_path: Path) -> None:
    proc = make_host(
        tmp_path,
        "2:memory:/docker/abc\n1:pids:/docker/abc\n",
        {"memory": ("/docker/abc", "/"), "pids": ("/docker/abc", "/")},
    )
    assert detect_layout(proc).v1 == {"memory": tmp_path / "memory", "pids": tmp_path / "pids"}


def test_version_2_climbs_to_the_group_that_hands_controllers_out(tmp_path: Path) -> None:
    proc = make_host(tmp_path, "0::/user/session.scope\n", {"": ("/", "/user/session.scope")})
    top = tmp_path / "unified"
    (top / "user/session.scope/cgroup.subtree_control").write_text("\n")
    (top / "user/cgroup.subtree_control").write_text("cpu memory pids\n")
    assert detect_layout(proc) == CgroupLayout({}, top / "user")


def test_without_memory_and_pids_there_are_no_limits(tmp_path: Path) -> None:
    proc = make_host(tmp_path, "1:freezer:/\n0::/\n", {"freezer": ("/", "/"), "": ("/", "/")})
    layout = detect_layout(proc)
    assert not layout.limited
    assert layout.items("sb-x", Limits()) == []
    assert layout.directories("sb-x") == ()


def test_limits_become_knobs_of_either_version() -> None:
    limits = Limits(cpus=1.5, memory_mb=64, pids=20)
    old = CgroupLayout({"memory": Path("/m"), "pids": Path("/p"), "cpu": Path("/c")}, None).items("sb-x", limits)
    assert ("cgset", f"memory.limit_in_bytes\t{64 << 20}") in old
    assert ("cgset", "pids.max\t20") in old
    assert ("cgset", "cpu.cfs_quota_us\t150000") in old
    new = CgroupLayout({}, Path("/u")).items("sb-x", limits)
    assert new[0] == ("cgdir", "/u/worldfork-sb-x")
    assert ("cgset", "cpu.max\t150000 100000") in new
    assert ("cgset", f"memory.max\t{64 << 20}") in new


def test_no_limit_is_no_knob() -> None:
    unlimited = Limits(None, None, None, None)
    items = CgroupLayout({"memory": Path("/m"), "pids": Path("/p")}, None).items("sb-x", unlimited)
    assert not [item for item in items if item[0] == "cgset"]


def test_a_group_that_counts_and_would_not_go_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_REMOVAL_DEADLINE_S", 0.01)
    layout = CgroupLayout({"memory": tmp_path / "memory", "cpuacct": tmp_path / "cpuacct"}, None)
    groups = layout.directories("sb-x")
    (tmp_path / "cpuacct/worldfork-sb-x/held").mkdir(parents=True)
    (tmp_path / "memory/worldfork-sb-x").mkdir(parents=True)
    assert remove_groups(groups) == [str(tmp_path / "cpuacct/worldfork-sb-x")]


def test_only_groups_of_ours_are_removed(tmp_path: Path) -> None:
    ours, foreign = tmp_path / "worldfork-sb-x", tmp_path / "system.slice"
    ours.mkdir()
    foreign.mkdir()
    assert remove_groups([str(ours), str(foreign), str(tmp_path / "worldfork-gone")]) == []
    assert not ours.exists()
    assert foreign.exists()
