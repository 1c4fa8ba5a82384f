"""Files: moved in and out by a process with the command's user, every path resolved inside."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conformance.conftest import Sandboxes
from tests.conformance.inside import processes, python, shell, told

from worldfork import Sandbox
from worldfork.core.errors import PathError

Needs = Callable[[str], None]


def refused(call: Callable[[], object]) -> PathError:
    """Return the error that a file operation must meet."""
    with pytest.raises(PathError) as caught:
        call()
    return caught.value


@pytest.mark.behaviour("file-1")
def test_what_is_written_is_read(box: Sandbox) -> None:
    data = bytes(range(256)) * 5000
    box.write_file("/workspace/new/below/data.bin", data)
    assert box.read_file("/workspace/new/below/data.bin") == data
    assert shell(box, "stat -c '%a %u %g %s' new/below/data.bin") == f"644 0 0 {len(data)}"
    assert shell(box, "stat -c '%a' new new/below") == "755\n755"
    box.write_file("/workspace/empty", b"")
    assert box.read_file("/workspace/empty") == b""
    box.write_file("/workspace/text", "é😀")
    assert box.read_file("/workspace/text") == "é😀".encode()


@pytest.mark.behaviour("file-1")
def test_writing_replaces_the_content_in_place(box: Sandbox) -> None:
    shell(box, "echo a long first content > f; chmod 640 f; ln f twin; ln -s f link")
    box.write_file("/workspace/link", b"new")
    assert shell(box, "cat f twin; echo; stat -c '%a %h' f; readlink link") == "newnew\n640 2\nf"
    box.write_file("/workspace/f", b"x", mode=0o4711)
    assert shell(box, "stat -c %a f") == "4711"


@pytest.mark.behaviour("file-2")
def test_relative_paths_begin_at_the_working_directory(sandboxes: Sandboxes, tmp_path: Path) -> None:
    box = sandboxes.create(working_dir="/srv")
    box.write_file("a/b", b"1")
    assert box.read_file("/srv/a/b") == box.read_file("a/b") == b"1"
    assert [entry.name for entry in box.list_directory("a").entries] == ["b"]
    box.make_directory("c/d")
    (tmp_path / "f").write_bytes(b"2")
    box.upload_file(tmp_path / "f", "c/f")
    box.upload_directory(tmp_path, "up")
    box.download_file("c/f", tmp_path / "g")
    box.download_directory("c", tmp_path / "down")
    box.delete_file("a", recursive=True)
    assert shell(box, "find /srv | sort").splitlines() == [
        "/srv", "/srv/c", "/srv/c/d", "/srv/c/f", "/srv/up", "/srv/up/f",
    ]  # fmt: skip
    assert (tmp_path / "g").read_bytes() == (tmp_path / "down" / "f").read_bytes() == b"2"


@pytest.mark.behaviour("file-3")
def test_what_is_no_regular_file_is_not_read(box: Sandbox) -> None:
    program = (
        "import os, socket\n"
        "os.mkfifo('fifo'); os.symlink('nowhere', 'dangling'); os.symlink('loop', 'loop')\n"
        "socket.socket(socket.AF_UNIX).bind('socket')\n"
    )
    python(box, program)
    for path, number in {
        "/no/such/file": errno.ENOENT, "/workspace": errno.EISDIR, "fifo": errno.EINVAL, "/dev/zero": errno.EINVAL,
        "dangling": errno.ENOENT, "loop": errno.ELOOP, "socket": errno.EINVAL, "/etc/passwd/x": errno.ENOTDIR,
        "x" * 300: errno.ENAMETOOLONG,
    }.items():  # fmt: skip
        error = refused(lambda path=path: box.read_file(path))  # type: ignore[misc]  # binds the loop's value
        assert (error.errno, error.path) == (number, path), path
        assert path[:200] in str(error)
    assert processes(box) == 0


@pytest.mark.behaviour("file-3")
def test_what_is_no_regular_file_is_not_written(box: Sandbox, of_the_host: tuple[str, ...]) -> None:
    shell(box, "mkfifo fifo; mkdir dir; echo plain > plain")
    for path, number in {
        "dir": errno.EISDIR, "fifo": errno.EINVAL, "/dev/null": errno.EINVAL, "plain/below": errno.ENOTDIR,
        "/sys/kernel/new": errno.EROFS, **{f"{top}/bin/new": errno.EROFS for top in of_the_host},
    }.items():  # fmt: skip
        error = refused(lambda path=path: box.write_file(path, b"x"))  # type: ignore[misc]
        assert error.errno == number, path


@pytest.mark.behaviour("file-4")
def test_a_sparse_file_of_4_gib_is_refused_at_once(box: Sandbox, tmp_path: Path) -> None:
    shell(box, "truncate -s 4G huge; printf end >> huge")
    began = time.monotonic()
    error = refused(lambda: box.read_file("huge"))
    assert time.monotonic() - began < 5
    assert (error.errno, error.path) == (errno.EFBIG, "huge")
    assert error.fields["size_bytes"] == (4 << 30) + 3
    assert "max_bytes" in error.remedy
    box.write_file("small", b"12345")
    assert refused(lambda: box.read_file("small", max_bytes=4)).errno == errno.EFBIG
    assert box.read_file("small", max_bytes=5) == b"12345"


@pytest.mark.behaviour("file-5")
def test_directories_are_listed_as_they_are(box: Sandbox) -> None:
    program = (
        "import os, socket\n"
        "os.makedirs('d/sub')\n"
        "for name in (b'plain', b'line\\nend', b'bad\\xff\\xfe', 'é'.encode(), b'-dash', b' space ', b'n' * 255):\n"
        "    open(b'd/' + name, 'w').write('12')\n"
        "os.symlink('/no/where', 'd/dangling'); os.symlink('sub', 'd/link'); os.mkfifo('d/fifo')\n"
        "socket.socket(socket.AF_UNIX).bind('d/socket')\n"
        "os.chmod('d/plain', 0o4750)\n"
        "os.utime('d/plain', ns=(1, 1_234_567_890_123_456_789))\n"
    )
    python(box, program)
    listing = box.list_directory("d")
    entries = {entry.name: entry for entry in listing.entries}
    assert listing.path == "d"
    assert list(entries) == sorted(entries)
    assert {name: entry.kind for name, entry in entries.items()} == {
        "plain": "f", "line\nend": "f", "bad\udcff\udcfe": "f", "é": "f", "-dash": "f", " space ": "f", "n" * 255: "f",
        "sub": "d", "dangling": "l", "link": "l", "fifo": "p", "socket": "s",
    }  # fmt: skip
    plain, link = entries["plain"], entries["dangling"]
    assert (plain.mode, plain.size, plain.is_dir) == (0o4750, 2, False)
    assert plain.modified_at == pytest.approx(1_234_567_890.123, abs=1e-3)
    assert (link.link_target, link.is_dir, entries["link"].is_dir) == ("/no/where", False, False)
    assert (entries["sub"].is_dir, entries["sub"].size) == (True, None)
    assert box.read_file("d/bad\udcff\udcfe") == b"12"


@pytest.mark.behaviour("file-5")
def test_only_directories_are_listed(box: Sandbox) -> None:
    assert refused(lambda: box.list_directory("/etc/passwd")).errno == errno.ENOTDIR
    assert refused(lambda: box.list_directory("/none")).errno == errno.ENOENT
    shell(box, "mkdir many; cd many; seq -f name%g 20000 | xargs touch", timeout=60)
    assert len(box.list_directory("many").entries) == 20_000


@pytest.mark.behaviour("file-6")
def test_deleting_takes_what_is_named_and_nothing_else(box: Sandbox) -> None:
    shell(box, "mkdir -p keep full/below empty; echo 1 > keep/f; echo 2 > plain; ln -s keep to-keep; mkfifo fifo"
               "; ln -s nowhere dangling; ln -s ../../keep full/below/link; echo 3 > full/below/f")  # fmt: skip
    assert refused(lambda: box.delete_file("full")).errno == errno.ENOTEMPTY
    assert refused(lambda: box.delete_file("none")).errno == errno.ENOENT
    for path in ("plain", "to-keep", "fifo", "dangling", "empty"):
        box.delete_file(path)
    box.delete_file("full", recursive=True)
    assert shell(box, "find . | sort") == ".\n./keep\n./keep/f"
    # A file of the base is gone too, and only inside.
    box.delete_file("/etc/passwd")
    assert refused(lambda: box.read_file("/etc/passwd")).errno == errno.ENOENT
    assert Path("/etc/passwd").exists()


@pytest.mark.behaviour("file-6")
def test_deleting_stops_at_a_mount(box: Sandbox, of_the_host: tuple[str, ...]) -> None:
    assert refused(lambda: box.delete_file("/etc/hostname")).errno in (errno.EBUSY, errno.EXDEV)
    box.write_file("/dev/shm/f", b"x")
    assert refused(lambda: box.delete_file("/dev/shm", recursive=True)).errno in (errno.EBUSY, errno.EXDEV)
    assert box.read_file("/dev/shm/f") == b"x"
    for path in ("/proc", *of_the_host):
        refused(lambda path=path: box.delete_file(path, recursive=True))  # type: ignore[misc]  # binds the loop's value
    assert box.run("ls", ["/usr/bin/env"]).ok


@pytest.mark.behaviour("file-7")
def test_making_directories(box: Sandbox) -> None:
    box.make_directory("a/b/c")
    box.make_directory("a/b/c")
    assert shell(box, "stat -c %a a a/b a/b/c") == "755\n755\n755"
    shell(box, "echo > f")
    assert refused(lambda: box.make_directory("f")).errno == errno.ENOTDIR
    assert refused(lambda: box.make_directory("f/g")).errno == errno.ENOTDIR


@pytest.mark.behaviour("file-8")
def test_files_go_up_and_come_down(box: Sandbox, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(os.urandom(9_000_000))
    source.chmod(0o750)
    os.utime(source, ns=(1, 1_234_567_890_123_456_789))
    box.upload_file(source, "/srv/deep/copy")
    assert shell(box, "stat -c '%a %s %.9Y' /srv/deep/copy") == "750 9000000 1234567890.123456789"
    box.download_file("/srv/deep/copy", back)
    assert back.read_bytes() == source.read_bytes()
    assert (back.stat().st_mode & 0o7777, back.stat().st_mtime_ns) == (0o750, 1_234_567_890_123_456_789)


@pytest.mark.behaviour("file-8")
def test_transfers_of_what_is_no_file_fail(box: Sandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "none", tmp_path, tmp_path / "fifo"):
        with pytest.raises(OSError):
            box.upload_file(path, "/workspace/x")
    shell(box, "mkfifo fifo; mkdir dir")
    for path in ("none", "fifo", "dir", "/dev/zero"):
        refused(lambda path=path: box.download_file(path, tmp_path / "out"))  # type: ignore[misc]
    (tmp_path / "fifo").unlink()
    assert list(tmp_path.iterdir()) == []


def plant(top: Path) -> None:
    """Make a directory of the host that holds one of each."""
    (top / "sub" / "below").mkdir(parents=True)
    (top / "hollow").mkdir()
    for number in range(30):
        (top / "sub" / f"f{number}").write_bytes(b"%d" % number * number)
    (top / "sub" / "below" / "bad\udcff\n").write_bytes(b"odd")
    (top / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (top / "run.sh").chmod(0o755)
    (top / "closed").mkdir()
    (top / "closed" / "f").write_bytes(b"1")
    (top / "link").symlink_to("sub/f3")
    (top / "dangling").symlink_to("/no/where")
    (top / "up").symlink_to("..")
    (top / "closed").chmod(0o500)


def shape(top: Path) -> dict[str, tuple[object, ...]]:
    """Return what a transfer keeps of a directory."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(top.rglob("*")):
        name, info = str(path.relative_to(top)), path.lstat()
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = ("directory", info.st_mode & 0o7777)
        else:
            found[name] = ("file", info.st_mode & 0o7777, info.st_mtime_ns, path.read_bytes())
    return found


