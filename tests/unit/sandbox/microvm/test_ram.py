"""A guest's memory: sealed files that nothing alters, changed pages of a real process, and files of pages."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from worldfork.core.errors import ConfigError, Corrupt, FormatUnsupported, NotFound, OutOfSpace, SandboxDied
from worldfork.sandbox.microvm import pages, ram
from worldfork.sandbox.microvm.pages import PAGE_BYTES, Pages

SIZE = 64 * PAGE_BYTES
WRITER = """
import mmap, sys
fd, size = int(sys.argv[1]), int(sys.argv[2])
memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
for line in sys.stdin:
    number, text = line.split()
    if text == "read":
        memory[int(number) * 4096]
    else:
        at = int(number) * 4096
        memory[at : at + 4096] = text.encode() * (4096 // len(text))
    print("done", flush=True)
"""


class Fork:
    """A process that maps a memory as QEMU does, and writes when told."""

    def __init__(self, fd: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(fd), str(SIZE)],
            pass_fds=[fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, number: int, text: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{number} {text}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def page(letter: str) -> bytes:
    return letter.encode() * PAGE_BYTES


def made_of(parts: dict[int, bytes]) -> Pages:
    runs = tuple((number, len(data) // PAGE_BYTES) for number, data in sorted(parts.items()))
    return Pages(SIZE, runs, memoryview(b"".join(data for _, data in sorted(parts.items()))))


def content(fd: int) -> dict[int, str]:
    """Return the first letter of each page that is not zero."""
    whole = os.pread(fd, SIZE, 0)
    assert len(whole) == SIZE
    found = {}
    for number in range(SIZE // PAGE_BYTES):
        one = whole[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
        assert one == one[:1] * PAGE_BYTES
        if one[0]:
            found[number] = chr(one[0])
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    pages.write_pages(tmp_path / "base", made_of({3: page("a") + page("b"), 10: page("c")}))
    return tmp_path / "base"


@pytest.fixture
def sealed(base: Path) -> Iterator[int]:
    fd = ram.assemble([base], SIZE)
    yield fd
    os.close(fd)


def test_a_sealed_memory_cannot_be_altered_by_who_opens_it_for_writing(sealed: int) -> None:
    assert ram.is_sealed(sealed)
    again = os.open(f"/proc/self/fd/{sealed}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(again, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(again, SIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with mmap.mmap(again, SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mine:
            mine[0] = 7
    finally:
        os.close(again)
    assert content(sealed) == {3: "a", 4: "b", 10: "c"}


def test_a_memory_in_use_by_its_writer_cannot_be_sealed() -> None:
    fd = ram.new_ram(SIZE)
    with mmap.mmap(fd, SIZE) as writer:
        with pytest.raises(OSError):
            ram.seal(fd)
        writer[0] = 1
    ram.seal(fd)
    assert ram.is_sealed(fd)
    os.close(fd)


def test_what_a_fork_wrote_is_told_from_what_it_read(sealed: int) -> None:
    fork = Fork(sealed)
    try:
        fork.tell(4, "x")
        fork.tell(5, "y")
        fork.tell(10, "read")
        fork.tell(20, "read")
        fork.tell(63, "z")
        assert ram.private_bytes(fork.process.pid, sealed) == 3 * PAGE_BYTES
        found = ram.private_pages(fork.process.pid, sealed)
    finally:
        fork.end()
    assert found.runs == ((4, 2), (63, 1))
    assert bytes(found.data) == page("x") + page("y") + page("z")


def test_both_ways_of_reading_give_the_same(sealed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = Fork(sealed)
    try:
        for number in range(0, 64, 3):
            fork.tell(number, "xy"[number % 2])
        fast = ram.private_pages(fork.process.pid, sealed)
        monkeypatch.setattr(ram, "_read_at_once", lambda *_: False)
        slow = ram.private_pages(fork.process.pid, sealed)
    finally:
        fork.end()
    assert fast.runs == slow.runs
    assert bytes(fast.data) == bytes(slow.data)
    assert len(fast.data) == 22 * PAGE_BYTES


@pytest.mark.parametrize("number", [errno.ENOTTY, errno.EINVAL])
def test_a_kernel_that_does_not_scan_tells_the_same(sealed: int, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    fork = Fork(sealed)
    try:
        for place in (0, 1, 2, 7, 9, 10, 63):
            fork.tell(place, "xy"[place % 2])
        fork.tell(5, "read")
        scanned = ram.private_pages(fork.process.pid, sealed)
        monkeypatch.setattr(ram, "_REGIONS", 2)
        in_steps = ram.private_pages(fork.process.pid, sealed)
        monkeypatch.setattr(ram, "_scanned", refuse)
        looked_up = ram.private_pages(fork.process.pid, sealed)
    finally:
        fork.end()
    assert scanned.runs == in_steps.runs == looked_up.runs == ((0, 3), (7, 1), (9, 2), (63, 1))
    assert bytes(scanned.data) == bytes(in_steps.data) == bytes(looked_up.data)


def test_more_runs_than_the_kernel_holds_at_a_time() -> None:
    fd = ram.new_ram(4096 * PAGE_BYTES)
    try:
        ram.seal(fd)
        with mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE) as memory:
            for number in range(0, 4096, 2):
                memory[number * PAGE_BYTES] = number % 251 + 1
            found = ram.private_pages(os.getpid(), fd)
            assert found.runs == tuple((number, 1) for number in range(0, 4096, 2))
            assert [found.data[place * PAGE_BYTES] for place in range(2048)] == [
                number % 251 + 1 for number in range(0, 4096, 2)
            ]
    finally:
        os.close(fd)


def test_a_scan_that_stops_short_of_what_it_tells_counts_nothing_twice(
    sealed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.ioctl

    def short(pagemap: int, order: int, asked: bytearray, change: bool) -> int:
        count = int(real(pagemap, order, asked, change))
        words = list(ram._SCAN.unpack(asked))
        words[4] = max(words[2] + PAGE_BYTES, (words[2] + words[4]) // 2 // PAGE_BYTES * PAGE_BYTES)
        asked[:] = ram._SCAN.pack(*words)
        return count

    fork = Fork(sealed)
    try:
        for place in (0, 1, 2, 7, 9, 10, 40, 41, 63):
            fork.tell(place, "xy"[place % 2])
        monkeypatch.setattr(fcntl, "ioctl", short)
        found = ram.private_pages(fork.process.pid, sealed)
    finally:
        fork.end()
    assert found.runs == ((0, 3), (7, 1), (9, 2), (40, 2), (63, 1))


def test_more_runs_than_one_call_takes_and_more_pages_than_were_expected(
    sealed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram, "_PIECES", 3)
    monkeypatch.setattr(ram, "_SPARE_BYTES", PAGE_BYTES)
    fork = Fork(sealed)
    try:
        fork.tell(0, "read")
        reader = ram.PrivateReader(fork.process.pid, sealed)
        for number in range(0, 40, 2):
            fork.tell(number, "abcd"[number % 4])
        found = reader.read()
    finally:
        fork.end()
    assert found.runs == tuple((number, 1) for number in range(0, 40, 2))
    assert bytes(found.data) == b"".join(page("abcd"[number % 4]) for number in range(0, 40, 2))


def test_generations_add_up(base: Path, sealed: int, tmp_path: Path) -> None:
    fork = Fork(sealed)
    try:
        fork.tell(4, "x")
        fork.tell(10, "\0")
        pages.write_pages(tmp_path / "one", ram.private_pages(fork.process.pid, sealed))
    finally:
        fork.end()
    second = ram.assemble([base, tmp_path / "one"], SIZE)
    assert content(second) == {3: "a", 4: "x"}
    fork = Fork(second)
    try:
        fork.tell(0, "q")
        pages.write_pages(tmp_path / "two", ram.private_pages(fork.process.pid, second))
    finally:
        fork.end()
        os.close(second)
    third = ram.assemble([base, tmp_path / "one", tmp_path / "two"], SIZE)
    assert content(third) == {0: "q", 3: "a", 4: "x"}
    os.close(third)


def test_all_of_a_memory_comes_back_from_its_file(tmp_path: Path) -> None:
    fd = ram.new_ram(SIZE)
    for number in (0, 1, 7, 63):
        os.pwrite(fd, page("m"), number * PAGE_BYTES)
    os.pwrite(fd, bytes(PAGE_BYTES), 8 * PAGE_BYTES)
    ram.seal(fd)
    pages.write_pages(tmp_path / "all", ram.stored_pages(fd))
    again = ram.assemble([tmp_path / "all"], SIZE)
    assert content(again) == content(fd) == dict.fromkeys((0, 1, 7, 63), "m")
    assert pages.allocated_bytes(tmp_path / "all") <= 8 * PAGE_BYTES
    os.close(fd)
    os.close(again)


def test_an_empty_memory_has_a_file_too(tmp_path: Path) -> None:
    fd = ram.new_ram(SIZE)
    pages.write_pages(tmp_path / "none", ram.stored_pages(fd))
    again = ram.assemble([tmp_path / "none"], SIZE)
    assert content(again) == {}
    os.close(fd)
    os.close(again)


def test_others_may_not_read_what_a_guest_held(base: Path) -> None:
    assert base.stat().st_mode & 0o777 == 0o400


def test_each_flipped_or_missing_byte_is_told(base: Path) -> None:
    whole = base.read_bytes()
    base.chmod(0o600)
    head = 56
    tried = [*range(8, head), PAGE_BYTES, PAGE_BYTES + 9, 2 * PAGE_BYTES, len(whole) - 1]
    for at in tried:
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        base.write_bytes(damaged)
        with pytest.raises((Corrupt, FormatUnsupported)):
            ram.assemble([base], SIZE)
    for length in (0, 10, PAGE_BYTES, 2 * PAGE_BYTES, len(whole) - 1):
        base.write_bytes(whole[:length])
        with pytest.raises(Corrupt):
            ram.assemble([base], SIZE)
    base.write_bytes(whole)
    os.close(ram.assemble([base], SIZE))


def test_a_file_of_another_version_or_size_is_told(base: Path) -> None:
    with pytest.raises(Corrupt):
        ram.assemble([base], 2 * SIZE)
    base.chmod(0o600)
    whole = bytearray(base.read_bytes())
    whole[7] = 9
    base.write_bytes(whole)
    with pytest.raises(FormatUnsupported):
        ram.assemble([base], SIZE)


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        ram.assemble([tmp_path / "none"], SIZE)


def test_too_little_memory_is_told_beforehand(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram, "available_bytes", lambda: 1000)
    with pytest.raises(OutOfSpace) as caught:
        ram.assemble([base], SIZE)
    assert caught.value.scope == "host"


def test_a_dead_or_a_foreign_process_is_told(sealed: int) -> None:
    fork = Fork(sealed)
    fork.end()
    with pytest.raises(SandboxDied):
        ram.private_pages(fork.process.pid, sealed)
    with pytest.raises(SandboxDied):
        ram.private_pages(os.getpid(), sealed)


@pytest.mark.parametrize("size", [0, -4096, 100])
def test_a_memory_is_whole_pages(size: int) -> None:
    with pytest.raises(ConfigError):
        ram.new_ram(size)


def test_no_descriptor_is_left_by_a_failure(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotFound):
        ram.assemble([tmp_path / "none"], SIZE)
    assert len(os.listdir("/proc/self/fd")) == before
