"""The command line of a virtual machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from worldfork.core.errors import ConfigError

QEMU = "qemu-system-x86_64"
DEVICES_LIMIT = 24
"""virtio devices that the `microvm` machine has places for."""
AGENT_PORT = "agent.0"
"""The name of the port through which the host talks to the guest's init."""
CARD_ADDRESS = "52:54:00:12:34:56"
"""Of the one card on a guest's own network."""
TCG_CPU = "max,-erms,-fsrm"
"""What QEMU's interpreter shows as a processor: all that it knows, but what makes kernels copy by `rep movsb`, which it
carries out a byte at a time: that takes twice the time."""
TCG_CACHE_MIB = 64
"""What QEMU may use for translated code; its default is an eighth of the host's memory."""

Board = Literal["microvm", "q35"]
Accel = Literal["kvm", "tcg"]
SavedBy = Literal["devices", "migration"]
Network = Literal["none", "host", "cut"]
"""What is behind a guest's network card: nothing; QEMU's own network, over that of this user; or that one with no way
out: for a guest that was saved with a back end, whose state QEMU must find a place for."""

_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_QUIET = (
    "quiet",
    "panic=-1",
    "no_timer_check",
    "nokaslr",
    "cryptomgr.notests",
    "random.trust_cpu=on",
    "rcupdate.rcu_expedited=1",
    "i8042.noaux",
    "8250.nr_uarts=0",
    # What counts, watches and groups for people who look at a machine takes time of each fork, and nobody looks here.
    "audit=0",
    "noautogroup",
    "nowatchdog",
    "psi=0",
    "numa_balancing=disable",
    "rcupdate.rcu_cpu_stall_suppress=1",
    # A guest's groups limit memory, processors and processes; the others would be asked at every start and end of one.
    "cgroup_disable=io,cpuset,perf_event,hugetlb,rdma,misc,net_cls,net_prio,cpuacct,devices",
    # A sandbox has walls of its own; of the others programs may use these.
    "lsm=landlock,yama",
    # Of a large page all would be a fork's own as soon as it writes a byte.
    "transparent_hugepage=madvise",
    # A restored machine answers no other kind of restart: a panic would hang in it for ever.
    "reboot=t",
)
# What hardens a kernel takes a third of its time here, and QEMU's interpreter is no wall anyway.
_FOR_TCG = (
    "tsc=reliable",
    "nopti",
    "mitigations=off",
    "init_on_alloc=0",
    "hardened_usercopy=off",
    "randomize_kstack_offset=off",
    # What runs again runs at the same addresses, where the interpreter has translated it already.
    "norandmaps",
)
# Address space randomisation costs nothing where the processor runs the guest itself.
_NOT_FOR_KVM = frozenset({"nokaslr"})


@dataclass(frozen=True)
class Disk:
    """One disk of a guest, as a descriptor of QEMU's or a path that it may open."""

    fd: int = -1
    """Of an image file, opened for writing unless `read_only`; or -1."""
    path: str = ""
    format: Literal["raw", "qcow2"] = "raw"
    read_only: bool = True
    backing: Disk | None = None
    """What a qcow2 file shows below its own data. None: what it says itself, which QEMU finds where it got a path; a
    disk given by descriptor has all that is below it given too."""


@dataclass(frozen=True)
class Boot:
    """A machine that starts its kernel."""

    kernel: str
    """Path of an ELF file."""
    initrd: str
    parameters: tuple[str, ...] = ()
    """Of the kernel, after those that every guest has."""
    tsc_khz: int = 0
    """Speed of the host's counter, for TCG: without it a guest hangs at times while it measures its clocks."""


@dataclass(frozen=True)
class Restore:
    """A machine that continues from a saved one."""

    saved_by: SavedBy
    """"devices": `xen-save-devices-state`; it runs by itself. "migration": with `x-ignore-shared`; it waits for
    orders: `migrate-set-capabilities`, `migrate-incoming` from `state_fd`, `cont`."""
    state_fd: int
    """The file with the state of its devices."""
    waits: bool = False
    """Whether it waits for the order `migrate-incoming` also where it was saved by devices."""


