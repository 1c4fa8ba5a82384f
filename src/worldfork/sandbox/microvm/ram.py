"""A guest's memory: the file that its QEMU maps, and what a running guest has changed of it.

Forks map one sealed file privately. Nothing can alter a sealed file, which matters because QEMU opens it for writing
even where it maps it privately. What a fork writes becomes pages of its process alone, and the kernel tells them apart
from those of the file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import re
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

from worldfork.core.errors import ConfigError, OutOfSpace, SandboxDied, SandboxError
from worldfork.sandbox.microvm.pages import PAGE_BYTES, Pages, Run, lay_pages

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_ENTRY_BYTES = 8
_PRIVATE = bytes(1 if entry & 0xC0 and not entry & 0x20 else 0 for entry in range(256))
"""By the top byte of an entry of pagemap: present (bit 63) or swapped (62), and not of a file (61)."""
_RUN_PATTERN = re.compile(b"\x01+")
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_SCAN = struct.Struct("=12Q")
_REGION = struct.Struct("=3Q")
_REGIONS = 4096
_PAGEMAP_SCAN = 0xC0606610
_NO_SCAN = (errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EPERM)
_Mapping = tuple[int, int, int]
"""Where a process maps a file: start, end, and the offset in the file."""
_FREE_SHARE = 0.9
_SPARE_BYTES = 4 << 20
_POPULATED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
_PIECES = 1024
"""That the kernel takes in one call."""


def new_ram(ram_bytes: int) -> int:
    """Return the descriptor of an empty memory, for a template that writes into it.

    Raises:
        ConfigError: no whole number of pages.
        OutOfSpace: the host has less memory than that.
    """
    if ram_bytes <= 0 or ram_bytes % PAGE_BYTES:
        raise ConfigError(f"a guest cannot have {ram_bytes} bytes of memory", remedy=f"give a multiple of {PAGE_BYTES}")
    fd = os.memfd_create("worldfork-ram", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, ram_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal(fd: int) -> None:
    """Make a memory one that nobody can alter; the QEMU that wrote it must have ended.

    Raises:
        OSError: EBUSY: somebody still writes to it.
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def is_sealed(fd: int) -> bool:
    """Whether nobody can alter this memory."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False


def open_sealed(pid: int, number: int, ram_bytes: int) -> int:
    """Return the memory that a QEMU was restored with, by its number of a descriptor; the caller closes it.

    A QEMU that its guest broke into may have anything under that number, such as a FIFO, whose opening waits, or a file
    that this process may read and QEMU may not: what is there is looked at before it is opened.

    Raises:
        SandboxDied: there is no such process.
        SandboxError: it has something else there.
    """
    try:
        place = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxDied(f"QEMU (process {pid}) has ended: {error.strerror}", step="memory") from error
    try:
        info = os.fstat(place)
        if stat.S_ISREG(info.st_mode) and info.st_size == ram_bytes:
            fd = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
            if is_sealed(fd):
                return fd
            os.close(fd)
    finally:
        os.close(place)
    raise SandboxError(
        f"QEMU (process {pid}) has not got the memory that it was given",
        remedy="end this sandbox: what runs its machine is not what was started there",
        step="memory",
    )


def assemble(files: Sequence[Path], ram_bytes: int) -> int:
    """Return the descriptor of a sealed memory made of page files: the first generation, then what each later changed.

    Raises:
        NotFound: one is gone.
        Corrupt: one is damaged.
        OutOfSpace: the host has too little memory.
    """
    fd = new_ram(ram_bytes)
    try:
        need = sum(_size(path) for path in files)
        free = available_bytes()
        # The kernel grants pages of such a file when they are touched, and kills somebody if there are none.
        if free is not None and need > free * _FREE_SHARE:
            raise OutOfSpace(
                f"a saved memory of {need} bytes does not fit into the {free} bytes that the host has free",
                remedy="end other sandboxes first",
                scope="host",
            )
        with mmap.mmap(fd, ram_bytes, access=mmap.ACCESS_WRITE) as memory:
            for path in files:
                lay_pages(path, memory)
        seal(fd)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise OutOfSpace(
                f"a saved memory of {ram_bytes} bytes has no room on this host", remedy="end other sandboxes first",
                scope="host",
            ) from error  # fmt: skip
        raise
    return fd


def stored_pages(fd: int) -> Pages:
    """Return all that a memory of its own holds, as the first generation. Close `data` before the descriptor.

    The caller gets a view of the file itself, so that a large memory is not held twice.
    """
    size = os.fstat(fd).st_size
    runs: list[Run] = []
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        end = min(size, os.lseek(fd, at, os.SEEK_HOLE))
        runs.append((at // PAGE_BYTES, -(-end // PAGE_BYTES) - at // PAGE_BYTES))
        at = end
    whole = memoryview(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
    if len(runs) == 1:
        first, count = runs[0]
        return Pages(size, tuple(runs), whole[first * PAGE_BYTES : (first + count) * PAGE_BYTES])
    held = bytearray()
    for first, count in runs:
        held += whole[first * PAGE_BYTES : (first + count) * PAGE_BYTES]
    return Pages(size, tuple(runs), memoryview(held))


class PrivateReader:
    """Reads what a guest has changed of the memory that its QEMU maps privately.

    Made while the guest runs, so that as little as possible is left for the moment in which it is stopped.

    Args:
        pid: of the QEMU, which must belong to this user, or this process must be root.
        ram_fd: of the memory.

    Raises:
        SandboxDied: there is no such process, or it does not map this memory.
    """

    def __init__(self, pid: int, ram_fd: int) -> None:
        self._pid = pid
        self._ram_bytes = os.fstat(ram_fd).st_size
        try:
            self._mapped = _mappings(pid, ram_fd)
            expected = sum(count for _, count in _private_runs(pid, self._mapped)[0]) * PAGE_BYTES
        except (FileNotFoundError, ProcessLookupError) as error:
            raise _ended(pid) from error
        # Touched beforehand: a page that the kernel has yet to grant takes longer than its copy.
        self._room = mmap.mmap(-1, expected + expected // 4 + _SPARE_BYTES, flags=_POPULATED)

    def read(self) -> Pages:
        """Return the pages; of a guest that runs they are of no moment. Valid as long as this reader is."""
        try:
            runs, places = _private_runs(self._pid, self._mapped)
            need = sum(count for _, count in runs) * PAGE_BYTES
            data = memoryview(self._room)[:need] if need <= len(self._room) else memoryview(bytearray(need))
            _read_memory(self._pid, places, data)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise _ended(self._pid) from error
        return Pages(self._ram_bytes, tuple(runs), data)


def private_pages(pid: int, ram_fd: int) -> Pages:
    """Return what a stopped guest has changed; see `PrivateReader`, which is faster."""
    return PrivateReader(pid, ram_fd).read()


def private_bytes(pid: int, ram_fd: int) -> int:
    """Return how much of its memory a guest has changed; it may go on meanwhile.

    Raises:
        SandboxDied: there is no such process, or it does not map this memory.
    """
    try:
        runs, _ = _private_runs(pid, _mappings(pid, ram_fd))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise _ended(pid) from error
    return sum(count for _, count in runs) * PAGE_BYTES


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return what the kernel says that new programs can use without swapping; None if it does not say."""
    try:
        text = meminfo.read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # whoever opens it says that it is gone


