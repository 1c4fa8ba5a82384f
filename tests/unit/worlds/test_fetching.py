"""What is unpacked of an archive from a registry, and what is refused."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from worldfork.worlds import fetching


def archive(path: Path, *members: tuple[str, bytes | str, int]) -> str:
    """Write a tar of (name, content, mode); a text as content makes a link to it, and a name with `/` a directory."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content, mode in members:
            member = tarfile.TarInfo(name)
            member.mode = mode
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
            elif name.endswith("/"):
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return str(path)


def tree(top: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in top.rglob("*") if path.is_file())
    return {str(path.relative_to(top)): (path.read_bytes(), path.stat().st_mode & 0o7777) for path in files}


def test_the_one_directory_is_left_out_and_modes_are_plain(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.tar.gz",
        ("a-1/", b"", 0o700),
        ("a-1/setup.py", b"one", 0o4775),
        ("a-1/src/b.py", b"two", 0o600),
    )
    assert fetching.unpack(path, str(tmp_path / "out")) == 2
    assert tree(tmp_path / "out") == {"setup.py": (b"one", 0o755), "src/b.py": (b"two", 0o644)}


def test_a_link_becomes_what_it_leads_to_within_the_archive(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.tar.gz",
        ("a-1/real.py", b"text", 0o644),
        ("a-1/same.py", "real.py", 0o777),
        ("a-1/out.py", "/etc/hostname", 0o777),
        ("a-1/above.py", "../../../etc/hostname", 0o777),
    )
    fetching.unpack(path, str(tmp_path / "out"))
    assert tree(tmp_path / "out") == {"real.py": (b"text", 0o644), "same.py": (b"text", 0o644)}


def test_what_is_neither_file_nor_directory_is_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for name, kind in (("a-1/pipe", tarfile.FIFOTYPE), ("a-1/device", tarfile.CHRTYPE)):
            member = tarfile.TarInfo(name)
            member.type = kind
            tar.addfile(member)
        member = tarfile.TarInfo("a-1/file")
        tar.addfile(member, io.BytesIO())
    assert fetching.unpack(str(tmp_path / "a.tar.gz"), str(tmp_path / "out")) == 1
    assert set(tree(tmp_path / "out")) == {"file"}


@pytest.mark.parametrize("name", ["a-1/../../escaped", "/escaped", "a-1/b\\..\\escaped"])
def test_a_path_that_leaves_its_directory_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = archive(tmp_path / "a.tar.gz", (name, b"x", 0o644))
    with pytest.raises(SystemExit):
        fetching.unpack(path, str(tmp_path / "out"))
    assert "leaves its directory" in capsys.readouterr().err
    assert not (tmp_path / "escaped").exists()


def test_zip_archives_are_unpacked_alike(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("a-1/src/b.py", b"two")
    assert fetching.unpack(str(tmp_path / "a.zip"), str(tmp_path / "out")) == 1
    assert tree(tmp_path / "out") == {"src/b.py": (b"two", 0o644)}


@pytest.mark.parametrize(
    ("name", "limit", "value"), [("entries", "MAX_ENTRIES", 2), ("bytes", "MAX_BYTES", 5)], ids=["entries", "bytes"]
)
def test_an_archive_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: str, value: int
) -> None:
    monkeypatch.setattr(fetching, limit, value)
    path = archive(tmp_path / "a.tar.gz", *((f"a-1/{number}", b"xx", 0o644) for number in range(3)))
    with pytest.raises(SystemExit):
        fetching.unpack(path, str(tmp_path / "out"))


RIGHT = hashlib.sha256(b"content").hexdigest()


@pytest.mark.parametrize(
    ("asked", "told", "passes"),
    [
        ("", ("sha256", RIGHT), True),
        (RIGHT.upper(), ("", None), True),
        ("", ("md5", hashlib.md5(b"content").hexdigest()), True),
        ("0" * 64, ("sha256", RIGHT), False),
        ("", ("sha256", "0" * 64), False),
        ("", ("sha512", "0" * 128), False),
    ],
)
def test_a_file_is_what_the_caller_and_the_registry_say(
    tmp_path: Path, asked: str, told: tuple[str, str | None], passes: bool
) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(b"content")
    link = SimpleNamespace(hash_name=told[0], hash=told[1])
    check: Callable[[], str] = lambda: fetching.checked(str(path), asked, link)  # noqa: E731
    if passes:
        assert check() == RIGHT
        return
    with pytest.raises(SystemExit):
        check()
