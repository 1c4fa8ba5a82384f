"""The skin of an archive: compressed blocks between a magic and a digest over every byte before it.

::

    magic (12 bytes)   version (u16)   its complement (u16)
    raw size (u32)     packed size (u32)    one zstd frame, with its checksum    for each block
    0 (u32)            32 (u32)             BLAKE3 of all bytes up to here

Numbers are little-endian. A block holds whole records of `content/archive.py`.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

from worldfork.content.compression import zstd
from worldfork.core.errors import Corrupt, FormatUnsupported

MAGIC = b"\x93worldfork\r\n"
VERSION = 1
LEVEL = 2
"""Of zstd: on two cores a third faster than 3 and 6 % larger; 1 is hardly faster than 2 and 7 % larger."""
BLOCK_BYTES = 4 << 20
"""What a block is filled up to before it is compressed; part of what makes an archive's bytes."""
LARGEST_BYTES = 64 << 20
"""A record that is larger than a block has one of its own, up to this size."""

_HEAD = struct.Struct("<12sHH")
_BLOCK = struct.Struct("<II")
_DIGEST_BYTES = 32
_THREADS = 2
_AHEAD = 3  # blocks that are being compressed or unpacked at a time: memory is bounded by them
_WINDOW_LOG = 26  # LARGEST_BYTES; more would let an archive claim memory that no block of ours needs


class Sink(Protocol):
    """Where an archive goes."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Take it; one that returns a number has taken so many bytes."""


class Source(Protocol):
    """Where an archive comes from."""

    def read(self, size_bytes: int, /) -> bytes:
        """Return up to so many bytes; none at the end alone."""


