"""The guest's own PID 1 in a real machine: boot, launch, reroot, export, rest, forks of its memory, and its ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests import guests, machines
from tests.guests import Guest
from tests.roots import make_small_root

from worldfork.sandbox.microvm import guest_image, ram, trees, wire
from worldfork.sandbox.microvm.guest_image import GuestImage
from worldfork.sandbox.microvm.machine import Boot, Disk, Network, Restore
from worldfork.sandbox.microvm.wire import KeepEnd, Kind, Op, Target
from worldfork.sandbox.program import program_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(machines.missing()), reason=machines.missing()),
]
DISKS = (Disk(fd=guests.DISKS), Disk(fd=guests.DISKS + 1, read_only=False))


@dataclass
class Ground:
    """What every machine of these tests starts from."""

    image: GuestImage
    base: Path


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Ground:
    images = machines.prepare_images(home / "images")
    kernel = guest_image.find_kernel(images)
    assert kernel is not None
    top = tmp_path_factory.mktemp("ground")
    root = make_small_root(top / "root")
    for path in (*guests.IDENTITY, "/etc/resolv.conf"):
        (root / path.lstrip("/")).write_text("of the base\n")
    os.chown(root, 7, 8)
    root.chmod(0o751)
    os.setxattr(root, "trusted.here", b"yes")
    os.setxattr(root, "trusted.overlay.opaque", b"y")
    os.utime(root, ns=(0, 1_000_000_000 * 10**9 + 123456789))
    trees.write_image(top / "base.erofs", {"b": root})
    return Ground(guest_image.build_image(images, kernel, program_path().read_bytes()), top / "base.erofs")


class Machines:
    """Starts machines, and ends them with the test."""

    def __init__(self, directory: Path, parts: Ground) -> None:
        self.directory = directory
        self.parts = parts
        self.started: list[Guest] = []
        self.memory = ram.new_ram(guests.MEMORY_MIB << 20)

    def scratch(self) -> Path:
        path = self.directory / "scratch.img"
        subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", str(path), "256M"], check=True)
        return path

    def boot(self, network: Network = "none") -> Guest:
        """Boot, into memory that can be sealed."""
        image = self.parts.image
        return self._start(guests.booting(image.kernel, image.initrd), self.scratch(), self.memory, 1, network)

    def save(self, guest: Guest) -> None:
        """Save a booted machine, which ends with that: what it writes would go into the memory of its forks."""
        assert guest.say(Kind.QUIESCE) is Kind.QUIET
        state = str(self.directory / "state")
        guest.order(("stop", {}), ("xen-save-devices-state", {"filename": state, "live": False}))
        os.kill(guest.qemu, signal.SIGKILL)
        assert guest.code() == KeepEnd.MACHINE
        ram.seal(self.memory)

    def fork(self, generation: int) -> Guest:
        """Start a machine from what was saved."""
        scratch = self.directory / f"scratch.{generation}"
        shutil.copyfile(self.directory / "scratch.img", scratch)
        with (self.directory / "state").open("rb") as state:
            how = Restore("devices", guests.STATE)
            return self._start(how, scratch, self.memory, generation, state=state.fileno())

    def _start(
        self,
        how: Boot | Restore,
        scratch: Path,
        memory: int,
        generation: int,
        network: Network = "none",
        state: int = -1,
    ) -> Guest:
        with self.parts.base.open("rb") as base, scratch.open("r+b") as written:
            fds = {guests.RAM: memory, guests.DISKS: base.fileno(), guests.DISKS + 1: written.fileno()}
            if state >= 0:
                fds[guests.STATE] = state
            run = self.directory / f"run-{len(self.started)}"
            guest = guests.start(run, how, DISKS, fds, generation, network)
        self.started.append(guest)
        guest.ready()
        return guest

    def end(self) -> None:
        for guest in self.started:
            guest.end()
        os.close(self.memory)


@pytest.fixture
def some(tmp_path: Path, parts: Ground) -> Iterator[Machines]:
    found = Machines(tmp_path, parts)
    yield found
    found.end()


def launched(some: Machines, marks: str = "trusted") -> Guest:
    guest = some.boot()
    guests.prepare(guest)
    guests.launch(guest, marks=marks)
    return guest


def error_of(guest: Guest, op: Op, body: bytes) -> tuple[str, bytes]:
    answer = guest.ask(op, body)
    return os.strerror(answer.error_number), answer.body


def test_a_machine_is_prepared_and_what_it_cannot_do_is_told(some: Machines) -> None:
    guest = some.boot()
    assert b"MemTotal" in guest.done(Op.STATS)
    missing = wire.items(("mkdir", "/ok"), ("mount", "/dev/vda\t/nowhere\terofs\tro\t"))
    assert error_of(guest, Op.PREPARE, missing) == ("No such file or directory", b"mount=/dev/vda")
    for body in (b"", b"mkdir", b"mkdir=/x", wire.items(("nonsense", "x")), wire.items(("mount", "a\tb"))):
        assert error_of(guest, Op.PREPARE, body)[0] == "Invalid argument"
    assert error_of(guest, Op.NETWORK, b"")[0] == "No such process", "there is no sandbox yet"
    assert error_of(guest, Op.RESUME, b"short")[0] == "Invalid argument"
    assert guests.resume(guest, 2).error_number != 0, "that is another generation"
    assert guests.resume(guest, 1, ("hostname", "x")).error_number != 0, "there is no sandbox to name"
    assert error_of(guest, Op.LOOK, wire.items(("program", "/x")))[0] == "No such process"
    assert guests.resume(guest, 1).error_number == 0
    guests.prepare(guest, ("like", f"{guests.BASE}/b\t{guests.SCRATCH}/u"))
    roots = [guest.export(path)[: guests.ROOT_BYTES] for path in (f"{guests.BASE}/b", f"{guests.SCRATCH}/u")]
    assert [wire.EXPORT_HEAD.unpack_from(root)[2:5] for root in roots] == [(0o751, 7, 8)] * 2
    assert [wire.EXPORT_HEAD.unpack_from(root)[11:13] for root in roots] == [(123456789, 1_000_000_000)] * 2
    assert [(b"trusted.here" in root, b"trusted.overlay" in root) for root in roots] == [(True, True), (True, False)]
    assert error_of(guest, Op.PREPARE, wire.items(("like", "/nowhere\t/"))) == (
        "No such file or directory",
        b"like=/nowhere",
    )
    assert error_of(guest, Op.SYNC, b"/nowhere")[0] == "No such file or directory"
    guest.done(Op.SYNC, guests.SCRATCH.encode())


@pytest.mark.parametrize("marks", ["trusted", "user"])
def test_a_sandbox_runs_moves_to_a_new_root_and_is_exported(some: Machines, marks: str) -> None:
    guest = launched(some, marks)
    assert guest.shell("cat /etc/hostname; echo one > /one; cat /one") == "first\none\n"
    with guest.stream(Target.LAUNCH) as second:
        assert second.recv(1) == b"", "a machine has one sandbox"
    assert guest.shell("head -c 3000000 /dev/urandom > /big; rm -r /bin/seq /var; mkdir /var") == ""
    looked = guest.face(Target.REROOT, [("form", "trusted"), ("look", "1")])
    assert looked[0][1] == b"u"
    guest.face(Target.REROOT, guests.ground((f"{guests.SCRATCH}/u",), "2", marks))
    assert guest.shell("cat /etc/hostname /one; echo two > /two; [ -e /bin/seq ] || echo gone") == "first\none\ngone\n"
    first, second_upper = guest.export(f"{guests.SCRATCH}/u"), guest.export(f"{guests.SCRATCH}/u2")
    assert (b"one\n" in first, b"two\n" in first) == (True, False)
    assert (b"one\n" in second_upper, b"two\n" in second_upper) == (False, True)
    assert len(first) > 3_000_000
    assert [whose for whose in ("trusted", "user") if f"{whose}.overlay.opaque".encode() in first] == [marks]
    for stream in (first, second_upper):
        head = wire.EXPORT_HEAD.unpack(stream[-wire.EXPORT_HEAD.size :])
        assert (chr(head[0]), head[13]) == ("e", 0)
    guest.control.sendall(wire.control(Op.SHUTDOWN, 1))
    assert guest.code() == 0


def test_rest_in_the_middle_of_a_stream_loses_nothing_and_a_dead_saver_stops_nobody(some: Machines) -> None:
    guest = launched(some)
    guest.shell("head -c 6000000 /dev/urandom > /big")
    whole = guest.export(f"{guests.SCRATCH}/u")
    parts = bytearray()
    with guest.stream(Target.EXPORT, f"{guests.SCRATCH}/u".encode()) as stream:
        for _ in range(4):
            parts += guests.exactly(stream, 1_000_000)
            assert guest.say(Kind.QUIESCE) is Kind.QUIET
            guest.order(("stop", {}), ("cont", {}))
            assert guest.say(Kind.GO) is Kind.GO
        with guest.connect("control") as saver:
            saver.sendall(wire.frame(Kind.QUIESCE))
            assert wire.HEADER.unpack(guests.exactly(saver, wire.HEADER.size))[1] == Kind.QUIET
            guest.order(("stop", {}))
        while part := stream.recv(1 << 18):
            parts += part
    assert bytes(parts) == whole
    assert guest.order(("query-status", {}))[0]["running"] is True
    os.kill(guest.qemu, signal.SIGKILL)
    assert guest.code() == KeepEnd.MACHINE


def identity(name: str) -> list[tuple[str, str]]:
    files = {"/etc/hostname": f"{name}\n", "/etc/machine-id": f"{name:*>32}\n", "/etc/hosts": "", "/etc/nothing": "x"}
    return [("hostname", name), *(("idfile", f"{path}\t{text}") for path, text in files.items())]


@pytest.mark.parametrize("looked", [False, True], ids=["unlooked", "looked"])
def test_forks_of_one_memory_are_others_than_their_siblings(some: Machines, looked: bool) -> None:
    source = launched(some)
    source.shell("setsid sh -c 'echo $$ > /alive; exec sleep 1000' > /dev/null 2>&1 & until [ -s /alive ]; do :; done")
    if looked:
        for _ in range(2):  # the second replaces the first
            paths = [("idfile", path) for path in (*guests.IDENTITY, "/etc/nothing")]
            source.done(Op.LOOK, wire.items(*paths, ("program", "/bin/sh"), ("program", "/nowhere/sh")))
    some.save(source)
    seen = []
    for generation in (11, 12, 13):
        fork = some.fork(generation)
        assert guests.resume(fork, 1).error_number != 0, "it has heard of its own generation"
        asked = [("program", path) for path in ("/bin/sh", "/bin", "/etc/passwd", "/nowhere/sh")]
        answer = guests.resume(fork, generation, *identity(f"fork-{generation}"), *asked)
        assert (answer.error_number, answer.body) == (0, b"/etc/nothing\0/bin\0/etc/passwd\0/nowhere/sh\0")
        name, before_s = f"fork-{generation}", time.time()
        script = (
            "cat /proc/sys/kernel/hostname /etc/hostname /etc/machine-id; wc -c < /etc/hosts; kill -0 $(cat /alive)"
        )
        assert fork.shell(script) == f"{name}\n{name}\n{name:*>32}\n0\n"
        inside_s = float(fork.shell("touch /now; stat -c %.9Y /now"))
        assert before_s - 0.5 < inside_s < time.time() + 0.5
        seen.append(fork.shell("cat /proc/sys/kernel/random/uuid"))
        fork.end()
    assert len(set(seen)) == 3


def test_an_identity_file_is_written_through_nothing_that_the_sandbox_has_planted(some: Machines) -> None:
    guest = launched(some)
    guest.shell("mv /etc /old; mkdir /etc; echo mine > /mine; ln -s /mine /etc/hostname; ln -s /old/hosts /etc/hosts")
    guest.shell("echo mine > /etc/machine-id; rm -r /dev/.worldfork; echo mine > /dev/extra; ln /dev/extra /dev/other")
    others = ["/dev/extra", "/proc/sysrq-trigger"]
    pairs = [("idfile", f"{path}\tother\n") for path in (*guests.IDENTITY, *others, "/old/hostname")]
    answer = guests.resume(guest, 1, *pairs)
    assert answer.error_number == 0
    assert answer.body.split(b"\0")[:-1] == [path.encode() for path in (*guests.IDENTITY, *others)]
    assert guest.shell("cat /mine /etc/machine-id /dev/extra /old/hosts /old/hostname") == (
        "mine\nmine\nmine\n127.0.0.1 first\nother\n"
    )
    refused = guests.resume(guest, 1, ("idfile", "/etc/hosts"))
    assert (os.strerror(refused.error_number), refused.body) == ("Invalid argument", b"idfile=/etc/hosts")


def test_what_was_looked_for_is_what_resume_changes(some: Machines) -> None:
    guest = launched(some)
    guest.done(Op.LOOK, wire.items(("idfile", "/etc/hostname"), ("idfile", "/etc/absent"), ("program", "/tool")))
    guest.shell("mv /etc /old; mkdir /etc; echo mine > /etc/hostname; cp /bin/sh /tool; echo x > /etc/absent")
    pairs = [("idfile", "/etc/hostname\tother\n"), ("idfile", "/etc/absent\ty\n"), ("program", "/tool")]
    answer = guests.resume(guest, 1, *pairs, ("program", "/bin/sh"))
    assert (answer.error_number, answer.body) == (0, b"/etc/absent\0/tool\0")
    assert guest.shell("cat /etc/hostname /old/hostname /etc/absent") == "mine\nother\nx\n"
    guest.done(Op.LOOK, wire.items(("program", "/tool")))
    assert guests.resume(guest, 1, ("program", "/tool"), ("idfile", "/etc/hostname\tz\n")).body == b"/etc/hostname\0"
    assert error_of(guest, Op.LOOK, wire.items(("mkdir", "/x"))) == ("Invalid argument", b"mkdir=/x")
    assert error_of(guest, Op.LOOK, b"no item")[0] == "Invalid argument"


def test_a_rehearsal_runs_a_program_and_leaves_nothing(some: Machines) -> None:
    guest = some.boot()
    for _ in range(40):  # more than there are places for children
        guest.done(Op.REHEARSE)


@pytest.mark.parametrize("restored", [False, True], ids=["booted", "restored"])
def test_a_panic_is_an_end(some: Machines, restored: bool) -> None:
    guest = some.boot()
    if restored:
        some.save(guest)
        guest = some.fork(2)
    guest.control.sendall(wire.control(Op.PREPARE, 1, wire.items(("write", "/proc/sysrq-trigger\tc"))))
    assert guest.code() == KeepEnd.MACHINE


def test_connections_to_elsewhere_are_ended_and_no_others(some: Machines) -> None:
    guest = some.boot("host")
    wrong = wire.items(("address", "eth0\t10.0.2.15/33\t10.0.2.2"))
    assert error_of(guest, Op.PREPARE, wrong) == ("Invalid argument", b"address=eth0")
    guests.prepare(guest, ("address", "eth0\t10.0.2.15/24\t10.0.2.2"))
    guests.launch(guest, "host")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(guests.ANSWER_S)
        port = server.getsockname()[1]
        script = (
            f"exec 3<>/dev/tcp/10.0.2.2/{port} 4<>/dev/udp/10.0.2.2/9 5<>/dev/udp/127.0.0.1/9; echo hello >&3;"
            "cat <&3; echo tcp $?; echo x >&4; echo udp $?; echo x >&5; echo loopback $?"
        )
        said: list[str] = []
        inside = threading.Thread(target=lambda: said.append(guest.sandbox("bash", "-c", script).stdout))
        inside.start()
        peer = server.accept()[0]
        with peer:
            assert peer.recv(6) == b"hello\n"
            assert struct.unpack("<I", guest.done(Op.CLOSE_OUTSIDE)) == (2,)
            inside.join()
            peer.settimeout(guests.ANSWER_S)
            with contextlib.suppress(ConnectionResetError):
                assert peer.recv(1) == b""
        assert said == ["tcp 1\nudp 1\nloopback 0\n"]
    assert b"0202000A" not in guest.done(Op.NETWORK)
