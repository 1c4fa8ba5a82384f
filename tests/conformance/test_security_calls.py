"""Security: which system calls are refused, and that no way of making them gets past the filter."""

from __future__ import annotations

import json
import signal

import pytest
from tests.conformance.attack import X86, attacked, call_numbers, cells
from tests.conformance.inside import python

from worldfork import Sandbox

pytestmark = pytest.mark.timeout(240)
cell = cells()

REFUSED = (
    # mounts
    "mount", "umount2", "pivot_root", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount", "fspick",
    "mount_setattr",
    # namespaces
    "unshare", "setns",
    # the kernel itself
    "bpf", "perf_event_open", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module",
    "userfaultfd", "reboot", "swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "syslog", "iopl", "ioperm",
    "modify_ldt", "uselib", "ustat", "sysfs", "vhangup", "fanotify_init",
    # files by handle, keys, other processes' memory, the clock, the memory's place
    "open_by_handle_at", "add_key", "request_key", "keyctl", "process_vm_readv", "process_vm_writev", "kcmp",
    "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "move_pages", "migrate_pages", "mbind",
    "set_mempolicy", "set_mempolicy_home_node",
)  # fmt: skip
ABSENT = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")
NAMESPACES = {
    "mnt": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000, "pid": 0x20000000,
    "net": 0x40000000,
}  # fmt: skip


@pytest.mark.behaviour("security-5")
def test_each_dangerous_call_is_refused(cell: Sandbox) -> None:
    numbers = {**call_numbers(REFUSED), "open_tree_attr": 467}
    assert len(numbers) > 40
    program = "tell({name: call(number, 0, 0, 0, 0, 0, 0) for name, number in json.loads(sys.argv[1]).items()})"
    answers = attacked(cell, program, json.dumps(numbers))
    assert {name: answer for name, answer in answers.items() if answer != "EPERM"} == {}


@pytest.mark.behaviour("security-5")
def test_what_programs_can_do_without_does_not_exist(cell: Sandbox) -> None:
    # What a kernel newer than the filter adds is unknown, and so not there either.
    numbers = [*call_numbers(ABSENT).values(), 470, 471, 600, 1000, 0x3FFFFFFF]
    program = "tell([call(number, 0, 0, 0, 0, 0, 0) for number in json.loads(sys.argv[1])])"
    assert attacked(cell, program, json.dumps(numbers)) == ["ENOSYS"] * len(numbers)


@pytest.mark.behaviour("security-6")
def test_no_clone_makes_a_namespace(cell: Sandbox) -> None:
    number = call_numbers(("clone",))["clone"]
    flags = [*NAMESPACES.values(), sum(NAMESPACES.values())]
    # The kernel looks at the lower half of the word only.
    flags += [1 << 40 | flag for flag in flags]
    program = f"tell([call({number}, flag | 17, 0, 0, 0, 0) for flag in json.loads(sys.argv[1])])"
    assert attacked(cell, program, json.dumps(flags)) == ["EPERM"] * len(flags)
    # Threads and processes are still made.
    program = """
import subprocess, threading
threads = [threading.Thread(target=print) for _ in range(2)]
[t.start() for t in threads], [t.join() for t in threads]
assert subprocess.run(["true"]).returncode == 0 and os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1] == 0
"""
    python(cell, "import os\n" + program)


@pytest.mark.behaviour("security-7")
def test_limits_of_other_processes_are_out_of_reach(cell: Sandbox) -> None:
    number = call_numbers(("prlimit64",))["prlimit64"]
    program = f"""
import struct
others = [1, os.getppid(), 1 << 32 | 1, -1]
for new in (None, struct.pack("QQ", 0, 0)):
    for which in (0, 2, 7):  # CPU time, data, open files
        for pid in others:
            answer = call({number}, pid, which, ctypes.c_char_p(new), None)
            assert answer == "EPERM", (pid, which, answer)
old = ctypes.create_string_buffer(16)
tell([call({number}, 0, 7, None, old), struct.unpack("QQ", old.raw)[0] > 0])
"""
    assert attacked(cell, program) == ["done", True]