@dataclass(frozen=True)
class Machine:
    """Everything that decides how one QEMU is started."""

    accel: Accel
    memory_mib: int
    vcpus: int
    ram_fd: int
    """A file of `memory_mib`, which QEMU opens once more through /proc/self/fd."""
    share_ram: bool
    """Whether what the guest writes goes into that file: for a template; never for a fork."""
    qmp_fd: int
    """A listening socket."""
    agent_fd: int
    """One end of a connection to the guest's init."""
    start: Boot | Restore
    disks: tuple[Disk, ...] = ()
    network: Network = "none"
    board: Board = "microvm"
    program: str = QEMU

    def descriptors(self) -> tuple[int, ...]:
        """Return what QEMU must inherit, under the same numbers."""
        found = {self.ram_fd, self.qmp_fd, self.agent_fd}
        if isinstance(self.start, Restore):
            found.add(self.start.state_fd)
        for disk in self.disks:
            found.update(node.fd for node in _chain(disk) if node.fd >= 0)
        return tuple(sorted(found))

    def arguments(self) -> list[str]:
        """Return the program and its arguments.

        Raises:
            ConfigError: such a machine cannot be.
        """
        self._check()
        return [
            self.program,
            # A configuration file or a default device of the host would change the machine.
            *("-no-user-config", "-nodefaults", "-display", "none", "-no-reboot", "-nic", "none"),
            *("-sandbox", _SANDBOX),
            *self._processor(),
            *("-M", self._board()),
            # A state of devices alone has no section with the machine's configuration, so none has, whoever saves it.
            *("-global", "migration.send-configuration=off"),
            *("-m", f"{self.memory_mib}M", "-object", self._ram()),
            *("-chardev", f"socket,id=qmp,fd={self.qmp_fd},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
            *("-chardev", f"socket,id=agent,fd={self.agent_fd}"),
            *("-device", self._device("virtio-serial", "id=serial")),
            *("-device", f"virtserialport,bus=serial.0,chardev=agent,name={AGENT_PORT},nr=1"),
            *(word for number, disk in enumerate(self.disks) for word in self._disk(number, disk)),
            *self._card(),
            *self._start(),
        ]

    def _check(self) -> None:
        if self.memory_mib < 64 or self.vcpus < 1:
            raise ConfigError(
                f"a virtual machine of {self.memory_mib} MiB and {self.vcpus} processors cannot start",
                remedy="give at least 64 MiB and one processor",
            )
        if len(self.disks) + 2 > DEVICES_LIMIT:
            raise ConfigError(f"a virtual machine takes at most {DEVICES_LIMIT - 2} disks")
        if self.share_ram and isinstance(self.start, Restore) and self.start.saved_by == "devices":
            raise ConfigError("a fork that shares its RAM file would alter the snapshot")

    def _processor(self) -> list[str]:
        # A KVM guest sees the host's processor, which its snapshots name.
        if self.accel == "tcg":
            return ["-accel", f"tcg,thread=multi,tb-size={TCG_CACHE_MIB}", "-cpu", TCG_CPU, "-smp", str(self.vcpus)]
        return ["-accel", "kvm", "-cpu", "host", "-smp", str(self.vcpus)]

    def _board(self) -> str:
        # A state of devices alone ends without the description that QEMU looks for otherwise.
        words = ["usb=off", "memory-backend=ram", "suppress-vmdesc=on"]
        if self.board == "microvm":
            return ",".join(["microvm", "pit=off", "pic=off", "rtc=on", "isa-serial=off", *words])
        return ",".join(["q35", "smm=off", "vmport=off", *words])

    def _ram(self) -> str:
        share = "on" if self.share_ram else "off"
        return f"memory-backend-file,id=ram,size={self.memory_mib}M,mem-path=/proc/self/fd/{self.ram_fd},share={share}"

    def _device(self, kind: str, options: str) -> str:
        return f"{kind}-{'device' if self.board == 'microvm' else 'pci'},{options}"

    def _disk(self, number: int, disk: Disk) -> Iterator[str]:
        for place, node in enumerate(_chain(disk)):
            if node.fd >= 0:
                yield from ("-add-fd", f"fd={node.fd},set={_fdset(number, place)}")
        yield from ("-blockdev", json.dumps(_blockdev(number, 0, disk), separators=(",", ":")))
        # By default QEMU stops a machine whose disk the host cannot take, and nobody would ever let it go on.
        options = f"id=disk{number},drive=d{number},serial=d{number},werror=report,rerror=report"
        yield from ("-device", self._device("virtio-blk", options))

    def _card(self) -> list[str]:
        # Every guest has one: a restored machine is that which was saved, whatever is behind its card.
        # It has nobody to announce itself to when it goes on, and would do so five times.
        options = f"id=card,mac={CARD_ADDRESS},guest_announce=off" + (",romfile=" if self.board == "q35" else "")
        if self.network == "none":
            return ["-device", self._device("virtio-net", options)]
        cut = ",restrict=on" if self.network == "cut" else ""
        netdev = f"user,id=net0,ipv6=off{cut}"
        return ["-netdev", netdev, "-device", self._device("virtio-net", f"{options},netdev=net0")]

    def _start(self) -> list[str]:
        firmware = ["-bios", "qboot.rom"] if self.board == "microvm" else []
        if isinstance(self.start, Boot):
            boot = self.start
            return [*firmware, "-kernel", boot.kernel, "-initrd", boot.initrd, "-append", self._append(boot)]
        if self.start.saved_by == "devices" and not self.start.waits:
            return [*firmware, "-incoming", f"fd:{self.start.state_fd}"]
        return [*firmware, "-incoming", "defer"]

    def _append(self, boot: Boot) -> str:
        words = list(kernel_words(self.accel))
        if self.accel == "tcg" and boot.tsc_khz:
            words.append(f"tsc_early_khz={boot.tsc_khz}")
        return " ".join([*words, *boot.parameters])


def kernel_words(accel: Accel) -> tuple[str, ...]:
    """Return what every guest's kernel is told, whatever host it runs on."""
    if accel == "tcg":
        return (*_QUIET, *_FOR_TCG)
    return tuple(word for word in _QUIET if word not in _NOT_FOR_KVM)


def _chain(disk: Disk) -> Iterator[Disk]:
    node: Disk | None = disk
    while node is not None:
        yield node
        node = node.backing


def _fdset(number: int, place: int) -> int:
    # A set for each file: QEMU takes the first descriptor of a set whose mode fits.
    return 1 + number * 1000 + place


def _blockdev(number: int, place: int, disk: Disk) -> dict[str, Any]:
    if (disk.fd >= 0) == bool(disk.path):
        raise ConfigError("a disk is either a descriptor or a path")
    name = f"d{number}" if place == 0 else f"d{number}b{place}"
    node: dict[str, Any] = {
        "driver": disk.format,
        "node-name": name,
        "read-only": disk.read_only,
        "file": {
            "driver": "file",
            "filename": f"/dev/fdset/{_fdset(number, place)}" if disk.fd >= 0 else disk.path,
            "read-only": disk.read_only,
            # Read-only images are shared by many machines, and sandboxes have a lock of their own.
            "locking": "off",
        },
    }
    if not disk.read_only:
        # A sandbox's disk lives as long as its machine: nothing in it has to survive the host's power.
        node["cache"] = {"no-flush": True}
        node["discard"] = "unmap"
        node["file"]["discard"] = "unmap"
    if disk.format == "qcow2" and disk.backing is not None:
        node["backing"] = _blockdev(number, place + 1, disk.backing)
    return node


def tsc_khz(cpuinfo: str) -> int:
    """Return the speed of the host's time stamp counter from the text of /proc/cpuinfo; 0 if it does not say."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "bogomips":
            try:
                return int(float(value) * 500)
            except ValueError:
                return 0
    return 0
