"""Security: what of the kernel's own files can be seen and written, and that no device can be had."""

from __future__ import annotations

import os

import pytest
from tests.conformance.attack import attacked, cells
from tests.conformance.inside import python, shell

from worldfork import Sandbox

pytestmark = pytest.mark.timeout(240)
cell = cells()

MASKED = (
    "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/latency_stats", "/proc/sched_debug", "/proc/acpi",
    "/proc/asound", "/proc/scsi", "/proc/kallsyms", "/proc/interrupts", "/proc/kmsg", "/proc/kpagecount",
    "/proc/kpageflags", "/proc/kpagecgroup", "/sys/firmware",
)  # fmt: skip
MOUNTS = {"/", "/dev", "/dev/pts", "/dev/shm", "/proc", "/sys", "/usr"}
FILE_SYSTEMS = {"overlay", "tmpfs", "devpts", "proc", "sysfs", "devtmpfs"}
"""devtmpfs: in user form the harmless devices are the host's own, one by one."""


def mounts(box: Sandbox) -> dict[str, tuple[str, str]]:
    """Mount point -> (its options, its file system)."""
    found = {}
    for line in shell(box, "cat /proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        found[left.split()[4]] = (left.split()[5], right.split()[0])
    return found


@pytest.mark.behaviour("security-11")
def test_masked_paths_are_covered_and_stay_so(cell: Sandbox) -> None:
    # Those that this kernel has; that they are empty is not luck but a mount over them.
    present = [path for path in MASKED if os.path.lexists(path)]
    assert len(present) >= 4
    points = mounts(cell)
    program = """
import stat, subprocess
def look(path):
    info = os.stat(path)
    if stat.S_ISDIR(info.st_mode):
        return os.listdir(path) + [attempt(os.mkdir, path + "/x")]
    assert (os.major(info.st_rdev), os.minor(info.st_rdev)) == (1, 3), path
    return [open(path, "rb").read().hex()]
def uncover(path):
    subprocess.run(["umount", path], stderr=subprocess.DEVNULL)
    return [attempt(action, path) for action in (os.unlink, os.rmdir)] + [attempt(os.rename, path, path + "-")]
other_ways = [path.replace("/proc", prefix, 1) for path in sys.argv[1:] if path.startswith("/proc/")
              for prefix in ("/proc/self/root/proc", "/dev/../proc", "/proc/thread-self/root/proc")]
tell([{path: [look(path), uncover(path), look(path)] for path in sys.argv[1:]}, [look(p) for p in other_ways]])
"""
    found, others = attacked(cell, program, *present)
    for path in present:
        options, kind = points[path]
        before, refused, after = found[path]
        assert before == after
        assert before in ([""], ["EROFS"]), path
        assert "EROFS" in before or kind in ("tmpfs", "devtmpfs")
        assert "done" not in refused
        if before == ["EROFS"]:
            assert {"ro", "nosuid", "nodev", "noexec"} <= set(options.split(","))
    assert all(answer in ([""], ["EROFS"]) for answer in others)


@pytest.mark.behaviour("security-12")
def test_no_file_that_steers_the_kernel_can_be_opened_for_writing(cell: Sandbox) -> None:
    program = """
tops = [path for path in ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs", "/sys")
        if os.path.exists(path)]
seen, opened = 0, []
def visit(path):
    global seen
    seen += 1
    fd = attempt(os.open, path, os.O_WRONLY | os.O_NONBLOCK)
    if isinstance(fd, int):
        opened.append(path)
        os.close(fd)
    if isinstance(attempt(os.utime, path, (0, 0)), type(None)) or attempt(os.chmod, path, 0o666) is None:
        opened.append(path)
for top in tops:
    if os.path.isfile(top):
        visit(top)
    for directory, _, files in os.walk(top):
        for name in files:
            if not os.path.islink(f"{directory}/{name}"):
                visit(f"{directory}/{name}")
        made = attempt(os.mkdir, directory + "/worldfork")
        if made is None:
            opened.append(directory)
known = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/vm/drop_caches",
         "/proc/sys/kernel/hostname", "/proc/sys/fs/suid_dumpable"]
tell([seen, opened, [path for path in known if os.path.exists(path)]])
"""
    seen, opened, known = attacked(cell, program, timeout=120)
    assert opened == []
    assert seen > 500
    assert "/proc/sys/kernel/core_pattern" in known


@pytest.mark.behaviour("security-12")
def test_only_its_own_mounts_are_there(cell: Sandbox, of_the_host: tuple[str, ...]) -> None:
    points = mounts(cell)
    # Besides: the Python that the base needs, what covers the masked paths, and the identity files.
    extra = {point for point in points if point not in MOUNTS and not point.startswith(("/proc/", "/dev/", "/etc/"))}
    extra -= {"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/sys/firmware"}
    assert all(os.path.exists(f"{point}/bin") for point in extra), extra
    assert {
        kind
        for point, (_, kind) in points.items()
        if point not in {"/usr", *extra, "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}
    } <= FILE_SYSTEMS
    assert "nodev" in points["/"][0].split(",")
    for point in (*of_the_host, "/proc", "/sys", "/dev/shm", *extra):
        assert {"nosuid", "nodev"} <= set(points[point][0].split(",")), point
    for point in (*of_the_host, "/sys", "/proc/sys", *extra):
        assert "ro" in points[point][0].split(","), point
    assert (
        python(cell, "import os; print(os.listdir('/sys/fs/cgroup') if os.path.isdir('/sys/fs/cgroup') else [])")
        == "[]\n"
    )


@pytest.mark.behaviour("security-13")
def test_no_device_can_be_made(cell: Sandbox) -> None:
    program = """
import stat
kinds = (stat.S_IFCHR, stat.S_IFBLK)
devices = (os.makedev(1, 1), os.makedev(1, 5), os.makedev(8, 0), os.makedev(10, 229), os.makedev(254, 0))
tell([attempt(os.mknod, f"{place}/device", kind | 0o666, device)
      for place in ("/workspace", "/tmp", "/dev", "/dev/shm", "/run") for kind in kinds for device in devices])
"""
    assert attacked(cell, program) == ["EPERM"] * 50


@pytest.mark.behaviour("security-13")
def test_the_devices_that_are_there_are_harmless_and_not_the_hosts_to_change(cell: Sandbox) -> None:
    names = ("null", "zero", "full", "random", "urandom", "tty")
    before = [os.stat(f"/dev/{name}") for name in names]
    # The mode that they have: were they the host's, only the time of the change would tell.
    program = """
import stat
found = [f"{d}/{n}" for d, _, names in os.walk("/dev") for n in names if not os.path.islink(f"{d}/{n}")]
nodes = sorted(p for p in found if stat.S_ISCHR(os.stat(p).st_mode) or stat.S_ISBLK(os.stat(p).st_mode))
for name in sys.argv[1:]:
    attempt(os.chmod, f"/dev/{name}", 0o666)
    attempt(os.chown, f"/dev/{name}", 0, 0)
    attempt(os.utime, f"/dev/{name}")
    attempt(os.setxattr, f"/dev/{name}", "user.x", b"x")
assert os.write(os.open("/dev/null", os.O_WRONLY), b"x") == 1
assert os.read(os.open("/dev/zero", os.O_RDONLY), 2) == bytes(2)
assert attempt(os.write, os.open("/dev/full", os.O_WRONLY), b"x") == "ENOSPC"
assert len(os.read(os.open("/dev/urandom", os.O_RDONLY), 8)) == 8
tell([nodes, attempt(os.open, "/dev/tty", os.O_RDWR), os.listdir("/dev/pts")])
"""
    nodes, terminal, terminals = attacked(cell, program, *names)
    assert nodes == sorted(["/dev/pts/ptmx", *(f"/dev/{name}" for name in names)])
    assert terminal == "ENXIO"
    assert terminals == ["ptmx"]
    after = [os.stat(f"/dev/{name}") for name in names]
    assert [(info.st_mode, info.st_ctime_ns) for info in after] == [(info.st_mode, info.st_ctime_ns) for info in before]


@pytest.mark.behaviour("security-14")
def test_no_control_group_is_within_reach(cell: Sandbox) -> None:
    program = """
import subprocess
kinds = {line.rsplit(" - ", 1)[1].split()[0] for line in open("/proc/self/mountinfo")}
mounted = [subprocess.run(["mount", "-t", kind, "none", "/mnt"], capture_output=True).returncode
           for kind in ("cgroup", "cgroup2", "proc", "sysfs", "tmpfs", "bpf", "debugfs")]
tell([sorted(kinds), mounted, attempt(os.mkdir, "/sys/fs/cgroup/x"),
      [path for path in ("/sys/fs/cgroup/release_agent", "/sys/fs/cgroup/cgroup.procs") if os.path.exists(path)]])
"""
    kinds, mounted, made, found = attacked(cell, program)
    assert not {"cgroup", "cgroup2"} & set(kinds)
    assert 0 not in mounted
    assert made in ("EROFS", "EPERM", "ENOENT", "EACCES")
    assert found == []