@pytest.mark.behaviour("security-8")
@X86
@pytest.mark.parametrize(
    "code",
    [
        pytest.param("b814000000cd80c3", id="int 0x80"),  # mov eax, 20 (getpid of i386); int 0x80; ret
        pytest.param("b8270000400f05c3", id="x32"),  # mov eax, 39 (getpid) | 1 << 30; syscall; ret
        pytest.param("b8150200400f05c3", id="x32 only"),  # 533, one of x32's own
    ],
)
def test_calls_of_other_kinds_end_the_process(cell: Sandbox, code: str) -> None:
    program = """
import ctypes, mmap, sys
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex(sys.argv[1]))
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print("lived")
"""
    result = cell.run("python", ["-c", program, code])
    assert (result.stdout, result.signal) == ("", signal.SIGSYS)


@pytest.mark.behaviour("security-8")
@X86
def test_a_program_of_32_bits_ends_at_its_first_call(cell: Sandbox) -> None:
    # The smallest ELF of i386: mov eax, 1; xor ebx, ebx; int 0x80, which is exit(0).
    header = "7f454c4601010100000000000000000002000300010000005480040834000000000000000000000034002000010000000000"
    segment = "0000" + "0100000000000000008004080080040860000000600000000500000000100000"
    code = "b80100000031dbcd80000000"
    cell.write_file("/workspace/small", bytes.fromhex(header + segment + code), mode=0o755)
    result = cell.run("/workspace/small")
    # A kernel without 32-bit programs does not even start it.
    assert result.signal == signal.SIGSYS or result.exit_code == 126


@pytest.mark.behaviour("security-9")
def test_nothing_types_into_a_terminal(cell: Sandbox) -> None:
    number = call_numbers(("ioctl",))["ioctl"]
    program = f"""
import pty
master, slave = pty.openpty()
letter = ctypes.c_char_p(b"x")
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
tell([call({number}, slave, command | high, letter) for command in (TIOCSTI, TIOCLINUX) for high in (0, 1 << 32)]
     + [os.isatty(slave)])
"""
    assert attacked(cell, program) == ["EPERM"] * 4 + [True]


@pytest.mark.behaviour("security-10")
def test_few_families_of_sockets_exist(cell: Sandbox) -> None:
    numbers = call_numbers(("socket", "socketpair"))
    program = f"""
pair = ctypes.create_string_buffer(8)
answers = {{}}
for family in range(1, 64):
    for kind in (1, 2, 3, 5):
        made = call({numbers["socket"]}, family, kind, 0), call({numbers["socketpair"]}, family, kind, 0, pair)
        answers.setdefault(family, set()).update(made)
tell({{family: sorted(found) for family, found in answers.items()}})
"""
    answers = {int(family): found for family, found in attacked(cell, program).items()}
    unix, inet, inet6, netlink, packet, vsock = 1, 2, 10, 16, 17, 40
    assert answers.pop(vsock) == ["EPERM"]
    assert "done" in answers.pop(unix)
    assert "done" in answers.pop(inet)
    for family in (inet6, netlink, packet):
        answers.pop(family)
    assert {family: found for family, found in answers.items() if found != ["EAFNOSUPPORT"]} == {}


@pytest.mark.behaviour("security-10")
def test_address_randomisation_stays_on(cell: Sandbox) -> None:
    number = call_numbers(("personality",))["personality"]
    program = f"tell([call({number}, p) for p in (0x0040000, 0x0400000, 0x4000000, 0xFFFFFFFF, 0)])"
    assert attacked(cell, program) == ["EPERM", "EPERM", "EPERM", "done", "done"]


@pytest.mark.behaviour("security-5")
def test_a_filter_of_ones_own_loosens_nothing(cell: Sandbox) -> None:
    numbers = call_numbers(("seccomp", "unshare"))
    program = f"""
import struct
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))  # return ALLOW
allow = Program(1, ctypes.addressof(code))
tell([call({numbers["seccomp"]}, 1, 0, ctypes.byref(allow)), call({numbers["unshare"]}, 0)])
"""
    assert attacked(cell, program) == ["done", "EPERM"]


@pytest.mark.behaviour("security-5")
def test_no_lease_makes_the_host_wait(cell: Sandbox) -> None:
    program = """
import fcntl
with open("/workspace/mine", "w"):
    pass
files = [open(path, "rb") for path in ("/workspace/mine", "/usr/bin/env")]
tell([attempt(fcntl.fcntl, file, fcntl.F_SETLEASE, kind) for file in files for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK)]
     + [attempt(fcntl.fcntl, files[0], fcntl.F_GETFD)])
"""
    assert attacked(cell, program) == ["EPERM"] * 4 + [1]
