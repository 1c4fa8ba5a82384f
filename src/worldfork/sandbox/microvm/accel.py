"""What runs the guest's instructions here: KVM where a guest really booted with it, or else QEMU itself by consent."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from worldfork.core.clock import boot_id
from worldfork.core.errors import DriverUnavailable
from worldfork.core.whole_file import whole_file
from worldfork.sandbox.microvm.guest_image import GuestImage
from worldfork.sandbox.microvm.machine import QEMU, TCG_CPU, Accel, Boot, Machine
from worldfork.sandbox.microvm.ram import new_ram
from worldfork.sandbox.microvm.wire import HEADER, Kind
from worldfork.sandbox.namespace import natural_form

ALLOW_TCG = "WORLDFORK_ALLOW_TCG"
QEMU_REMEDY = "sudo apt-get install --no-install-recommends qemu-system-x86"
OLDEST_QEMU = (7, 2)

_TRIAL_S = 10.0
_TRIAL_MIB = 128
_VERSION_S = 20.0
_VERSION = re.compile(r"version (\d+)\.(\d+)(?:\.(\d+))?")
_GREETING = HEADER.pack(4, Kind.RESET, 0) + (1).to_bytes(4, "little")
_CACHE = "accel.json"
_WORDS = 300
_ANYBODY, _GROUP = 0o006, 0o060


@dataclass(frozen=True)
class Qemu:
    """The QEMU of this machine."""

    program: str
    version: str
    """As `7.2.22`; a saved machine continues only under the same."""


@dataclass(frozen=True)
class Trial:
    """Whether a guest booted under KVM, and where that was seen."""

    boot_id: str
    kernel: str
    qemu: str
    booted: bool
    reason: str


@dataclass(frozen=True)
class Decision:
    """How guests run on this machine."""

    accel: Accel
    isolation: str
    """For the facts of a sandbox: "kvm", or "none (tcg)": QEMU says itself that TCG is no security boundary."""
    reason: str
    """What was seen."""


def find_qemu(program: str = QEMU) -> Qemu:
    """Return the QEMU of this machine. Blocking, for some 20 ms.

    Raises:
        DriverUnavailable: there is none, or it is too old.
    """
    path = shutil.which(program)
    if path is None:
        raise DriverUnavailable(f"this machine has no {program}", remedy=QEMU_REMEDY, lacks=program)
    try:
        done = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_VERSION_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DriverUnavailable(f"{path} does not start: {error}", remedy=QEMU_REMEDY, lacks=program) from error
    found = _VERSION.search(done.stdout.decode(errors="replace"))
    if done.returncode or found is None:
        raise DriverUnavailable(f"{path} does not tell its version", remedy=QEMU_REMEDY, lacks=program)
    major, minor, patch = (int(part or 0) for part in found.groups())
    version = f"{major}.{minor}.{patch}"
    if (major, minor) < OLDEST_QEMU:
        raise DriverUnavailable(f"QEMU {version} is too old; 7.2 is the oldest", remedy=QEMU_REMEDY, lacks=program)
    return Qemu(path, version)


def cpu_mark(accel: Accel, cpuinfo: str) -> str:
    """Return what a saved machine must find again: TCG's processor is QEMU's own, that of KVM is the host's."""
    if accel == "tcg":
        return f"qemu {TCG_CPU}"
    words: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        words.setdefault(name.strip(), value.strip())
    return " ".join(words.get(name, "?") for name in ("model name", "cpu family", "model", "stepping", "microcode"))


