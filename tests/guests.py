"""Virtual machines with the guest's real PID 1 in them, one step at a time: below what the driver makes of it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worldfork.sandbox import wire as sandbox_wire
from worldfork.sandbox.command import CommandResult, CommandSpec
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.microvm import accel, wire
from worldfork.sandbox.microvm.machine import Boot, Disk, Machine, Network, Restore, tsc_khz
from worldfork.sandbox.microvm.wire import Kind, Op, Target
from worldfork.sandbox.program import encode_plan, spawn

ANSWER_S = 90.0
AGENT, QMP, RAM, STATE, DISKS = 16, 17, 18, 19, 20
MEMORY_MIB = 256
ROOT_BYTES = 256
"""Of a stream of a tree: its first record lies within, if its attributes are few."""
BASE, SCRATCH = "/base", "/scratch"
NAME = "sb-guest"
IDENTITY = {"/etc/hostname": "first\n", "/etc/machine-id": "1" * 32 + "\n", "/etc/hosts": "127.0.0.1 first\n"}


def exactly(sock: socket.socket, size: int) -> bytes:
    """Read so many bytes."""
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            raise EOFError(bytes(parts))
        parts += part
    return bytes(parts)


@dataclass
class Guest:
    """A running machine, held by a `keep` that is a child of this process."""

    run: Path
    pid: int
    start: socket.socket
    qemu: int = 0
    ended: int | None = None
    control: socket.socket = field(init=False)

    def said(self) -> tuple[int, bytes]:
        """Return the next frame of its keep."""
        size, kind = struct.unpack_from("<IH", exactly(self.start, 12))
        return kind, exactly(self.start, size)

    def ready(self) -> None:
        """Wait until the guest has answered."""
        kind, payload = self.said()
        assert kind == wire.LAUNCHED, payload
        self.qemu = struct.unpack("<I", payload)[0]
        kind, payload = self.said()
        assert kind == wire.READY, payload
        self.control = self.connect("control")

    def connect(self, name: str = "sock") -> socket.socket:
        """Return a connection to one of the sockets in its directory."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(ANSWER_S)
        sock.connect(str(self.run / name))
        return sock

    def ask(self, op: Op, body: bytes = b"") -> wire.ControlMessage:
        """Send a request and return its answer."""
        self.control.sendall(wire.control(op, 1, body))
        size, _, _ = wire.HEADER.unpack(exactly(self.control, wire.HEADER.size))
        return wire.read_control(exactly(self.control, size))

    def done(self, op: Op, body: bytes = b"") -> bytes:
        """Send a request that must succeed."""
        answer = self.ask(op, body)
        assert answer.error_number == 0, (op, os.strerror(answer.error_number), answer.body)
        return answer.body

    def say(self, kind: Kind) -> Kind:
        """Send a frame without a body and return the kind of what answers."""
        self.control.sendall(wire.frame(kind))
        return Kind(wire.HEADER.unpack(exactly(self.control, wire.HEADER.size))[1])

    def stream(self, target: Target, argument: bytes = b"") -> socket.socket:
        """Return a stream to something in the guest."""
        sock = self.connect("control")
        sock.sendall(wire.frame(Kind.OPEN, 0, wire.open_payload(target, argument)))
        return sock

    def face(self, target: Target, *plans: list[tuple[str, str]]) -> list[tuple[int, bytes]]:
        """Let a face of `wf-init` work in the guest and return what it says, a frame for each plan."""
        with self.stream(target) as sock:
            sock.sendall(b"".join(encode_plan(plan) for plan in plans))
            said = []
            for _ in plans:
                size, kind = struct.unpack_from("<IH", exactly(sock, 12))
                said.append((kind, exactly(sock, size)))
                assert kind != sandbox_wire.ERROR, sandbox_wire.read_error(said[-1][1])
            return said

    def export(self, directory: str) -> bytes:
        """Return the whole stream of a directory."""
        parts = []
        with self.stream(Target.EXPORT, directory.encode()) as sock:
            while part := sock.recv(1 << 18):
                parts.append(part)
        return b"".join(parts)

    def order(self, *orders: tuple[str, dict[str, Any]]) -> list[Any]:
        """Give orders to QEMU over one connection, and return what each returned."""
        with self.connect("qmp") as sock, sock.makefile("rwb") as lines:
            lines.readline()
            found = []
            for name, arguments in (("qmp_capabilities", {}), *orders):
                lines.write(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n")
                lines.flush()
                answer = json.loads(lines.readline())
                while "event" in answer:
                    answer = json.loads(lines.readline())
                found.append(answer["return"])
            return found[1:]

    def sandbox(self, *argv: str, timeout_s: float = 60) -> CommandResult:
        """Run a command in the sandbox that the guest has."""

        async def work() -> CommandResult:
            connection = await Connection.open(self.connect(), sandbox_id=NAME)
            try:
                return await connection.run(CommandSpec(argv, env={"PATH": "/bin"}, timeout_s=timeout_s))
            finally:
                connection.close()

        return asyncio.run(work())

    def shell(self, script: str) -> str:
        """Return what a script prints."""
        result = self.sandbox("sh", "-c", script)
        assert result.exit_code == 0, result
        return result.stdout

    def code(self, limit_s: float = 20) -> int:
        """Wait for the end of its keep, which comes by itself, and return the exit code."""
        if self.ended is None:
            fd = os.pidfd_open(self.pid)
            try:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                assert poll.poll(limit_s * 1000), "it goes on"
            finally:
                os.close(fd)
            self.ended = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.ended

    def end(self) -> None:
        """End what is left of it."""
        self.start.close()
        if hasattr(self, "control"):
            self.control.close()
        if self.ended is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code()


def booting(kernel: Path, initrd: Path) -> Boot:
    """Return how a machine boots here."""
    return Boot(str(kernel), str(initrd), tsc_khz=tsc_khz(Path("/proc/cpuinfo").read_text(encoding="utf-8")))


def start(
    run: Path,
    how: Boot | Restore,
    disks: tuple[Disk, ...],
    fds: Mapping[int, int],
    generation: int,
    network: Network = "none",
) -> Guest:
    """Start a machine of `MEMORY_MIB`; the caller calls `ready` and, in the end, `end`."""
    run.mkdir(mode=0o700)
    machine = Machine(
        accel="tcg",
        memory_mib=MEMORY_MIB,
        vcpus=1,
        ram_fd=RAM,
        share_ram=isinstance(how, Boot),
        qmp_fd=QMP,
        agent_fd=AGENT,
        start=how,
        disks=disks,
        network=network,
        program=accel.find_qemu().program,
    )
    plan = [("id", NAME), ("run", str(run)), ("lock", str(run / "lock")), ("agent", str(AGENT)), ("qmp", str(QMP))]
    plan += [("generation", str(generation)), *(("pass", str(number)) for number in fds)]
    plan += [("arg", word) for word in machine.arguments()]
    owner = os.pidfd_open(os.getpid())
    try:
        pid, sock = spawn("keep", encode_plan(plan), {4: owner, **fds})
    finally:
        os.close(owner)
    sock.settimeout(ANSWER_S)
    return Guest(run, pid, sock)


def prepare(guest: Guest, *more: tuple[str, str]) -> None:
    """Mount the base, an erofs image with one tree `b`, and the scratch disk."""
    guest.done(
        Op.PREPARE,
        wire.items(
            *(("mkdir", path) for path in (BASE, SCRATCH, "/run/wf/scratch")),
            ("mount", f"/dev/vda\t{BASE}\terofs\tro\t"),
            ("mount", f"/dev/vdb\t{SCRATCH}\text4\tnosuid,nodev\t"),
            *(("mkdir", f"{SCRATCH}/{name}") for name in ("u", "w", "u2", "w2")),
            *more,
        ),
    )


def ground(layers: tuple[str, ...], number: str = "", marks: str = "trusted") -> list[tuple[str, str]]:
    """Return the items of a plan that say what a sandbox stands on, and whose marks its overlay has."""
    return [
        ("form", "trusted"),
        ("marks", marks),
        ("overlay", "legacy"),
        ("scratch", "/run/wf/scratch"),
        *(("layer", layer) for layer in (*layers, f"{BASE}/b")),
        ("upper", f"{SCRATCH}/u{number}"),
        ("work", f"{SCRATCH}/w{number}"),
    ]


def launch(guest: Guest, network: str = "none", marks: str = "trusted") -> None:
    """Start the guest's one sandbox."""
    items = [
        ("id", NAME),
        ("hostname", "first"),
        *((key, "/run/wf") for key in ("run", "root")),
        ("lock", "/run/wf/lock"),
        ("net", network),
        ("shm_bytes", "1000000"),
        *(("idfile", f"{path}\t{text}") for path, text in IDENTITY.items()),
        *ground((), marks=marks),
    ]
    guest.face(Target.LAUNCH, [("form", "trusted"), ("net", network)], items)


def resume(guest: Guest, generation: int, *pairs: tuple[str, str]) -> wire.ControlMessage:
    """Tell the guest that it is another one than before."""
    return guest.ask(Op.RESUME, wire.resume_body(generation, time.time_ns(), os.urandom(64), *pairs))