@pytest.mark.behaviour("file-9")
def test_directories_go_up_and_come_down(box: Sandbox, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    source.mkdir()
    plant(source)
    os.mkfifo(source / "fifo")
    box.upload_directory(source, "/srv/tree")
    (source / "fifo").unlink()  # such are left out
    assert box.run("/srv/tree/run.sh").stdout == "ran\n"
    assert shell(box, "find /srv/tree -type p | wc -l; find /srv/tree -not -user 0 | wc -l") == "0\n0"
    shell(box, "mkfifo /srv/tree/fifo")
    box.download_directory("/srv/tree", back)
    assert shape(back) == shape(source)
    # A second time it goes over what is there.
    (source / "run.sh").write_text("#!/bin/sh\necho again\n")
    box.upload_directory(source, "/srv/tree")
    assert box.run("/srv/tree/run.sh").stdout == "again\n"


@pytest.mark.behaviour("file-10")
def test_a_download_writes_nothing_outside_its_target(box: Sandbox, tmp_path: Path) -> None:
    target, outside = tmp_path / "target", tmp_path / "outside"
    target.mkdir()
    outside.mkdir()
    (target / "in").symlink_to(outside)  # what was a link on the host is not followed
    (target / "f").symlink_to(outside / "f")
    shell(box, f"mkdir -p tree/in; echo x > tree/in/x; echo y > tree/f; ln -s {outside} tree/out")
    with pytest.raises(OSError):
        box.download_directory("tree", target)
    (target / "in").unlink()
    box.download_directory("tree", target)
    assert list(outside.iterdir()) == []
    assert (target / "in" / "x").read_text() == "x\n"
    assert (target / "f").read_text() == "y\n"
    assert not (target / "f").is_symlink()
    assert os.readlink(target / "out") == str(outside)


@pytest.mark.behaviour("file-11")
def test_paths_are_resolved_inside(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    shell(box, f"ln -s {tmp_path} away; ln -s / top; mkdir -p {tmp_path}; echo inside > {tmp_path}/secret")
    assert box.read_file("away/secret") == b"inside\n"
    box.write_file("away/secret", b"changed")
    box.delete_file("top/etc/passwd")
    assert (tmp_path / "secret").read_text() == "of the host"
    up = "../" * 30
    assert box.read_file(f"{up}{tmp_path}/secret") == b"changed"
    assert refused(lambda: box.read_file("/proc/1/root/etc/hostname")).errno in (errno.EACCES, errno.EPERM)


@pytest.mark.behaviour("file-12")
def test_files_are_moved_with_the_user_s_rights(sandboxes: Sandboxes, needs: Needs, tmp_path: Path) -> None:
    needs("other_users")
    box = sandboxes.create(user="1234:55", working_dir="/tmp")
    python(box, "import os; os.mkdir('/root/closed', 0o700); os.mkdir('/srv/open'); os.chmod('/srv/open', 0o777)",
           user="0")  # fmt: skip
    box.write_file("/srv/open/mine", b"x")
    box.make_directory("/srv/open/dir")
    plant(tmp_path)
    box.upload_directory(tmp_path, "/srv/open/tree")
    assert shell(box, "find /srv/open -mindepth 1 -not '(' -user 1234 -group 55 ')'") == ""
    for call in (
        lambda: box.read_file("/root/closed/f"),
        lambda: box.write_file("/srv/f", b""),
        lambda: box.list_directory("/root/closed"),
        lambda: box.delete_file("/etc/passwd"),
        lambda: box.make_directory("/srv/d"),
        lambda: box.upload_directory(tmp_path, "/srv/tree"),
    ):
        assert refused(call).errno == errno.EACCES


@pytest.mark.behaviour("file-13")
def test_files_and_commands_at_the_same_time(box: Sandbox) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def one(number: int) -> bool:
        data = bytes([number]) * (number * 5000)
        box.write_file(f"/workspace/{number}", data)
        size = told(box, "import os, sys; print(os.stat(sys.argv[1]).st_size)", f"/workspace/{number}")
        return box.read_file(f"/workspace/{number}") == data and size == len(data)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(one, range(40)))
