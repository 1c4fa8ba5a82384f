"""Security: what a process inside may not be. Capabilities, set-id programs, users, limits of its own."""

from __future__ import annotations

import pytest
from tests.conformance.attack import Factory, attacked, cells, facts, prisons
from tests.conformance.inside import shell

from worldfork import Sandbox, SandboxError

pytestmark = pytest.mark.timeout(240)
cell = cells()
prison = prisons()

NAMES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)  # fmt: skip
"""Capabilities by number, as capabilities(7) counts them."""
GRANTED = {
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "SETFCAP", "SYS_CHROOT",
    "NET_BIND_SERVICE", "NET_RAW",
}  # fmt: skip
READ_SETS = """
def sets(pid):
    lines = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    return {key: int(value, 16) for key, value in lines.items() if key.startswith("Cap")}
tell([sets(pid) for pid in ("self", 1, *supervisors)])
"""


def held(bits: int) -> set[str]:
    return {NAMES[n] if n < len(NAMES) else f"number {n}" for n in range(64) if bits >> n & 1}


def has_others(box: Sandbox) -> bool:
    """Whether users besides root exist inside."""
    return facts(box).form == "trusted" or bool(facts(box).ids)


@pytest.mark.behaviour("security-1")
def test_every_capability_but_a_few_is_gone_for_good(cell: Sandbox) -> None:
    found = attacked(cell, READ_SETS)
    assert len(found) >= 3  # the command, PID 1 and at least its own supervisor
    for sets in found:
        for kind in ("CapPrm", "CapEff", "CapBnd"):
            assert held(sets[kind]) <= GRANTED, kind
        assert (sets["CapInh"], sets["CapAmb"]) == (0, 0)


@pytest.mark.behaviour("security-1")
def test_on_the_hosts_network_nobody_reads_its_traffic(prison: Factory) -> None:
    box = prison(network="host")
    for sets in attacked(box, READ_SETS):
        assert "NET_RAW" not in held(sets["CapBnd"] | sets["CapPrm"])
    program = (
        "import socket\n"
        "tell([attempt(socket.socket, *kind) for kind in ("
        "(socket.AF_PACKET, socket.SOCK_RAW, 0x300), (socket.AF_INET, socket.SOCK_RAW, 1))])"
    )
    assert attacked(box, program) == ["EPERM", "EPERM"]


@pytest.mark.behaviour("security-1")
def test_no_call_brings_a_capability_back(cell: Sandbox) -> None:
    program = """
import struct
PR_CAPBSET_READ, PR_CAP_AMBIENT, RAISE, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 23, 47, 2, 28, 38
SYS_ADMIN, CHOWN = 21, 0
def prctl(*arguments):
    ctypes.set_errno(0)
    answer = libc.prctl(*(ctypes.c_ulong(a) for a in arguments))
    return answer if answer >= 0 else errno.errorcode[ctypes.get_errno()]
header = struct.pack("Ii", 0x20080522, 0)
every = struct.pack("6I", *[0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0x1FF, 0x1FF, 0x1FF])
ctypes.set_errno(0)
raised = libc.capset(header, every), errno.errorcode.get(ctypes.get_errno())
tell([raised, prctl(PR_CAPBSET_READ, SYS_ADMIN), prctl(PR_CAP_AMBIENT, RAISE, SYS_ADMIN, 0, 0),
      prctl(PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0)])
"""
    assert attacked(cell, program) == [[-1, "EPERM"], 0, "EPERM", "EINVAL"]


@pytest.mark.behaviour("security-2")
def test_no_new_privileges_and_a_filter_are_on_everywhere(cell: Sandbox) -> None:
    program = """
def states(pid):
    lines = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    return [int(lines[key]) for key in ("NoNewPrivs", "Seccomp")]
tell([states(pid) for pid in ("self", 1, *supervisors)])
"""
    found = attacked(cell, program)
    assert found == [[1, 2]] * len(found)
    assert len(found) >= 3


