"""What a stack of layers shows, and that nobody gets out of it."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from worldfork.content.compare import compare
from worldfork.content.layer import walk
from worldfork.content.merge import merge_layers
from worldfork.content.merged import MergedView, state_digest
from worldfork.core.errors import Corrupt

FORM = "trusted" if os.geteuid() == 0 else "user"


def fill(layer: Path, **content: object) -> Path:
    """Make a directory: None is a whiteout, a Path a link, a mapping a directory, anything else a file's content."""
    layer.mkdir(exist_ok=True)
    for name, what in content.items():
        path = layer / name
        if isinstance(what, dict):
            fill(path, **what)
        elif isinstance(what, Path):
            path.symlink_to(what)
        elif what is None:
            os.mknod(path, 0o020000, 0)
        else:
            path.write_text(str(what))
    return layer


def mark(path: Path, name: str, value: str) -> None:
    os.setxattr(path, f"{FORM}.overlay.{name}", value.encode())


def read(view: MergedView, path: str) -> str:
    with open(view.open(path)) as file:
        return file.read()


def listed(view: MergedView, path: str = "") -> list[str]:
    return [entry.path for entry in view.list(path)]


def test_the_uppermost_is_seen_and_the_rest_merged(tmp_path: Path) -> None:
    lower = fill(tmp_path / "lower", both="old", below="below", sub={"x": "1", "y": "2"}, gone="g", turned={"in": "1"})
    upper = fill(tmp_path / "upper", both="new", sub={"y": "3", "z": "4"}, gone=None, turned="a file")
    view = MergedView([upper, lower], FORM)
    assert listed(view) == ["below", "both", "sub", "turned"]
    assert listed(view, "sub") == ["sub/x", "sub/y", "sub/z"]
    assert [read(view, path) for path in ("both", "/below", "sub/y", "//sub//x")] == ["new", "below", "3", "1"]
    assert view.lookup("gone") is None
    assert view.lookup("turned/in") is None
    assert view.lookup("sub/none") is None
    root = view.lookup("")
    assert root is not None
    assert root.kind == "d"
    assert [entry.path for entry in view.walk()] == [
        "", "below", "both", "sub", "sub/x", "sub/y", "sub/z", "turned",
    ]  # fmt: skip


def test_nothing_shows_through_an_opaque_directory(tmp_path: Path) -> None:
    lowest = fill(tmp_path / "lowest", sub={"old": "1"})
    lower = fill(tmp_path / "lower", sub={"new": "2"})
    upper = fill(tmp_path / "upper", sub={"newest": "3"})
    mark(lower / "sub", "opaque", "y")
    assert listed(MergedView([upper, lower, lowest], FORM), "sub") == ["sub/new", "sub/newest"]


@pytest.mark.parametrize("hiding", [None, "a file", Path("a-link")])
def test_what_is_no_directory_ends_a_stack(tmp_path: Path, hiding: object) -> None:
    lowest = fill(tmp_path / "lowest", sub={"old": "1"})
    middle = fill(tmp_path / "middle", sub=hiding)
    upper = fill(tmp_path / "upper", sub={"new": "3"})
    assert listed(MergedView([upper, middle, lowest], FORM), "sub") == ["sub/new"]


@pytest.mark.root
def test_redirects(tmp_path: Path) -> None:
    lowest = fill(tmp_path / "lowest", a={"b": {"c": {"file": "1"}}}, other={"in": "o"})
    middle = fill(tmp_path / "middle", a={"moved": {"more": "2"}})
    mark(middle / "a" / "moved", "redirect", "b")
    upper = fill(tmp_path / "upper", away={"c": {"third": "3"}}, a={"b": None, "moved": None})
    mark(upper / "away", "redirect", "/a/moved")
    assert listed(MergedView([middle, lowest], FORM), "a") == ["a/b", "a/moved"]
    assert read(MergedView([middle, lowest], FORM), "a/moved/c/file") == "1"
    view = MergedView([upper, middle, lowest], FORM)
    assert listed(view, "away") == ["away/c", "away/more"]
    assert listed(view, "away/c") == ["away/c/file", "away/c/third"]
    assert listed(view, "a") == []


