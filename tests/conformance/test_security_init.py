"""Security: PID 1 and the supervisors of commands, attacked from inside by the same user id."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.conformance.attack import (
    INIT,
    TRY,
    Factory,
    attacked,
    call_numbers,
    cells,
    facts,
    pids_inside,
    prisons,
)
from tests.conformance.conftest import Pace
from tests.conformance.inside import processes, shell, wait_for

from worldfork import CommandExitReason, Sandbox

pytestmark = pytest.mark.timeout(240)
cell = cells()
prison = prisons()

CLOSED_FILES = (
    "mem", "environ", "maps", "smaps", "numa_maps", "auxv", "stack", "syscall", "io", "pagemap", "personality",
    "timers", "patch_state", "fdinfo", "root", "cwd", "exe", "ns/mnt", "ns/user", "ns/pid", "ns/net", "map_files",
)  # fmt: skip
SAYS_NOTHING = {"patch_state": b"-1\n".hex(), "timers": ""}
"""Where a kernel has these files anybody's may be read: that it is not being patched, and its timers, of which it has
none."""


@pytest.mark.behaviour("security-15")
def test_nothing_of_init_and_supervisors_can_be_read(cell: Sandbox) -> None:
    program = """
def read(path):
    if os.path.isdir(path):
        return os.listdir(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    return os.read(fd, 4096).hex()
got = {}
for pid in (1, *supervisors):
    for name in sys.argv[1:]:
        path = f"/proc/{pid}/{name}"
        if os.path.lexists(path):
            got[path] = [attempt(read, path), attempt(os.readlink, path)]
    for fd in range(64):
        path = f"/proc/{pid}/fd/{fd}"
        got[path] = [attempt(os.open, path, os.O_RDONLY), attempt(os.readlink, path)]
tell([len(supervisors), got])
"""
    supervisors, got = attacked(cell, program, *CLOSED_FILES)
    assert supervisors >= 1
    assert len(got) > 150
    # Names of descriptors may be listed; what they are may not be told.
    loose = {}
    for path, answers in got.items():
        closed = {"EACCES", "EPERM", "ENOENT", "EINVAL", SAYS_NOTHING.get(path.rpartition("/")[2], "EPERM")}
        wrong = [a for a in answers if a not in closed and not (isinstance(a, list) and "fd" in path and not a)]
        if wrong:
            loose[path] = wrong
    assert loose == {}


@pytest.mark.behaviour("security-15")
def test_init_and_supervisors_cannot_be_traced(cell: Sandbox) -> None:
    numbers = call_numbers(("ptrace", "process_vm_readv", "kcmp"))
    program = f"""
ATTACH, SEIZE, PIDFD_OPEN, PIDFD_GETFD = 16, 0x4206, 434, 438
answers = []
for pid in (1, *supervisors):
    answers += [call({numbers["ptrace"]}, request, pid, 0, 0) for request in (ATTACH, SEIZE)]
    pidfd = os.pidfd_open(pid)
    answers += [call(PIDFD_GETFD, pidfd, fd, 0) for fd in range(16)]
# Against a process of one's own it works, so that debuggers do.
child = os.fork()
if child == 0:
    import signal
    signal.pause()
own = call({numbers["ptrace"]}, SEIZE, child, 0, 0)
os.kill(child, 9)
tell([sorted(set(answers)), own])
"""
    answers, own = attacked(cell, program)
    assert answers == ["EPERM"]
    assert own == "done"


@pytest.mark.behaviour("security-15")
def test_there_is_no_moment_at_which_a_supervisor_can_be_read(cell: Sandbox) -> None:
    # Opening its memory asks for the same right as tracing it, and holds nobody up.
    program = """
opened, seen, mine = [], set(), os.getpid()
os.close(os.open("/tmp/hunting", os.O_CREAT | os.O_WRONLY))
while not os.path.exists("/tmp/enough"):
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) > mine]:
        while is_ours(pid) and not os.path.exists("/tmp/enough"):
            seen.add(pid)
            memory = attempt(os.open, f"/proc/{pid}/mem", os.O_RDONLY)
            if isinstance(memory, int):
                os.close(memory)
                if is_ours(pid):  # not yet the command, after its exec
                    opened.append(pid)
                    break
with open("/tmp/told.new", "w") as told:
    json.dump([len(seen), opened], told)
os.rename("/tmp/told.new", "/tmp/told")
"""
    cell.start_process("python", ["-c", TRY + program])
    wait_for(cell, "/tmp/hunting")
    for _ in range(60):
        cell.run("true", timeout=20)
    cell.write_file("/tmp/enough", b"")
    wait_for(cell, "/tmp/told")
    seen, opened = json.loads(cell.read_file("/tmp/told"))
    shell(cell, "rm /tmp/hunting /tmp/enough /tmp/told")
    assert seen > 20
    assert opened == []


SIGNALS = """
import signal, time
numbers = [n for n in range(1, 65) if n not in (32, 33)]
for number in numbers:
    for send in (lambda: os.kill(1, number), lambda: signal.pidfd_send_signal(os.pidfd_open(1), number)):
        attempt(send)
tell("sent")
"""


@pytest.mark.behaviour("security-16")
def test_no_signal_ends_or_stops_init(cell: Sandbox) -> None:
    assert attacked(cell, SIGNALS) == "sent"
    numbers = call_numbers(("tgkill", "rt_sigqueueinfo"))
    program = f"""
import struct
info = ctypes.c_char_p(struct.pack("3i", 9, 0, -1) + bytes(116))
for number in (9, 19, 11, 15):
    call({numbers["tgkill"]}, 1, 1, number)
    call({numbers["rt_sigqueueinfo"]}, 1, number, info)