def _private_runs(pid: int, mapped: Sequence[_Mapping]) -> tuple[list[Run], list[tuple[int, int]]]:
    """Return the runs of private pages, and (address, length in bytes) of each."""
    runs: list[Run] = []
    places: list[tuple[int, int]] = []
    pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for start, end, offset in mapped:
            shift = offset - start
            for address, behind in _private_places(pagemap, start, end):
                runs.append(((address + shift) // PAGE_BYTES, (behind - address) // PAGE_BYTES))
                places.append((address, behind - address))
    finally:
        os.close(pagemap)
    return runs, places


def _private_places(pagemap: int, start: int, end: int) -> list[tuple[int, int]]:
    """Return (address, address behind it) of each run of private pages."""
    try:
        return _scanned(pagemap, start, end)
    except OSError as error:
        if error.errno not in _NO_SCAN:
            raise
    found = []
    entries = _pread(pagemap, (end - start) // PAGE_BYTES * _ENTRY_BYTES, start // PAGE_BYTES * _ENTRY_BYTES)
    for match in _RUN_PATTERN.finditer(entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(_PRIVATE)):
        found.append((start + match.start() * PAGE_BYTES, start + match.end() * PAGE_BYTES))
    return found


def _scanned(pagemap: int, start: int, end: int) -> list[tuple[int, int]]:
    """Ask the kernel for them, which takes a third of reading all entries; from Linux 6.7 on.

    Source: linux/fs.h, struct pm_scan_arg and struct page_region.
    """
    room = ctypes.create_string_buffer(_REGIONS * _REGION.size)
    found: list[tuple[int, int]] = []
    while start < end:
        words = (_SCAN.size, 0, start, end, 0, ctypes.addressof(room), _REGIONS, 0)
        # Not of a file, and either present or swapped.
        asked = bytearray(_SCAN.pack(*words, _IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED, 0))
        count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, asked, True)
        reached = _SCAN.unpack(asked)[4]
        if reached <= start:
            raise OSError(errno.EINVAL, "the kernel's scan does not come forward")
        for address, behind, _ in _REGION.iter_unpack(room.raw[: count * _REGION.size]):
            # After more regions than the kernel holds at a time (512) it names the place where it copied those out,
            # although it went on behind that: what lies there is told again.
            behind = min(behind, reached)
            if address >= behind:
                continue
            if found and found[-1][1] == address:
                found[-1] = (found[-1][0], behind)
            else:
                found.append((address, behind))
        start = reached
    return found


def _ended(pid: int) -> SandboxDied:
    return SandboxDied(f"QEMU (process {pid}) has ended", step="memory")


def _mappings(pid: int, ram_fd: int) -> list[_Mapping]:
    """Return (start, end, offset in the file) of where a process maps a file, by offset."""
    info = os.fstat(ram_fd)
    found = []
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            place, _, offset, device, inode = line.split(None, 5)[:5]
            if int(inode) != info.st_ino or device != f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}":
                continue
            start, end = (int(part, 16) for part in place.split("-"))
            found.append((start, end, int(offset, 16)))
    # More than once QEMU maps it only where somebody wants its reader to find no end.
    if sum(end - start for start, end, _ in found) != info.st_size or any(
        offset + end - start > info.st_size for start, end, offset in found
    ):
        raise SandboxDied(f"process {pid} does not map this memory", step="memory")
    return sorted(found, key=lambda mapping: mapping[2])


class _Piece(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _read_memory(pid: int, places: Sequence[tuple[int, int]], into: memoryview) -> None:
    """Copy pieces of a process's memory, one after another."""
    at = 0
    for number in range(0, len(places), _PIECES):
        batch = places[number : number + _PIECES]
        length = sum(size for _, size in batch)
        with into[at : at + length] as target:
            if not _read_at_once(pid, batch, target):
                _read_slowly(pid, batch, target)
        at += length


def _read_at_once(pid: int, places: Sequence[tuple[int, int]], into: memoryview) -> bool:
    """Copy with process_vm_readv(2), three times as fast as /proc; False where it is refused, as under Docker."""
    target = (ctypes.c_char * len(into)).from_buffer(into)
    mine = _Piece(ctypes.addressof(target), len(into))
    # ctypes takes plain pairs for structures, which its types do not say.
    theirs = (_Piece * len(places))(*places)  # type: ignore[misc]
    got = _libc().process_vm_readv(pid, ctypes.byref(mine), 1, theirs, len(places), 0)
    del target  # or the caller's view cannot be released
    return bool(got == len(into))


def _read_slowly(pid: int, places: Sequence[tuple[int, int]], into: memoryview) -> None:
    handle = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        at = 0
        for address, length in places:
            done = 0
            while done < length:
                got = os.preadv(handle, [into[at + done : at + length]], address + done)
                if got == 0:
                    raise ProcessLookupError("its memory is gone")
                done += got
            at += length
    finally:
        os.close(handle)


def _pread(handle: int, length: int, at: int) -> bytes:
    parts = []
    while length > 0:
        part = os.pread(handle, length, at)
        if not part:
            raise ProcessLookupError("its page table is gone")
        parts.append(part)
        at += len(part)
        length -= len(part)
    return b"".join(parts)
