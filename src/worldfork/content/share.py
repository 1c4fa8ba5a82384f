"""Copying a file's bytes, and letting equal files share them where the file system can."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from worldfork.content.hashing import data_at

_FICLONE = 0x40049409
_FIDEDUPERANGE = 0xC0189436
_DIFFERS = 1  # FILE_DEDUPE_RANGE_DIFFERS
_NOT_HERE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS)
_NO_CLONE = (*_NOT_HERE, errno.EPERM)
_STEP_BYTES = 16 << 20
"""Btrfs shares no more at once."""


class Cloning:
    """Copies contents, by sharing their extents as long as the file system does that."""

    def __init__(self) -> None:
        self._clones = True

    def copy(self, reader: int, writer: int, size_bytes: int, *, sparse: bool) -> None:
        """Copy a whole file into a new empty one; holes stay holes.

        Args:
            reader, writer: descriptors.
            size_bytes: of the file.
            sparse: whether it may have holes.
        Raises:
            OSError: it cannot be read or written; EIO also where it ends early.
        """
        if not size_bytes or self._cloned(reader, writer):
            return
        offset = 0
        while offset < size_bytes:
            begin, end = data_at(reader, offset, size_bytes) if sparse else (offset, size_bytes)
            _copy_range(reader, writer, begin, end)
            offset = end
        if sparse:
            os.ftruncate(writer, size_bytes)

    def _cloned(self, reader: int, writer: int) -> bool:
        if self._clones:
            try:
                fcntl.ioctl(writer, _FICLONE, reader)
                return True
            except OSError as error:
                if error.errno not in _NO_CLONE:
                    raise
                self._clones = error.errno == errno.EINVAL  # of this file alone
        return False


def _copy_range(reader: int, writer: int, begin: int, end: int) -> None:
    while begin < end:
        done = os.copy_file_range(reader, writer, min(end - begin, _STEP_BYTES), begin, begin)
        if done == 0:
            raise OSError(errno.EIO, "a file became shorter while it was copied")
        begin += done


class CannotShare(Exception):
    """The file system shares no bytes; the message says why."""


def share_bytes(source: int, target: int, size_bytes: int) -> int:
    """Let a file take over the extents of an equal one; return how many bytes it shares afterwards.

    The kernel compares them itself and changes nothing that a reader could see: no content, no time, no inode.

    Args:
        source: descriptor of the file to keep.
        target: of the other, on the same file system: open for writing, or for reading by its owner or root.
        size_bytes: of both.
    Raises:
        CannotShare: the file system cannot do it.
        OSError: they cannot be read, or the target is not ours.
    Source: ioctl_fideduperange(2).
    """
    offset = 0
    while offset < size_bytes:
        status, done = _dedupe(source, target, offset, min(size_bytes - offset, _STEP_BYTES))
        if status == _DIFFERS or done == 0:
            return offset
        offset += done
    return offset


def expect_sharing(fd: int) -> None:
    """Make sure, without reading anything, that the file system of an open file may share bytes.

    Raises:
        CannotShare: it never does.
        OSError: it cannot be asked.
    """
    _dedupe(fd, fd, 0, 0)


def _dedupe(source: int, target: int, offset: int, length: int) -> tuple[int, int]:
    # struct file_dedupe_range, and after it one struct file_dedupe_range_info.
    request = bytearray(struct.pack("=QQHHI", offset, length, 1, 0, 0) + struct.pack("=qQQiI", target, offset, 0, 0, 0))
    try:
        fcntl.ioctl(source, _FIDEDUPERANGE, request)
    except OSError as error:
        if error.errno in _NOT_HERE:
            raise CannotShare(error.strerror) from error
        raise
    _, _, done, status, _ = struct.unpack_from("=qQQiI", request, 24)
    if status < 0:
        if -status in _NOT_HERE:
            raise CannotShare(os.strerror(-status))
        raise OSError(-status, os.strerror(-status))
    return status, done
