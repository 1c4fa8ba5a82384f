"""The hash of a file's content: BLAKE3, in a way that a hole of any size costs nothing."""

from __future__ import annotations

import errno
import functools
import os
import struct

from blake3 import blake3

WHOLE_BYTES = 1 << 30
"""Files up to this size are hashed as they are."""
_BLOCK_BYTES = 16 << 20
_READ_BYTES = 1 << 20
_ZEROS = bytes(_READ_BYTES)


class ContentHash:
    """The hash of one file, fed from its beginning to its end.

    Up to 1 GiB it is BLAKE3 of the bytes. Above, it is BLAKE3 of the runs of equal blocks of 16 MiB (the last block
    may be shorter): for each run the number of its blocks as 8 bytes, the lowest first, then BLAKE3 of one of them.
    Whether zeros are a hole or written makes no difference.

    Args:
        size_bytes: of the whole file.
    """

    def __init__(self, size_bytes: int) -> None:
        self._outer = blake3()
        self._inner = blake3() if size_bytes > WHOLE_BYTES else None
        self._filled = 0
        self._run = (b"", 0)

    def update(self, data: bytes | memoryview) -> None:
        """Feed bytes."""
        if self._inner is None:
            self._outer.update(data)
            return
        rest = memoryview(data)
        while rest:
            part = rest[: _BLOCK_BYTES - self._filled]
            rest = rest[len(part) :]
            self._inner.update(part)
            self._filled += len(part)
            if self._filled == _BLOCK_BYTES:
                self._end_block()

    def zeros(self, count: int) -> None:
        """Feed `count` bytes of zeros."""
        while count > 0:
            if self._inner is not None and self._filled == 0 and count >= _BLOCK_BYTES:
                blocks, count = divmod(count, _BLOCK_BYTES)
                self._add_run(_block_of_zeros(), blocks)
                continue
            part = memoryview(_ZEROS)[: min(count, _BLOCK_BYTES - self._filled)]
            self.update(part)
            count -= len(part)

    def hexdigest(self) -> str:
        """Return the hash as 64 hex digits, once all has been fed."""
        if self._inner is not None:
            if self._filled:
                self._end_block()
            self._add_run(b"", 0)
        return str(self._outer.hexdigest())

    def _end_block(self) -> None:
        assert self._inner is not None
        self._add_run(self._inner.digest(), 1)
        self._inner.reset()
        self._filled = 0

    def _add_run(self, block: bytes, count: int) -> None:
        last, number = self._run
        if block == last:
            self._run = (block, number + count)
            return
        if number:
            self._outer.update(struct.pack("<Q", number) + last)
        self._run = (block, count)


@functools.cache
def _block_of_zeros() -> bytes:
    return bytes(blake3(bytes(_BLOCK_BYTES)).digest())


def hash_file(fd: int, size_bytes: int, sparse: bool) -> str:
    """Return the content hash of an open file, without reading its holes.

    Args:
        fd: at its beginning; where it stands afterwards means nothing.
        size_bytes: its size.
        sparse: whether it may have holes.
    Raises:
        OSError: EIO also where the file ends early.
    """
    if not sparse and size_bytes <= _READ_BYTES:
        data = os.read(fd, size_bytes) if size_bytes else b""
        if len(data) == size_bytes:
            return str(blake3(data).hexdigest())
        os.lseek(fd, 0, os.SEEK_SET)
    content = ContentHash(size_bytes)
    buffer = memoryview(bytearray(min(size_bytes, _READ_BYTES)))
    offset = 0
    while offset < size_bytes:
        begin, end = data_at(fd, offset, size_bytes) if sparse else (offset, size_bytes)
        content.zeros(begin - offset)
        offset = begin
        while offset < end:
            done = os.preadv(fd, [buffer[: end - offset]], offset)
            if done == 0:
                raise OSError(errno.EIO, "a file became shorter while it was read")
            content.update(buffer[:done])
            offset += done
    return content.hexdigest()


def data_at(fd: int, offset: int, size_bytes: int) -> tuple[int, int]:
    """Return begin and end of the next data of a file at or after `offset`; both its size where there is none.

    Source: lseek(2), SEEK_DATA.
    """
    try:
        begin = os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size_bytes, size_bytes
        if error.errno == errno.EINVAL:
            return offset, size_bytes  # a file system that knows no holes
        raise
    return min(begin, size_bytes), min(os.lseek(fd, begin, os.SEEK_HOLE), size_bytes)