tell("sent")
"""
    assert attacked(cell, program) == "sent"
    assert cell.run("echo", ["on"], timeout=10).stdout == "on\n"
    assert cell.run("sleep", ["60"], timeout=0.3).reason is CommandExitReason.TIMED_OUT


@pytest.mark.behaviour("security-16")
def test_what_can_be_written_to_init_s_files_does_not_hurt_others(prison: Factory) -> None:
    box = prison()
    program = """
written = []
for name in os.listdir("/proc/1"):
    for data in (b"1000", b"-1000", b"0 0 1", b"1", b"x" * 4096):
        fd = attempt(os.open, f"/proc/1/{name}", os.O_WRONLY | os.O_NONBLOCK)
        if isinstance(fd, int):
            if isinstance(attempt(os.write, fd, data), int):
                written.append(name)
            os.close(fd)
import resource
attempt(os.setpriority, os.PRIO_PROCESS, 1, 19)
attempt(os.sched_setaffinity, 1, {min(os.sched_getaffinity(0))})
tell(sorted(set(written)))
"""
    harmless = {
        "oom_score_adj",
        "oom_adj",
        "coredump_filter",
        "clear_refs",
        "sched",
        "autogroup",
        "comm",
        "seccomp_cache",
        "projid_map",
    }
    assert set(attacked(box, program)) <= harmless
    assert box.run("echo", ["on"], timeout=20).stdout == "on\n"
    assert box.run("sleep", ["60"], timeout=0.3).reason is CommandExitReason.TIMED_OUT


@pytest.mark.behaviour("security-17")
def test_a_command_that_kills_its_supervisor_dies_with_it(prison: Factory) -> None:
    box = prison()
    result = box.run("sh", ["-c", "(setsid sleep 1000 &) ; echo begun; kill -9 $PPID; sleep 1000"], timeout=20)
    assert (result.reason, result.stdout) == (CommandExitReason.SIGNALED, "begun\n")
    shell(box, "until [ $(ls /proc | grep -c '^[0-9]') -le 6 ]; do sleep 0.01; done", timeout=20)
    assert processes(box) == 0


@pytest.mark.behaviour("security-17")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV])
def test_no_signal_to_a_supervisor_outlives_a_time_limit(cell: Sandbox, number: int, pace: Pace) -> None:
    line = f"echo begun; kill -{int(number)} $PPID; while :; do kill -{int(number)} $PPID; sleep 0.01; done"
    result = cell.run("sh", ["-c", line], timeout=pace.seconds(0.5))
    assert result.reason in (CommandExitReason.TIMED_OUT, CommandExitReason.SIGNALED)
    assert result.stdout == "begun\n"
    assert processes(cell) == 0


@pytest.mark.behaviour("security-17")
def test_killing_everything_at_once_leaves_a_sandbox_that_answers(cell: Sandbox) -> None:
    for number in (9, 19):
        result = cell.run("python", ["-c", f"import os\nwhile True: os.kill(-1, {number})"], timeout=0.5)
        assert result.reason in (CommandExitReason.TIMED_OUT, CommandExitReason.SIGNALED)
    assert cell.run("echo", ["on"], timeout=20).stdout == "on\n"
    assert processes(cell) == 0


@pytest.mark.behaviour("security-18")
def test_no_way_of_forking_leaves_the_limits_of_the_sandbox(prison: Factory) -> None:
    box = prison()
    if not facts(box).cgroups:
        pytest.skip("a capability that this driver has not got here: limits")
    program = """
import time
CLONE_PARENT = 0x8000
def linger():
    time.sleep(1000)
    os._exit(0)
if call(CLONE, CLONE_PARENT | 17, 0, 0, 0, 0) == "done" and os.getpid() != ME:
    linger()
for session in (False, True):
    if os.fork() == 0:
        if session:
            os.setsid()
        if os.fork() == 0:
            linger()
        os._exit(0)
    os.wait()
os.close(os.open("/tmp/all", os.O_CREAT | os.O_WRONLY))
linger()
"""
    clone = call_numbers(("clone",))["clone"]
    box.start_process("python", ["-c", f"{TRY}CLONE, ME = {clone}, os.getpid()\n{program}"])
    wait_for(box, "/tmp/all")
    inside = pids_inside(box)
    strangers = {pid for pid, line in inside.items() if line != INIT}
    assert len(strangers) >= 4
    for directory in facts(box).cgroups:
        members = {int(line) for line in Path(directory, "cgroup.procs").read_text().split()}
        assert strangers <= members, directory
        # PID 1 and the supervisors stand beside, so that a command's limit does not strike them.
        assert not (inside.keys() - strangers) & members


@pytest.mark.behaviour("security-18")
def test_the_socket_of_init_cannot_be_reached_from_inside(cell: Sandbox) -> None:
    program = """
import socket
listed = [line.split() for line in open("/proc/net/unix").read().splitlines()[1:]]
paths = [fields[7] for fields in listed if len(fields) > 7]
answers = []
for path in ("sock", "/sock", "/run/sock", "/dev/.worldfork/sock", "\\0sock", "/proc/1/root/sock", "/proc/1/cwd/sock"):
    answers.append(attempt(socket.socket(socket.AF_UNIX).connect, path))
tell([paths, answers, [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)],
      [fd for fd in range(3, 256) if os.path.exists(f"/proc/self/fd/{fd}")]])
"""
    paths, answers, descriptors, others = attacked(cell, program)
    # It may be listed, by the name that it has in a directory of the host.
    assert set(paths) <= {"sock"}
    assert None not in answers
    assert descriptors[0] == "/dev/null"
    assert all(target.startswith("pipe:") for target in descriptors[1:])
    # The ten or so that this program opened itself are gone again.
    assert others == []
