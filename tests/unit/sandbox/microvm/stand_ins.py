"""A machine for tests of saving: a process that maps a memory, and what answers in place of its QEMU and its keep."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worldfork.sandbox.microvm import manifest, pages, qcow2, ram, wire
from worldfork.sandbox.microvm.manifest import Build, DiskFile, Running, Saved
from worldfork.sandbox.microvm.pages import PAGE_BYTES

RAM_BYTES = 64 * PAGE_BYTES
STATE = b"what the devices held"
BUILD = Build("7.2.22", "tcg", "a cpu", "an image", RAM_BYTES, 1)
GUEST = """
import mmap, sys
fd = int(sys.argv[1])
memory = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE)
for line in sys.stdin:
    page, _, byte = line.partition(" ")
    memory[int(page) * 4096 : (int(page) + 1) * 4096] = bytes([int(byte)]) * 4096
    print(flush=True)
"""
Answer = Callable[[dict[str, Any]], Any]


class Refusal(Exception):
    """What QEMU answers an order with that it does not do."""


@dataclass
class StandIn:
    """One machine and what it was asked, in order."""

    run: Path
    memory: Path
    process: subprocess.Popen[bytes]
    sealed: int
    asked: list[str] = field(default_factory=list)
    orders: dict[str, Answer] = field(default_factory=dict)
    """By name of an order: what is done in place of the usual."""
    commands: list[str] = field(default_factory=lambda: ["stop", "cont", "xen-save-devices-state"])
    node: str = "d2"
    network: bytes = b""
    sets: dict[int, int] = field(default_factory=dict)
    named: dict[str, int] = field(default_factory=dict)

    def write(self, page: int, byte: int) -> None:
        """Let the guest fill a page of its memory."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"%d %d\n" % (page, byte))
        self.process.stdin.flush()
        self.process.stdout.readline()

    def order(self, order: str, arguments: dict[str, Any], fds: list[int]) -> Any:
        """Do what a QEMU would."""
        if order in self.orders:
            return self.orders[order](arguments)
        if order == "query-commands":
            return [{"name": name} for name in self.commands]
        if order == "query-block":
            return [{"inserted": {"node-name": "d0"}}, {}, {"inserted": {"node-name": self.node}}]
        if order == "add-fd":
            self.sets[len(self.sets) + 1] = fds[0]
            return {"fdset-id": len(self.sets), "fd": fds[0]}
        if order == "getfd":
            self.named[arguments["fdname"]] = fds[0]
        if order == "xen-save-devices-state":
            os.write(self.sets[int(arguments["filename"].removeprefix("/dev/fdset/"))], STATE)
        if order == "migrate":
            os.write(self.named[arguments["uri"].removeprefix("fd:")], STATE)
        if order == "query-migrate":
            return {"status": "completed"}
        if order == "blockdev-snapshot-sync":
            assert arguments["node-name"] == self.node
            self.node = arguments["snapshot-node-name"]
        return {}


def _serve_monitor(stand_in: StandIn, sock: socket.socket) -> None:
    number = {"major": 7, "minor": 2, "micro": 22}
    sock.sendall(json.dumps({"QMP": {"version": {"qemu": number}}}).encode() + b"\n")
    pending, fds = b"", []
    while True:
        data, more, _, _ = socket.recv_fds(sock, 1 << 16, 16)
        if not data:
            stand_in.asked.append("monitor closed")
            return
        pending, fds = pending + data, fds + more
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            request = json.loads(line)
            order = request["execute"]
            stand_in.asked.append(order)
            try:
                answer = {"return": stand_in.order(order, request.get("arguments", {}), fds)}
            except Refusal as error:
                answer = {"error": {"class": "GenericError", "desc": str(error)}}
            fds = []
            sock.sendall(json.dumps({**answer, "id": request["id"]}).encode() + b"\n")


def _serve_control(stand_in: StandIn, sock: socket.socket) -> None:
    while head := sock.recv(wire.HEADER.size, socket.MSG_WAITALL):
        size, kind, _ = wire.HEADER.unpack(head)
        payload = sock.recv(size, socket.MSG_WAITALL) if size else b""
        if kind == wire.Kind.CONTROL:
            message = wire.read_control(payload)
            stand_in.asked.append(wire.Op(message.op).name)
            body = {wire.Op.NETWORK: stand_in.network, wire.Op.CLOSE_OUTSIDE: b"\1\0\0\0"}.get(wire.Op(message.op), b"")
            sock.sendall(wire.control(message.op, message.tag, body))
        else:
            stand_in.asked.append(wire.Kind(kind).name)
            sock.sendall(wire.frame(wire.Kind.QUIET if kind == wire.Kind.QUIESCE else kind))
    stand_in.asked.append("control closed")


@contextlib.contextmanager
def _listening(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    def work() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listening.accept()
                with sock, contextlib.suppress(OSError):
                    serve(sock)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        serving = threading.Thread(target=work)
        serving.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            serving.join()


def write_memory(directory: Path) -> int:
    """Make a memory directory of one generation, and return its memory, sealed."""
    directory.mkdir()
    first = ram.new_ram(RAM_BYTES)
    os.pwrite(first, b"\1" * (8 * PAGE_BYTES), 4 * PAGE_BYTES)
    ram.seal(first)
    pages.write_pages(directory / "ram.0", ram.stored_pages(first))
    (directory / "state").write_bytes(STATE)
    (directory / "disk2.0.raw").write_bytes(b"empty")
    chains: tuple[manifest.DiskChain, ...] = ((), (), (DiskFile("disk2.0.raw"),))
    manifest.write_saved(directory, Saved(BUILD, "devices", ("ram.0",), chains, manifest.digest_state(STATE)))
    return first


@contextlib.contextmanager
def running(top: Path) -> Iterator[StandIn]:
    """A machine that was restored from a memory of one generation and has written two pages since."""
    run, memory = top / "run", top / "memory"
    run.mkdir()
    sealed = write_memory(memory)
    base = top / "base.erofs"
    base.write_bytes(b"base")
    qcow2.write_overlay(run / "scratch.qcow2", 1 << 40, "")
    process = subprocess.Popen(
        [sys.executable, "-c", GUEST, str(sealed)], pass_fds=[sealed], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        machine = StandIn(run, memory, process, sealed)
        try:
            machine.write(5, 7)
            machine.write(40, 9)
            written = (DiskFile(str(run / "scratch.qcow2"), "qcow2"), DiskFile(str(memory / "disk2.0.raw")))
            disks: tuple[manifest.DiskChain, ...] = ((DiskFile(str(base)),), (), written)
            manifest.write_running(run, Running(process.pid, sealed, str(memory), 1, "none", BUILD, disks))
            with (
                _listening(run / "qmp", lambda sock: _serve_monitor(machine, sock)),
                _listening(run / "control", lambda sock: _serve_control(machine, sock)),
            ):
                yield machine
        finally:
            process.kill()
            os.close(sealed)
            for fd in (*machine.sets.values(), *machine.named.values()):
                os.close(fd)
