"""The tests' side of the stream of frames to the host."""

import contextlib
import os
import select
import signal
import struct
import threading
from collections.abc import Iterator

_SIGNALS = {signal.SIGALRM, signal.SIGPROF}
"""What ends a test at its time limit; they may strike while it waits, and not in the middle of a frame."""
_HEADER_BYTES = 9
_READ_BYTES = 1 << 18


class Stream:
    """One request at a time, each with its answer; what is only told may be sent by another thread meanwhile."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._sequence = 0
        self._sending = threading.Lock()
        self._buffer = bytearray()

    def send(self, kind: bytes, body: bytes) -> int:
        """Write one frame; returns the number that its answer bears."""
        size = struct.pack("<I", _HEADER_BYTES + len(body))
        with _undisturbed(), self._sending:
            self._sequence += 1
            data = memoryview(size + kind + struct.pack("<Q", self._sequence) + body)
            while data:
                data = data[os.write(self._sink, data) :]
            return self._sequence

    def exchange(self, kind: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Write a frame and wait for its answer; returns its kind and body. A time limit may strike meanwhile."""
        with _undisturbed():
            return self._answer(self.send(kind, body), patient=False)

    def abandon(self) -> None:
        """Have the candidate's process ended; nobody waits for what it is doing."""
        with _undisturbed():
            self._answer(self.send(b"A", b""), patient=True)

    def _answer(self, sequence: int, *, patient: bool) -> tuple[bytes, bytes]:
        while True:
            while (frame := self._frame()) is None:
                if not patient:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
                    select.select((self._source,), (), ())
                    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
                part = os.read(self._source, _READ_BYTES)
                if not part:
                    os._exit(4)
                self._buffer += part
            # What answers an abandoned request comes late and is for nobody.
            if struct.unpack_from("<Q", frame, 1)[0] == sequence:
                return frame[:1], frame[_HEADER_BYTES:]

    def _frame(self) -> bytes | None:
        if len(self._buffer) < 4:
            return None
        size = int.from_bytes(self._buffer[:4], "little")
        if len(self._buffer) < 4 + size:
            return None
        frame = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        return frame


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