class _SinkFailed(Exception):
    """What a sink raised, in clothes that nobody takes for a failure of what is being read for it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def failures_of_sink() -> Iterator[None]:
    """Let what a sink raised out as it was, wherever in the block it was written to. Around all use of a writer."""
    try:
        yield
    except _SinkFailed as failed:
        raise failed.error from failed.error.__cause__


class BlockWriter:
    """Takes bytes into blocks, which threads compress, and writes those in order.

    Use it as a context: the block that is being filled and the end mark are written by `end` alone.
    """

    def __init__(self, sink: Sink) -> None:
        from blake3 import blake3

        self._sink = sink
        self._digest = blake3()
        self._pool = ThreadPoolExecutor(_THREADS, "worldfork-compress")
        self._pending: deque[tuple[Future[bytes], int, bytearray | None]] = deque()
        self._spare: list[bytearray] = []
        self._buffer = bytearray(BLOCK_BYTES)
        self._used = 0
        self._put(_HEAD.pack(MAGIC, VERSION, VERSION ^ 0xFFFF))

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for future, _size, _buffer in self._pending:
            future.cancel()
        self._pool.shutdown()

    def write(self, head: bytes, body: bytes | memoryview = b"") -> None:
        """Take a record, which is never split."""
        size = len(head) + len(body)
        if size > BLOCK_BYTES - self._used:
            self._close_block()
        if size > BLOCK_BYTES:
            if size > LARGEST_BYTES:
                raise ValueError(f"a record of {size} bytes")
            self._submit(head + body, size, None)
            return
        middle, end = self._used + len(head), self._used + size
        self._buffer[self._used : middle] = head
        self._buffer[middle:end] = body
        self._used = end

    def space(self, size_bytes: int) -> memoryview | None:
        """Return where the next record of this size goes, to be filled and taken; None where `write` has to do it."""
        if size_bytes > BLOCK_BYTES - self._used:
            return None
        return memoryview(self._buffer)[self._used : self._used + size_bytes]

    def take(self, size_bytes: int) -> None:
        """Take what was filled into the space."""
        self._used += size_bytes

    def end(self) -> str:
        """Write the rest and the end mark; return the digest over all, as hex digits."""
        self._close_block()
        while self._pending:
            self._write_oldest()
        self._put(_BLOCK.pack(0, _DIGEST_BYTES))
        digest = self._digest.digest()
        self._put(digest)
        return digest.hex()

    def _close_block(self) -> None:
        if not self._used:
            return
        full, used = self._buffer, self._used
        self._buffer = self._spare.pop() if self._spare else bytearray(BLOCK_BYTES)
        self._used = 0
        self._submit(memoryview(full)[:used], used, full)

    def _submit(self, data: bytes | memoryview, size_bytes: int, buffer: bytearray | None) -> None:
        while len(self._pending) >= _AHEAD:
            self._write_oldest()
        self._pending.append((self._pool.submit(_pack, data), size_bytes, buffer))

    def _write_oldest(self) -> None:
        future, size_bytes, buffer = self._pending.popleft()
        packed = future.result()
        if buffer is not None:
            self._spare.append(buffer)
        self._put(_BLOCK.pack(size_bytes, len(packed)))
        self._put(packed)

    def _put(self, data: bytes) -> None:
        self._digest.update(data)
        rest = memoryview(data)
        while rest:
            try:
                done = self._sink.write(rest)
            except Exception as error:
                raise _SinkFailed(error) from error
            if not isinstance(done, int):
                return
            rest = rest[done:]  # an unbuffered file may take a part only


def read_blocks(source: Source) -> Generator[bytes, None, None]:
    """Yield the blocks of an archive, unpacked. They are to be trusted only when the last has come.

    Raises:
        Corrupt: it is no archive, ends too early, goes on after its end, or a byte of it has changed.
        FormatUnsupported: a newer version wrote it.
    """
    taken = _Taken(source)
    _expect_head(taken.exactly(_HEAD.size))
    pending: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(_THREADS, "worldfork-unpack") as pool:
        while True:
            size_bytes, packed_bytes = _BLOCK.unpack(taken.exactly(_BLOCK.size))
            if size_bytes == 0:
                break
            if size_bytes > LARGEST_BYTES or not 0 < packed_bytes <= size_bytes + (size_bytes >> 7) + 512:
                raise corrupt("a block's size", f"up to {LARGEST_BYTES}", [size_bytes, packed_bytes])
            pending.append(pool.submit(_unpack, taken.exactly(packed_bytes), size_bytes))
            if len(pending) >= _AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    if packed_bytes != _DIGEST_BYTES:
        raise corrupt("the end mark", _DIGEST_BYTES, packed_bytes)
    expected = taken.digest()
    found = taken.exactly(_DIGEST_BYTES)
    if found != expected:
        raise corrupt("the digest over all", found.hex(), expected.hex())
    if source.read(1):
        raise corrupt("the end", "nothing more", "more bytes")


def corrupt(what: str, expected: object, actual: object, **fields: object) -> Corrupt:
    """Return the error that says what of an archive is not as it should be."""
    return Corrupt(
        f"the archive is damaged: {what}",
        remedy="export or fetch it again",
        expected=expected,
        actual=actual,
        **fields,
    )


def _expect_head(head: bytes) -> None:
    magic, version, complement = _HEAD.unpack(head)
    if magic != MAGIC or version != complement ^ 0xFFFF:
        raise corrupt("its first bytes are not those of an archive", MAGIC.hex(), head.hex())
    if version != VERSION:
        raise FormatUnsupported(
            f"the archive has format {version}, and this version reads {VERSION}",
            remedy="upgrade worldfork",
            expected=VERSION,
            actual=version,
        )


def _pack(data: bytes | memoryview) -> bytes:
    # With a checksum, so that no damage is taken for content before the digest over all has come.
    settings: dict[int, int] = {
        zstd.CompressionParameter.compression_level: LEVEL,
        zstd.CompressionParameter.checksum_flag: 1,
    }
    return zstd.compress(data, options=settings)


def _unpack(packed: bytes, size_bytes: int) -> bytes:
    limits: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
    unpacking = zstd.ZstdDecompressor(options=limits)
    try:
        data = unpacking.decompress(packed, max_length=size_bytes)
        whole = len(data) == size_bytes and (unpacking.eof or not unpacking.decompress(b"", max_length=1))
    except zstd.ZstdError as error:
        raise corrupt("a block cannot be unpacked", "a zstd frame", str(error)) from error
    if not whole or not unpacking.eof or unpacking.unused_data:
        raise corrupt("a block's size", size_bytes, len(data))
    return data


class _Taken:
    """Bytes of a source, and the digest of what was taken."""

    def __init__(self, source: Source) -> None:
        from blake3 import blake3

        self._source = source
        self._digest = blake3()

    def exactly(self, size_bytes: int) -> bytes:
        parts = []
        missing = size_bytes
        while missing:
            part = self._source.read(missing)
            if not part:
                raise corrupt("it ends too early", size_bytes, size_bytes - missing)
            parts.append(part)
            missing -= len(part)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._digest.update(data)
        return data

    def digest(self) -> bytes:
        return bytes(self._digest.digest())


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file begins as an archive does.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC
