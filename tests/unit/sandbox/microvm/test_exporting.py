"""What a guest sends of its upper becomes the same layer, and nothing that it sends leads out of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import stat
import struct
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from worldfork.content.entry import Entry
from worldfork.content.layer import walk
from worldfork.content.marks import mark
from worldfork.core.errors import (
    NotCapturable,
    OutOfSpace,
    SandboxDied,
    SandboxError,
    StoreError,
    WorldforkError,
)
from worldfork.core.remove import remove_tree
from worldfork.sandbox.microvm import wire
from worldfork.sandbox.microvm.exporting import copy_disk, receive_layer

NATIVE = Path(__file__).resolve().parents[4] / "native"
FORM = "trusted" if os.geteuid() == 0 else "user"
REDIRECT = mark("redirect", FORM).encode()
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="owners, devices and marks take root")


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a guest's worker runs, as a program."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    out = tmp_path_factory.mktemp("export") / "export"
    sources = [
        str(path)
        for name in ("export*.c", "builtin*.c", "tree.c", "plan.c", "buffer.c", "frame.c")
        for path in NATIVE.glob(name)
    ]
    subprocess.run(
        [compiler, "-std=gnu11", "-O1", "-o", str(out), str(NATIVE / "tests" / "export.c"), *sources], check=True
    )
    return out


def sent(export: Path, tree: Path) -> bytes:
    # In a guest, files of an ordinary user's sandbox belong to root.
    prefix = ["unshare", "--user", "--map-root-user"] if FORM == "user" else []
    return subprocess.run([*prefix, export, tree], capture_output=True, check=False).stdout


def receive(data: bytes, target: Path, form: str = FORM, **more: Any) -> int | None:
    """What becomes of a stream that ends."""

    def feed() -> None:
        with theirs, contextlib.suppress(OSError):
            theirs.sendall(data)

    ours, theirs = socket.socketpair()
    feeding = threading.Thread(target=feed)
    with ours:
        feeding.start()
        ours.settimeout(20)
        try:
            return receive_layer(ours, target, form, **more)
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            feeding.join()


def entries(tree: Path, form: str = FORM) -> list[Entry]:
    return [found.entry for found in walk(tree, form)]


def record(kind: str, name: bytes = b"", **fields: Any) -> bytes:
    """One record; fields of its head by name, and `xattrs` and `target` as bytes."""
    xattrs, target, content = fields.pop("xattrs", b""), fields.pop("target", b""), fields.pop("content", b"")
    head = {"again": 0, "mode": 0o755, "uid": os.geteuid(), "gid": os.getegid()} | fields
    if FORM == "user":
        head |= {"uid": 0, "gid": 0}
    numbers = [head["again"], head["mode"], head["uid"], head["gid"]]
    numbers += [
        head.get("name_len", len(name)),
        head.get("xattrs_len", len(xattrs)),
        head.get("target_len", len(target)),
    ]
    numbers += [head.get(key, 0) for key in ("major", "minor", "links", "mtime_ns", "mtime_s", "size", "inode")]
    return wire.EXPORT_HEAD.pack(ord(kind), *numbers) + name + xattrs + target + content


def xattr(name: bytes, value: bytes) -> bytes:
    return struct.pack("<HI", len(name), len(value)) + name + value


def content(data: bytes) -> bytes:
    stretch = wire.STRETCH.pack(0, len(data)) + data if data else b""
    return stretch + wire.STRETCH.pack(len(data), 0)


def a_file(name: bytes, data: bytes, **fields: Any) -> bytes:
    return record("f", name, size=len(data), content=content(data), **fields)


ROOT, END = record("d"), record("e")


def make_tree(tree: Path) -> None:
    """Something of each kind that an ordinary user can make."""
    (tree / "b").mkdir(parents=True, mode=0o751)
    (tree / "b" / "file").write_bytes(os.urandom(3_000_001))
    os.chmod(tree / "b" / "file", 0o640)
    os.setxattr(tree / "b" / "file", "user.a", b"1\0")
    os.utime(tree / "b" / "file", ns=(1, 1_500_000_001_000_000_007))
    os.symlink("/etc/passwd", tree / "a")
    os.mkfifo(tree / "pipe")
    os.link(tree / "pipe", tree / "b" / "pipe")
    os.link(tree / "a", tree / "b" / "same", follow_symlinks=False)
    os.link(tree / "b" / "file", tree / "b" / "other")
    os.link(tree / "b" / "file", tree / "c")
    (tree / os.fsdecode(b"\xff\n")).touch()
    with open(tree / "sparse", "wb") as file:
        file.truncate(1 << 36)
        file.seek(1 << 30)
        file.write(b"x" * 4096)
    os.utime(tree / "b", ns=(1, 1_600_000_000_000_000_000))


def test_a_layer_holds_all_that_the_upper_has(export: Path, tmp_path: Path) -> None:
    make_tree(tmp_path / "upper")
    size = receive(sent(export, tmp_path / "upper"), tmp_path / "layer")
    assert entries(tmp_path / "layer") == entries(tmp_path / "upper")
    assert size is not None
    assert 3_000_001 <= size < 8_000_000
    assert (tmp_path / "layer" / "sparse").stat().st_blocks * 512 < 1 << 20
    assert (tmp_path / "layer" / "c").stat().st_nlink == 3
    for one, other in (("pipe", "b/pipe"), ("a", "b/same")):
        assert (tmp_path / "layer" / one).lstat().st_ino == (tmp_path / "layer" / other).lstat().st_ino


@as_root
def test_the_marks_of_an_overlay_come_along_and_its_ties_do_not(export: Path, tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    (upper / "opaque").mkdir(parents=True)
    (upper / "moved").mkdir()
    os.setxattr(upper / "opaque", "trusted.overlay.opaque", b"y")
    os.setxattr(upper / "moved", "trusted.overlay.redirect", b"/usr/lib")
    os.setxattr(upper / "moved", "trusted.overlay.origin", b"\0\xfb!")
    os.setxattr(upper / "moved", "trusted.other", b"data")
    os.mknod(upper / "gone", 0o600 | stat.S_IFCHR, os.makedev(0, 0))
    os.link(upper / "gone", upper / "opaque" / "gone")
    (upper / "owned").touch()
    os.chown(upper / "owned", 1234, 99)
    os.setxattr(upper / "owned", "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
    receive(sent(export, upper), tmp_path / "layer")
    assert entries(tmp_path / "layer") == entries(upper)
    assert set(os.listxattr(tmp_path / "layer" / "moved")) == {"trusted.overlay.redirect", "trusted.other"}
    assert [entry.kind for entry in entries(tmp_path / "layer")].count("w") == 2


def test_an_upper_that_is_empty_makes_no_layer(export: Path, tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir(mode=0o755)
    below = tmp_path / "below"
    shutil.copytree(tmp_path / "upper", below)
    (below / "file").touch()
    shutil.copystat(tmp_path / "upper", below)
    data = sent(export, tmp_path / "upper")
    assert receive(data, tmp_path / "layer") is None
    assert receive(data, tmp_path / "layer", below=below) is None
    assert not (tmp_path / "layer").exists()


def test_a_root_that_alone_was_changed_makes_a_layer(export: Path, tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    shutil.copytree(tmp_path / "upper", tmp_path / "below")
    os.chmod(tmp_path / "upper", 0o1777)
    assert receive(sent(export, tmp_path / "upper"), tmp_path / "layer", below=tmp_path / "below") == 0
    assert [entry.mode for entry in entries(tmp_path / "layer")] == [0o1777]


def test_a_stream_that_is_cut_anywhere_is_a_machine_that_ended(export: Path, tmp_path: Path) -> None:
    (tmp_path / "upper" / "d").mkdir(parents=True)
    (tmp_path / "upper" / "d" / "file").write_bytes(b"content")
    os.symlink("file", tmp_path / "upper" / "link")
    data = sent(export, tmp_path / "upper")
    for length in range(len(data)):
        with pytest.raises(SandboxDied):
            receive(data[:length], tmp_path / f"layer{length}")
    assert receive(data, tmp_path / "layer") == 4096


HOSTILE = {
    "up": a_file(b"../out", b"x"),
    "absolute": a_file(b"/tmp/out", b"x"),
    "dots within": record("d", b"d") + a_file(b"d/../../out", b"x"),
    "no name": a_file(b"", b"x"),
    "a second root": record("d"),
    "a NUL": a_file(b"a\0b", b"x"),
    "through a link": record("l", b"d", target=b"/tmp") + a_file(b"d/out", b"x"),
    "a link to a link's place": record("l", b"d", target=b"/tmp") + record("f", b"e", again=1, inode=7),
    "twice": a_file(b"a", b"x") + a_file(b"a", b"x"),
    "out of order": a_file(b"b", b"x") + a_file(b"a", b"x"),
    "a directory that was left": record("d", b"a") + a_file(b"b", b"") + a_file(b"a/x", b""),
    "no directory": a_file(b"a/b", b"x"),
    "content past its end": record(
        "f", b"a", size=1, content=wire.STRETCH.pack(0, 2) + b"xy" + wire.STRETCH.pack(1, 0)
    ),
    "content backwards": record(
        "f", b"a", size=9, content=wire.STRETCH.pack(5, 1) + b"x" + wire.STRETCH.pack(2, 1) + b"y"
    ),
    "content that wraps": record("f", b"a", size=9, content=wire.STRETCH.pack((1 << 64) - 1, 2) + b"xy"),
    "another size at the end": record("f", b"a", size=9, content=wire.STRETCH.pack(8, 0)),
    "too large": record("f", b"a", size=1 << 62, content=wire.STRETCH.pack(1 << 62, 0)),
    "a name without end": record("f", b"a", name_len=1 << 31),
    "attributes without end": record("f", b"a", xattrs_len=1 << 31),
    "an attribute cut off": record("d", b"a", xattrs=struct.pack("<HI", 200, 1) + b"user.a"),
    "an attribute twice": record("d", b"a", xattrs=xattr(b"user.a", b"1") * 2),
    "an attribute without a name": record("d", b"a", xattrs=xattr(b"", b"1")),
    "a redirect upwards": record("d", b"a", xattrs=xattr(REDIRECT, b"/../etc")),
    "a redirect into another": record("d", b"a", xattrs=xattr(REDIRECT, b"b/c")),
    "two from one place": b"".join(record("d", name, xattrs=xattr(REDIRECT, b"/etc")) for name in (b"a", b"b")),
    "a link without a target": record("l", b"a"),
    "no such kind": record("x", b"a"),
    "a mode that is none": record("d", b"a", mode=0o10777),
    "nobody": record("p", b"a", target=b"x"),
    "nanoseconds": record("d", b"a", mtime_ns=1_000_000_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_guest_of_ours_sends_is_refused(name: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(SandboxError, match="none at"):
        receive(ROOT + HOSTILE[name] + END, place / "layer")
    assert os.listdir(tmp_path) == ["place"]
    assert os.listdir(place) in ([], ["layer"])


def test_a_stream_with_any_wrong_byte_is_taken_or_refused(tmp_path: Path) -> None:
    opaque = xattr(mark("opaque", FORM).encode(), b"y") + xattr(b"user.a", b"value")
    whole = ROOT + record("d", b"d", xattrs=opaque) + a_file(b"d/f", b"content", links=2, inode=7)
    whole += record("l", b"d/l", target=b"f") + record("f", b"e", again=1, inode=7, size=7) + record("p", b"p") + END
    assert receive(whole, tmp_path / "whole") == 4096
    draw = random.Random(5)
    refused = 0
    for number in range(400):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.choice((0, 1, 0x2E, 0x2F, 0x7F, 0xFF, draw.randrange(256)))
        place = tmp_path / str(number)
        place.mkdir()
        try:
            receive(bytes(data), place / "layer")
        except WorldforkError:
            refused += 1
        assert os.listdir(place) in ([], ["layer"])
        assert sorted(os.listdir(tmp_path)) == sorted(["whole", str(number)])
        remove_tree(place)
    assert 100 < refused < 400


def test_a_stream_goes_not_on_after_its_end(tmp_path: Path) -> None:
    for data in (ROOT + END + b"x", ROOT + a_file(b"a", b"x") + END + b"x", END, a_file(b"a", b"") + END):
        with pytest.raises(SandboxError, match="none at"):
            receive(data, tmp_path / "layer")
        shutil.rmtree(tmp_path / "layer", ignore_errors=True)


def test_no_directory_is_written_through_a_link_that_stands_there_already(tmp_path: Path) -> None:
    (tmp_path / "aim").mkdir()
    os.symlink("aim", tmp_path / "layer")
    with pytest.raises(StoreError):
        receive(ROOT + a_file(b"a", b"x") + END, tmp_path / "layer")
    assert os.listdir(tmp_path / "aim") == []


def test_a_device_cannot_be_captured(tmp_path: Path) -> None:
    for kind, minor in (("b", 0), ("b", 3), ("c", 3)):
        with pytest.raises(NotCapturable) as caught:
            receive(ROOT + record(kind, b"disk", minor=minor) + END, tmp_path / f"{kind}{minor}")
        assert (caught.value.what, caught.value.why) == ("disk", "a device")


def test_what_a_guest_cannot_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotCapturable) as caught:
        receive(ROOT + record("d", b"d") + record("e", b"d/x", size=18), tmp_path / "layer")
    assert caught.value.what == "d/x"
    assert "cross-device" in str(caught.value).lower()


def test_a_directory_that_the_guest_has_not_got_is_named(export: Path, tmp_path: Path) -> None:
    with pytest.raises(NotCapturable, match="No such file"):
        receive(sent(export, tmp_path / "none"), tmp_path / "layer")


def test_more_than_the_limit_is_not_taken(tmp_path: Path) -> None:
    data = ROOT + b"".join(a_file(b"%03d" % number, b"x" * 1000) for number in range(100)) + END
    assert receive(data, tmp_path / "layer", limit_bytes=300_000) == 409_600
    with pytest.raises(OutOfSpace) as caught:
        receive(data, tmp_path / "less", limit_bytes=100_000)
    assert caught.value.scope == "sandbox"
    assert len(os.listdir(tmp_path / "less")) < 60


def test_a_layer_for_ordinary_users_says_no_redirect(tmp_path: Path) -> None:
    moved = record("d", b"a", uid=0, gid=0, xattrs=xattr(b"user.overlay.redirect", b"/etc"))
    with pytest.raises(NotCapturable) as caught:
        receive(record("d", uid=0, gid=0) + moved + END, tmp_path / "layer", "user")
    assert caught.value.what == "a"


def test_a_mark_of_the_other_form_is_none(tmp_path: Path) -> None:
    opaque = record("d", b"a", uid=0, gid=0, xattrs=xattr(b"user.overlay.opaque", b"y"))
    for form, is_opaque in (("user", True), ("trusted", False)):
        if form == FORM or form == "user":
            receive(record("d", uid=0, gid=0) + opaque + END, tmp_path / form, form)
            assert entries(tmp_path / form, form)[1].opaque is is_opaque


@asynccontextmanager
async def keep(run: Path, answer: Callable[[bytes, socket.socket], None]) -> AsyncIterator[None]:
    """Something that answers as a machine's `keep`, one connection."""

    def serve() -> None:
        with listening.accept()[0] as sock:
            size, kind, _ = wire.HEADER.unpack(sock.recv(wire.HEADER.size, socket.MSG_WAITALL))
            payload = sock.recv(size, socket.MSG_WAITALL)
            assert kind == wire.Kind.OPEN
            answer(payload, sock)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(run / "control"))
        listening.listen()
        serving = threading.Thread(target=serve)
        serving.start()
        yield
        serving.join()


