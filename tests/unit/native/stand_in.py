"""A program that `keep` starts in place of a virtual machine: it speaks the guest's side of the multiplexer.

It echoes streams, answers requests with their own body, and misbehaves when a request asks for it. Its monitor answers
one client at a time, and remembers what it was ordered.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
import threading

AGENT_FD, QMP_FD = 16, 17
DIE, GARBAGE, END, TELL, ORDERS = 100, 101, 102, 103, 104


class Monitor(threading.Thread):
    """Answers orders; the first REFUSALS (a variable) to go on are refused."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.orders: list[str] = []
        self.refusals = int(os.environ.get("REFUSALS", "0"))

    def run(self) -> None:
        """Serve client after client."""
        with socket.socket(fileno=QMP_FD) as listening:
            while True:
                select.select([listening], [], [])
                client = listening.accept()[0]
                client.setblocking(True)
                with client, client.makefile("r") as lines:
                    client.sendall(b'{"QMP": {"version": {}}}\n')
                    for line in lines:
                        client.sendall(json.dumps(self.answer(json.loads(line))).encode() + b"\n")

    def answer(self, order: dict[str, object]) -> dict[str, object]:
        """Return what is said to one order."""
        named = {"id": order["id"]} if "id" in order else {}
        self.orders.append(str(order["execute"]))
        if order["execute"] == "cont" and self.refusals:
            self.refusals -= 1
            return {**named, "error": {"class": "GenericError", "desc": "not yet"}}
        return {"return": {}, **named}


class Guest:
    """The guest's end, one frame at a time."""

    def __init__(self) -> None:
        self.sock = socket.socket(fileno=AGENT_FD)
        self.monitor = Monitor()
        self.monitor.start()
        self.kept: list[bytes] | None = None
        self.room: dict[int, int] = {}
        self.owed: dict[int, bytes] = {}

    def send(self, kind: int, stream: int, payload: bytes) -> None:
        """Send a frame, or keep it while quiet."""
        frame = struct.pack("<IHH", len(payload), kind, stream) + payload
        if self.kept is None:
            self.sock.sendall(frame)
        else:
            self.kept.append(frame)

    def exactly(self, size: int) -> bytes:
        """Read that many bytes."""
        data = b""
        while len(data) < size:
            piece = self.sock.recv(size - len(data))
            if not piece:
                sys.exit(0)
            data += piece
        return data

    def serve(self) -> None:
        """Answer frames until the end."""
        while True:
            size, kind, stream = struct.unpack("<IHH", self.exactly(8))
            self.frame(kind, stream, self.exactly(size))

    def frame(self, kind: int, stream: int, payload: bytes) -> None:
        """Answer one frame."""
        if kind == 9:
            self.kept = None
            self.send(9, 0, payload)
        elif kind == 1:
            self.room[stream], self.owed[stream] = 256 * 1024, b""
        elif kind == 2:
            self.owed[stream] += payload
            self.echo(stream)
        elif kind == 3:
            self.room[stream] = self.room.get(stream, 0) + struct.unpack("<I", payload)[0]
            self.echo(stream)
        elif kind == 4:
            self.send(4, stream, payload)
            self.owed.pop(stream)
        elif kind == 6:
            self.send(7, 0, b"")
            self.kept = []
        elif kind == 8:
            kept, self.kept = self.kept or [], None
            self.sock.sendall(b"".join(kept))
        elif kind == 5:
            self.control(payload)

    def echo(self, stream: int) -> None:
        """Send back what the other side has room for, and only then take more."""
        owed = self.owed.get(stream, b"")
        while owed and self.room[stream]:
            piece = owed[: min(32768, self.room[stream])]
            owed = owed[len(piece) :]
            self.room[stream] -= len(piece)
            self.send(2, stream, piece)
            self.send(3, stream, struct.pack("<I", len(piece)))
        if stream in self.owed:
            self.owed[stream] = owed

    def control(self, payload: bytes) -> None:
        """Answer a request, or do what it asks for."""
        op, _, tag, _ = struct.unpack_from("<HHIi", payload)
        body = payload[12:]
        if op == DIE:
            sys.stderr.write("the machine is on fire\n")
            sys.stderr.flush()
            os._exit(9)
        if op == GARBAGE:
            self.sock.sendall(body)
        if op == END:
            self.send(5, 0, struct.pack("<HHIi", 7, 0, 0, 0) + body)
        if op == TELL:
            descriptors = sorted(os.listdir("/proc/self/fd"), key=int)
            body = repr((descriptors, dict(os.environ), os.getsid(0) == os.getpid())).encode()
        if op == ORDERS:
            body = json.dumps(self.monitor.orders).encode()
        self.send(5, 0, struct.pack("<HHIi", op, 0, tag, 0) + body)


if __name__ == "__main__":
    Guest().serve()