def decide(
    images: Path,
    qemu: Qemu,
    *,
    allow_tcg: bool,
    attempt: Callable[[], str],
    force_tcg: bool = False,
    device: Path = Path("/dev/kvm"),
) -> Decision:
    """Return how guests run here. Blocking, up to 10 s where KVM is tried for the first time since the machine started.

    Args:
        images: where the outcome is kept: it holds for one start of the machine, one kernel and one QEMU.
        qemu: from `find_qemu`.
        allow_tcg: the caller's consent to guests that QEMU's own policy calls no security boundary.
        attempt: boots a guest under KVM and returns why it failed, or nothing: `boot_under_kvm`.
        force_tcg: do not try KVM; for tests.
        device: of KVM.

    Raises:
        DriverUnavailable: no guest boots under KVM, and TCG is not allowed.
    """
    if force_tcg:
        trial = _trial(qemu, "KVM was not wanted")
    elif not os.access(device, os.R_OK | os.W_OK):
        trial = _trial(qemu, f"{device} is not there or not open to this user")
    elif natural_form() == "trusted" and kvm_group(device) == 0:
        trial = _trial(qemu, f"{device} is open to root alone, and no machine runs as root: give it to a group kvm")
    else:
        trial = _cached(images, qemu) or _keep(images, _trial(qemu, attempt()))
    if trial.booted:
        return Decision("kvm", "kvm", "a guest booted under KVM")
    if not allow_tcg:
        raise DriverUnavailable(
            f"no virtual machine runs under KVM here: {trial.reason}",
            remedy=f"use a machine with KVM, or the namespace driver, or set {ALLOW_TCG}=1 "
            "for guests that QEMU interprets, which are slow and no security boundary",
            reason=trial.reason,
        )
    return Decision("tcg", "none (tcg)", trial.reason)


def kvm_group(device: Path = Path("/dev/kvm")) -> int | None:
    """Return the group that a user of no other rights needs for KVM: None for none, 0 where it takes root."""
    try:
        info = os.stat(device)
    except OSError:
        return None
    if info.st_mode & _ANYBODY == _ANYBODY:
        return None
    return info.st_gid if info.st_mode & _GROUP == _GROUP else 0


def boot_under_kvm(qemu: Qemu, image: GuestImage, limit_s: float = _TRIAL_S) -> str:
    """Boot a guest under KVM until its init answers, and end it; return why it failed, or nothing. Blocking."""
    timeout = shutil.which("timeout")
    if timeout is None:
        return "there is no timeout(1) to end a trial with"
    mine, agent = socket.socketpair()
    with mine, agent, socket.socket(socket.AF_UNIX) as orders:
        orders.bind("")  # a name that the kernel makes up: nobody is to give orders
        orders.listen(1)
        try:
            # Ends the guest even where this process is killed meanwhile.
            process = _start_trial([timeout, "-k", "1", str(limit_s + 2)], qemu, image, orders.fileno(), agent.fileno())
        except OSError as error:
            return f"QEMU could not be started: {error.strerror}"
        agent.close()
        mine.settimeout(limit_s)
        try:
            # Init says nothing unasked. QEMU takes it from the socket once init has opened its port.
            mine.sendall(_GREETING)
            if mine.recv(1):
                return ""
            reason = "QEMU ended"
        except TimeoutError:
            # What it says after that is only that it was ended.
            return f"a guest did not boot within {limit_s:g} s"
        except OSError as error:
            reason = f"QEMU ended: {error.strerror}"
        finally:
            process.terminate()
            words = process.communicate()[1].decode(errors="replace").strip()
    return f"{reason}: {words.rpartition(chr(10))[2][:_WORDS]}" if words else reason


def _start_trial(
    before: list[str], qemu: Qemu, image: GuestImage, orders_fd: int, agent_fd: int
) -> subprocess.Popen[bytes]:
    ram = new_ram(_TRIAL_MIB << 20)
    try:
        machine = Machine(
            accel="kvm",
            memory_mib=_TRIAL_MIB,
            vcpus=1,
            ram_fd=ram,
            share_ram=True,
            qmp_fd=orders_fd,
            agent_fd=agent_fd,
            start=Boot(str(image.kernel), str(image.initrd)),
            program=qemu.program,
        )
        return subprocess.Popen(
            [*before, *machine.arguments()],
            pass_fds=machine.descriptors(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    finally:
        os.close(ram)


def _trial(qemu: Qemu, failure: str) -> Trial:
    return Trial(boot_id(), platform.release(), qemu.version, not failure, failure)


def _cached(images: Path, qemu: Qemu) -> Trial | None:
    try:
        known = Trial(**json.loads((images / _CACHE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    here = (boot_id(), platform.release(), qemu.version)
    if (known.boot_id, known.kernel, known.qemu) != here or not isinstance(known.booted, bool):
        return None
    return known


def _keep(images: Path, trial: Trial) -> Trial:
    # Without a place for it the trial is made again, which is slow and not wrong.
    with contextlib.suppress(OSError):
        images.mkdir(parents=True, exist_ok=True)
        with whole_file(images / _CACHE) as part:
            part.write_text(json.dumps(asdict(trial)), encoding="utf-8")
    return trial