def test_the_upper_of_a_machine_is_asked_for_by_its_path(export: Path, tmp_path: Path) -> None:
    async def work() -> None:
        make_tree(tmp_path / "upper")
        data = sent(export, tmp_path / "upper")
        seen = []

        def answer(payload: bytes, sock: socket.socket) -> None:
            seen.append(payload)
            sock.sendall(data)

        async with keep(tmp_path, answer):
            size = await copy_disk(tmp_path, "/run/wf/scratch/upper", tmp_path / "layer", FORM)
        assert seen == [wire.open_payload(wire.Target.EXPORT, b"/run/wf/scratch/upper")]
        assert size
        assert entries(tmp_path / "layer") == entries(tmp_path / "upper")

    asyncio.run(work())


def test_a_guest_that_stalls_is_an_error(tmp_path: Path) -> None:
    async def work() -> None:
        def answer(_: bytes, sock: socket.socket) -> None:
            sock.sendall(ROOT)
            sock.recv(1)

        async with keep(tmp_path, answer):
            with pytest.raises(SandboxError, match="stopped in the middle"):
                await copy_disk(tmp_path, "/upper", tmp_path / "layer", FORM, stall_s=0.1)

    asyncio.run(work())


def test_a_cancelled_copy_ends_at_once_and_writes_no_more(tmp_path: Path) -> None:
    async def work() -> None:
        begun = threading.Event()

        def answer(_: bytes, sock: socket.socket) -> None:
            sock.sendall(ROOT + a_file(b"a", b"x"))
            begun.set()
            sock.recv(1)

        async with keep(tmp_path, answer):
            copying = asyncio.create_task(copy_disk(tmp_path, "/upper", tmp_path / "layer", FORM))
            await asyncio.to_thread(begun.wait)
            copying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await copying

    asyncio.run(work())


def test_where_no_machine_is_left_the_sandbox_has_died(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(SandboxDied):
            await copy_disk(tmp_path, "/upper", tmp_path / "layer", FORM)
        assert not (tmp_path / "layer").exists()

    asyncio.run(work())
