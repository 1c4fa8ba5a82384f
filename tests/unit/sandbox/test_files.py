"""Files and directories in and out, and what a sandbox that lies can do to the host: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sandbox.fake_files import FakeFiles, record
from tests.unit.sandbox.fake_init import connected, ending, output, run

from worldfork.core.errors import ConfigError, PathError, SandboxDied
from worldfork.sandbox import files, wire
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.download import download_file, download_tree
from worldfork.sandbox.upload import upload_file, upload_tree

Test = Callable[[Connection, FakeFiles], Awaitable[None]]


def with_files(root: Path, test: Test) -> None:
    """Run a test against a played init that serves `root`."""

    async def served() -> None:
        async with connected() as (connection, init):
            fake = FakeFiles(init, root)
            server = asyncio.create_task(fake.serve())
            try:
                await test(connection, fake)
            finally:
                server.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await server

    run(served())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "sandbox"
    path.mkdir()
    return path


@pytest.fixture
def host(tmp_path: Path) -> Path:
    path = tmp_path / "host"
    path.mkdir()
    return path


@pytest.mark.parametrize("size_bytes", [0, 1, 65535, 65536, 65537, 300_000])
def test_what_is_written_is_read(root: Path, size_bytes: int) -> None:
    data = os.urandom(size_bytes)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, size_bytes, 100_000):
            yield data[start : start + 100_000]

    async def test(connection: Connection, _fake: FakeFiles) -> None:
        await files.write_file(connection, "/a", data)
        assert (root / "a").read_bytes() == data
        await files.write_file(connection, "/b", pieces())
        assert (root / "b").read_bytes() == data
        assert await files.read_file(connection, "/a") == data
        assert b"".join([piece async for piece in files.read_stream(connection, "/a", limit_bytes=1 << 20)]) == data

    with_files(root, test)


def test_a_slow_reader_is_sent_no_more_than_it_has_room_for(root: Path) -> None:
    content = os.urandom(2_500_000)
    (root / "large").write_bytes(content)

    async def test(connection: Connection, fake: FakeFiles) -> None:
        taken = b""
        async for piece in files.read_stream(connection, "/large"):
            for _ in range(50):
                await asyncio.sleep(0)  # turns in which more could come
            assert fake.sent_bytes - len(taken) < 512 * 1024
            taken += piece
        assert taken == content

    with_files(root, test)


def test_a_file_above_the_limit_is_not_read(root: Path) -> None:
    (root / "large").write_bytes(b"x" * 5_000_000)

    async def test(connection: Connection, fake: FakeFiles) -> None:
        start = [output(1, struct.pack("<Q", 5_000_000)), output(1, b"x" * 1000)]
        fake.answers[b"read", b"/large", b"0"] = lambda channel: [
            wire.frame(wire.STDOUT, channel, frame[12:]) for frame in start
        ]
        with pytest.raises(PathError) as caught:
            await files.read_file(connection, "/large", max_bytes=4_999_999)
        assert (caught.value.errno, caught.value.path) == (errno.EFBIG, "/large")
        assert "5000000" in caught.value.message
        assert "max_bytes" in caught.value.remedy
        assert fake.sent_bytes < 2000

    with_files(root, test)


def test_a_file_that_grows_or_hides_its_size_is_stopped_too(root: Path) -> None:
    async def test(connection: Connection, fake: FakeFiles) -> None:
        fake.answers[b"read", b"/proc/x", b"0"] = lambda channel: [
            output(channel, struct.pack("<Q", 0)[:3]),
            output(channel, struct.pack("<Q", 0)[3:] + b"12345"),
            output(channel, b"678901"),
        ]
        with pytest.raises(PathError) as caught:
            await files.read_file(connection, "/proc/x", max_bytes=10)
        assert caught.value.errno == errno.EFBIG

    with_files(root, test)


def test_failures_are_path_errors_with_a_sentence(root: Path) -> None:
    async def test(connection: Connection, fake: FakeFiles) -> None:
        for call in (files.read_file(connection, "/none"), files.list_directory(connection, "/none")):
            with pytest.raises(PathError) as caught:
                await call
            assert (caught.value.errno, caught.value.path) == (errno.ENOENT, "/none")
        assert str(caught.value) == "cannot list /none: No such file or directory"
        fake.answers[b"read", b"/pipe", b"0"] = lambda channel: [
            output(channel, b"a FIFO, not a regular file\n", wire.STDERR),
            ending(channel, 0, errno.EINVAL),
        ]
        with pytest.raises(PathError, match="cannot read /pipe: a FIFO, not a regular file"):
            await files.read_file(connection, "/pipe")
        with pytest.raises(ConfigError):
            await files.write_file(connection, "/x", b"", append=True, exclusive=True)

    with_files(root, test)


def test_a_death_is_no_path_error(root: Path) -> None:
    async def test(connection: Connection, fake: FakeFiles) -> None:
        fake.answers[b"read", b"/x", b"0"] = lambda channel: fake._init.close() or []  # type: ignore[func-returns-value]
        with pytest.raises(SandboxDied):
            await files.read_file(connection, "/x")

    with_files(root, test)


def grow(top: Path) -> None:
    """A small tree with what trees have."""
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "empty").mkdir()
    (top / "a" / "b" / "run.sh").write_text("#!/bin/sh\n")
    (top / "a" / "b" / "run.sh").chmod(0o755)
    (top / os.fsdecode(b"n\xff")).write_bytes(b"\0\xff")
    (top / "link").symlink_to("/etc/passwd")
    (top / "a" / "up").symlink_to("../link")
    (top / "large").write_bytes(os.urandom(2_500_000))
    (top / "sealed").mkdir()
    (top / "sealed" / "in").write_text("x")
    (top / "sealed").chmod(0o555)
    os.mkfifo(top / "pipe")
    os.utime(top / "large", ns=(10**18, 10**18))


def shape(top: Path) -> dict[str, tuple[int, bytes | str]]:
    seen: dict[str, tuple[int, bytes | str]] = {}
    for parent, directories, names in os.walk(top):
        for name in directories + names:
            path = Path(parent, name)
            content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
            seen[str(path.relative_to(top))] = (path.lstat().st_mode, content)
    seen.pop("pipe", None)
    return seen


def test_a_tree_goes_in_and_comes_out_the_same(tmp_path: Path, root: Path, host: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    grow(source)
    wanted = shape(source)

    async def test(connection: Connection, _fake: FakeFiles) -> None:
        up = await upload_tree(connection, source, "/in")
        assert shape(root / "in") == wanted
        assert (up.files, up.directories, up.links, up.skipped) == (4, 4, 2, ("pipe",))
        os.mkfifo(root / "in" / "pipe")
        down = await download_tree(connection, "/in", host / "out")
        assert shape(host / "out") == wanted
        assert down == up
        assert (host / "out" / "large").stat().st_mtime_ns == 10**18
        # Again, over what is there.
        await upload_tree(connection, source, "/in")
        await download_tree(connection, "/in", host / "out")
        assert shape(root / "in") == shape(host / "out") == wanted

    with_files(root, test)
    assert not [name for name in os.listdir(host / "out") if name.startswith(".worldfork-")]


def test_one_file_goes_in_and_comes_out(root: Path, host: Path) -> None:
    (host / "a").write_bytes(b"content")
    (host / "a").chmod(0o751)

    async def test(connection: Connection, _fake: FakeFiles) -> None:
        assert await upload_file(connection, host / "a", "/b") == 7
        assert (root / "b").stat().st_mode & 0o7777 == 0o751
        (host / "c").symlink_to(host / "a")
        assert await download_file(connection, "/b", host / "c") == 7
        assert not (host / "c").is_symlink()
        assert (host / "c").read_bytes() == b"content"
        with pytest.raises(OSError, match="regular"):
            await upload_file(connection, host, "/d")

    with_files(root, test)


@pytest.mark.parametrize("name", [b"..", b".", b"", b"a/b", b"/etc/x", b"../x", b"a\0b"])
def test_a_name_that_is_none_ends_the_download(root: Path, host: Path, name: bytes) -> None:
    async def test(connection: Connection, fake: FakeFiles) -> None:
        fake.answers[b"list", b"/d"] = lambda channel: [output(channel, record(name)), ending(channel, 0)]
        with pytest.raises(PathError, match="no file can be called"):
            await download_tree(connection, "/d", host / "out")

    with_files(root, test)
    assert os.listdir(host) == ["out"]
    assert os.listdir(host / "out") == []


@pytest.mark.parametrize("first", ["l", "d"])
def test_a_name_listed_as_link_and_directory_is_not_followed(root: Path, host: Path, first: str) -> None:
    (host / "victim").mkdir()
    victim = os.fsencode(host / "victim")

    async def test(connection: Connection, fake: FakeFiles) -> None:
        both = [record(b"x", "l", target=victim), record(b"x", "d", mode=0o755)]
        listing = b"".join(both if first == "l" else reversed(both))
        fake.answers[b"list", b"/d"] = lambda channel: [output(channel, listing), ending(channel, 0)]
        fake.answers[b"list", b"/d/x"] = lambda channel: [output(channel, record(b"evil")), ending(channel, 0)]
        fake.answers[b"read", b"/d/x/evil", b"0"] = lambda channel: [
            output(channel, bytes(8) + b"!"),
            ending(channel, 0),
        ]
        with pytest.raises(OSError):
            await download_tree(connection, "/d", host / "out")

    with_files(root, test)
    assert os.listdir(host / "victim") == []


def test_links_that_wait_on_the_host_are_not_followed(root: Path, host: Path) -> None:
    (host / "victim").mkdir()
    (host / "precious").write_text("precious")
    (host / "out").mkdir()
    (host / "out" / "directory").symlink_to(host / "victim")
    (host / "out" / "file").symlink_to(host / "precious")
    (root / "d" / "directory").mkdir(parents=True)
    (root / "d" / "directory" / "evil").write_text("!")
    (root / "e").mkdir()
    (root / "e" / "file").write_text("new")

    async def test(connection: Connection, _fake: FakeFiles) -> None:
        with pytest.raises(OSError):
            await download_tree(connection, "/d", host / "out")
        await download_tree(connection, "/e", host / "out")

    with_files(root, test)
    assert os.listdir(host / "victim") == []
    assert (host / "precious").read_text() == "precious"
    assert (host / "out" / "file").read_text() == "new"


def test_no_set_id_bits_reach_the_host(root: Path, host: Path) -> None:
    (root / "d").mkdir()
    (root / "d" / "su").write_text("x")
    (root / "d" / "su").chmod(0o6755)

    async def test(connection: Connection, _fake: FakeFiles) -> None:
        await download_tree(connection, "/d", host / "out")
        await download_file(connection, "/d/su", host / "su")

    with_files(root, test)
    assert (host / "out" / "su").stat().st_mode & 0o7777 == 0o755
    assert (host / "su").stat().st_mode & 0o7777 == 0o755


def test_a_download_that_fails_leaves_the_old_file(root: Path, host: Path) -> None:
    (root / "f").write_text("new")
    (host / "f").write_text("old")

    async def test(connection: Connection, fake: FakeFiles) -> None:
        fake.answers[b"read", b"/f", b"0"] = lambda channel: [
            output(channel, struct.pack("<Q", 3) + b"ne"),
            ending(channel, 0, errno.EIO),
        ]
        with pytest.raises(PathError):
            await download_file(connection, "/f", host / "f")

    with_files(root, test)
    assert (host / "f").read_text() == "old"
    assert os.listdir(host) == ["f"]


@settings(max_examples=15, deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(1, 60), max_size=10))
def test_a_read_is_the_same_whatever_the_pieces(data: bytes, cuts: list[int]) -> None:
    async def test(connection: Connection, fake: FakeFiles) -> None:
        def answer(channel: int) -> list[bytes]:
            rest, frames = struct.pack("<Q", len(data)) + data, []
            for cut in [*cuts, len(rest)]:
                frames.append(output(channel, rest[:cut]))
                rest = rest[cut:]
            return [*frames, ending(channel, 0)]

        fake.answers[b"read", b"/x", b"0"] = answer
        assert await files.read_file(connection, "/x", max_bytes=len(data)) == data

    with_files(Path("/nonexistent"), test)