@pytest.mark.parametrize("redirect", ["/a//b", "a/b", "/", "..", ".", "/a/../b", "/a/."])
def test_a_redirect_that_no_overlay_follows(tmp_path: Path, redirect: str) -> None:
    lower = fill(tmp_path / "lower", a={"b": {}})
    upper = fill(tmp_path / "upper", a={})
    mark(upper / "a", "redirect", redirect)
    with pytest.raises(Corrupt):
        MergedView([upper, lower], FORM).list("a")


@pytest.mark.root
@pytest.mark.parametrize("look", ["walk", "merge", "compare", "digest"])
def test_a_directory_is_moved_to_one_place(tmp_path: Path, look: str) -> None:
    """Four paths in each of thirty layers would be a thousand million."""
    layers = []
    for number in range(30):
        layer = fill(tmp_path / str(number), x={"a": {}, "b": {}})
        if number < 29:
            mark(layer / "x" / "a", "redirect", "/x")
            mark(layer / "x" / "b", "redirect", "/x")
        layers.append(layer)
    view = MergedView(layers, FORM)
    looks: dict[str, Callable[[], object]] = {
        "walk": lambda: list(view.walk()),
        "merge": lambda: merge_layers(layers, tmp_path / "merged", FORM),
        "compare": lambda: list(compare(MergedView(layers[-1:], FORM), view)),
        "digest": lambda: state_digest(view),
    }
    with pytest.raises(Corrupt, match="shown both as"):
        looks[look]()


def test_a_user_s_layers_have_no_redirects(tmp_path: Path) -> None:
    lower, upper = fill(tmp_path / "lower", a={}), fill(tmp_path / "upper", b={})
    os.setxattr(upper / "b", "user.overlay.redirect", b"a")
    with pytest.raises(Corrupt):
        MergedView([upper, lower], "user").lookup("b")


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("link", "dir/file"),
        ("absolute", "dir/file"),
        ("dir/up", "top"),
        ("out", "top"),
        ("../../top", "top"),
        ("dirlink/file", "dir/file"),
        ("dirlink/../top", "top"),
        ("chain", "dir/file"),
        ("dir/./file", "dir/file"),
        ("/", ""),
        ("..", ""),
        ("dirlink/", "dir"),
    ],
)
def test_links_are_followed_inside(tmp_path: Path, path: str, where: str) -> None:
    layer = fill(
        tmp_path / "layer",
        top="t",
        dir={"file": "f", "up": Path("../top")},
        link=Path("dir/file"),
        absolute=Path("/dir/file"),
        out=Path("../../../../../top"),
        dirlink=Path("dir"),
        chain=Path("absolute"),
    )
    assert MergedView([layer], FORM).resolve(path).path == where


def test_a_link_at_the_end_may_stay(tmp_path: Path) -> None:
    layer = fill(tmp_path / "layer", dir={"file": "f"}, link=Path("dir"), away=Path("/etc/passwd"))
    view = MergedView([layer], FORM)
    assert view.resolve("link", follow=False).path == "link"
    assert view.resolve("link/file", follow=False).path == "dir/file"
    with pytest.raises(OSError) as caught:
        view.resolve("away")
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(OSError) as caught:
        view.open("away")
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("loop", errno.ELOOP),
        ("file/in", errno.ENOTDIR),
        ("file/", errno.ENOTDIR),
        ("file/..", errno.ENOTDIR),
        ("none", errno.ENOENT),
        ("none/..", errno.ENOENT),
        ("x" * 5000, errno.ENOENT),
    ],
)
def test_what_leads_nowhere(tmp_path: Path, path: str, number: int) -> None:
    layer = fill(tmp_path / "layer", file="f", loop=Path("pool"), pool=Path("loop"))
    with pytest.raises(OSError) as caught:
        MergedView([layer], FORM).resolve(path)
    assert caught.value.errno == number