@pytest.mark.behaviour("security-2")
def test_set_id_programs_give_nothing(prison: Factory) -> None:
    box = prison()
    shell(box, "cp /usr/bin/env /opt/tool; chmod 6755 /opt/tool; test -u /opt/tool -a -g /opt/tool")
    line = "grep -E '^(Uid|Gid|CapEff)' /proc/self/status"
    if has_others(box):
        words = shell(box, f'/opt/tool sh -c "{line}"', user="1234:1234").split()
        assert words == ["Uid:", *["1234"] * 4, "Gid:", *["1234"] * 4, "CapEff:", "0" * 16]
    else:
        # One id is all there is, so that nobody has anything to gain.
        with pytest.raises(SandboxError, match="single user id"):
            box.run("true", user="1234:1234")


@pytest.mark.behaviour("security-2")
def test_file_capabilities_give_nothing(prison: Factory) -> None:
    box = prison()
    if not has_others(box):
        pytest.skip("a capability that this form has not got: other_users")
    shell(box, "cp /usr/bin/cat /opt/cat; echo secret > /opt/secret; chmod 600 /opt/secret")
    # Revision 2 of the attribute, effective: CAP_DAC_OVERRIDE.
    value = (0x02000001).to_bytes(4, "little") + (1 << 1).to_bytes(4, "little") + bytes(12)
    assert attacked(
        box,
        "os.setxattr('/opt/cat', 'security.capability', bytes.fromhex(sys.argv[1]))\n"
        "tell(os.getxattr('/opt/cat', 'security.capability').hex())",
        value.hex(),
    ) == value.hex()  # fmt: skip
    assert "Permission denied" in box.run("/opt/cat", ["/opt/secret"], user="1234").stderr
    assert shell(box, "/opt/cat /proc/self/status | grep CapEff", user="1234").split()[1] == "0" * 16


@pytest.mark.behaviour("security-3")
def test_an_ordinary_user_inside_has_no_capability(prison: Factory) -> None:
    box = prison()
    if not has_others(box):
        pytest.skip("a capability that this form has not got: other_users")
    words = shell(box, "grep -E '^Cap(Prm|Eff|Inh|Amb)' /proc/self/status", user="1234").split()
    assert words[1::2] == ["0" * 16] * 4
    groups = shell(box, "grep ^Groups /proc/self/status", user="1234:1234").split()[1:]
    assert groups == ["1234"]


@pytest.mark.behaviour("security-4")
def test_no_limit_and_no_priority_can_be_raised(cell: Sandbox) -> None:
    program = """
import resource
def raise_limit(which):
    hard = resource.getrlimit(which)[1]
    if hard == resource.RLIM_INFINITY:
        hard = 1 << 40
        resource.setrlimit(which, (hard, hard))
    try:
        resource.setrlimit(which, (hard, hard + 1))
    except (OSError, ValueError):
        return "refused"
    return "raised"
def write(path, data):
    return os.write(os.open(path, os.O_WRONLY), data)
limits = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_MEMLOCK)
answers = [raise_limit(which) for which in limits]
answers.append(attempt(os.setpriority, os.PRIO_PROCESS, 0, -5))
answers.append(attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(10)))
answers.append(attempt(write, "/proc/self/oom_score_adj", b"-1"))
tell(answers)
"""
    answers = attacked(cell, program)
    assert answers[:4] == ["refused"] * 4
    assert set(answers[4:]) <= {"EPERM", "EACCES"}


@pytest.mark.behaviour("security-4")
def test_commands_are_likelier_victims_than_their_init(cell: Sandbox) -> None:
    program = """
own = int(open("/proc/self/oom_score_adj").read())
others = [int(open(f"/proc/{pid}/oom_score_adj").read()) for pid in (1, *supervisors)]
fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
for score in (-1000, min(others) - 1, min(others)):
    attempt(os.write, fd, str(score).encode())
tell([own, max(others), int(open("/proc/self/oom_score_adj").read()) - min(others)])
"""
    own, others, lowest = attacked(cell, program)
    assert own == 500
    assert others < own
    assert lowest >= 0