def test_only_files_are_opened(tmp_path: Path) -> None:
    layer = fill(tmp_path / "layer", dir={})
    os.mkfifo(layer / "pipe")
    view = MergedView([layer], FORM)
    for path, number in (("pipe", errno.EINVAL), ("dir", errno.EISDIR), ("none", errno.ENOENT)):
        with pytest.raises(OSError) as caught:
            view.open(path)
        assert caught.value.errno == number
    with pytest.raises(OSError) as caught:
        view.list("pipe")
    assert caught.value.errno == errno.ENOTDIR


def test_hard_links_of_one_layer_are_one_file(tmp_path: Path) -> None:
    lower = fill(tmp_path / "lower", b="1", split="1")
    for name in ("a", "sub"):
        os.link(lower / "b", lower / name)
    os.link(lower / "split", lower / "part")
    upper = fill(tmp_path / "upper", split="2")
    links = {entry.path: entry.link for entry in MergedView([upper, lower], FORM).walk()}
    assert links == {"": "", "a": "", "b": "a", "part": "", "split": "", "sub": "a"}


def test_a_state_is_the_same_however_it_came_about(tmp_path: Path) -> None:
    base = fill(tmp_path / "base", dir={"file": "content", "link": Path("file")}, gone="g")
    subprocess.run(["cp", "-a", base / "dir", tmp_path / "copy"], check=True)
    copied = fill(tmp_path / "copied", dir=None, gone=None)
    (tmp_path / "copy").rename(copied / "moved")
    flat = fill(tmp_path / "flat")
    subprocess.run(["cp", "-a", base / "dir", flat / "moved"], check=True)
    os.utime(flat / "moved", ns=(1, 1))
    expected = state_digest(MergedView([flat], FORM))
    assert state_digest(MergedView([copied, base], FORM)) == expected
    assert expected.startswith("b3:")
    if FORM == "trusted":
        renamed = fill(tmp_path / "renamed", moved={}, dir=None, gone=None)
        mark(renamed / "moved", "redirect", "dir")
        assert state_digest(MergedView([renamed, base], FORM)) == expected


@pytest.mark.parametrize("change", ["content", "mode", "time", "name", "attribute", "base"])
def test_another_state_has_another_digest(tmp_path: Path, change: str) -> None:
    layer = fill(tmp_path / "layer", file="content")
    os.utime(layer / "file", ns=(0, 5))
    before = state_digest(MergedView([layer], FORM))
    if change == "content":
        (layer / "file").write_text("CONTENT")
        os.utime(layer / "file", ns=(0, 5))
    elif change == "mode":
        (layer / "file").chmod(0o600)
    elif change == "time":
        os.utime(layer / "file", ns=(0, 6))
    elif change == "name":
        (layer / "file").rename(layer / "another")
    elif change == "attribute":
        os.setxattr(layer, "user.k", b"v")
    assert state_digest(MergedView([layer], FORM), "host" if change == "base" else "") != before


def test_known_content_is_not_read_again(tmp_path: Path) -> None:
    lower, upper = fill(tmp_path / "lower", a="1", sub={"b": "2"}), fill(tmp_path / "upper", sub={"c": "3"})
    known = [{found.entry.path: found.entry.content for found in walk(layer, FORM)} for layer in (upper, lower)]
    expected = state_digest(MergedView([upper, lower], FORM))
    for path in (lower / "a", lower / "sub" / "b"):
        info = path.stat()
        path.write_text("X")
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert state_digest(MergedView([upper, lower], FORM)) != expected
    assert state_digest(MergedView([upper, lower], FORM, known)) == expected
    assert state_digest(MergedView([upper, lower], FORM, [None, known[1]])) == expected


def test_a_layer_that_is_gone_is_told(tmp_path: Path) -> None:
    view = MergedView([fill(tmp_path / "upper", a="1"), tmp_path / "gone"], FORM)
    assert read(view, "a") == "1"
    for look in (lambda: view.lookup("b"), lambda: list(view.walk()), lambda: view.resolve("b")):
        with pytest.raises(Corrupt):
            look()
