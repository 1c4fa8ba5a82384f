"""What differs between two merged trees, against what diff(1) says."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from worldfork.content import compare as module
from worldfork.content.compare import Change, compare, patch, shown_path
from worldfork.content.merged import MergedView
from worldfork.content.stack import Node

FORM = "trusted" if os.geteuid() == 0 else "user"


def tree(place: Path, **content: object) -> Path:
    """Make a directory: None is a whiteout, a Path a link, a mapping a directory, anything else a file's content."""
    place.mkdir(exist_ok=True)
    for name, what in content.items():
        path = place / name
        if isinstance(what, dict):
            tree(path, **what)
        elif isinstance(what, Path):
            path.symlink_to(what)
        elif what is None:
            os.mknod(path, 0o020000, 0)
        else:
            path.write_bytes(what if isinstance(what, bytes) else str(what).encode())
        os.utime(path, ns=(5, 5), follow_symlinks=False)
    os.utime(place, ns=(5, 5))
    return place


def view(*layers: Path) -> MergedView:
    return MergedView(layers, FORM)


def changes(
    old: MergedView, new: MergedView, path: str = "", **options: bool
) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(change.how, change.path, change.what) for change in compare(old, new, path, **options)]


def test_what_was_added_changed_and_removed(tmp_path: Path) -> None:
    old = tree(
        tmp_path / "old", kept="k", edited="a", gone="g", link=Path("a"), sub={"in": "1", "out": "2"}, turned="x"
    )
    new = tree(
        tmp_path / "new",
        edited="b",
        gone=None,
        link=Path("b"),
        sub={"out": None},
        turned={"into": "y"},
        fresh={"f": "z"},
    )
    os.unlink(new / "turned" / "into")
    (new / "turned" / "into").write_text("y")
    assert changes(view(old), view(new, old)) == [
        ("changed", "edited", ("content",)),
        ("added", "fresh", ()),
        ("added", "fresh/f", ()),
        ("removed", "gone", ()),
        ("changed", "link", ("target",)),
        ("removed", "sub/out", ()),
        ("changed", "turned", ("kind",)),
        ("added", "turned/into", ()),
    ]
    backwards = changes(view(new, old), view(old))
    assert ("removed", "fresh/f", ()) in backwards
    assert ("added", "gone", ()) in backwards
    assert [change.new_bytes for change in compare(view(old), view(new, old), "fresh")] == [None, 1]


def test_facts_that_differ(tmp_path: Path) -> None:
    old, new = (tree(tmp_path / name, a="1", b="1", c="1", d={}, e="same") for name in ("old", "new"))
    (new / "a").chmod(0o600)
    os.setxattr(new / "b", "user.k", b"v")
    os.utime(new / "c", ns=(5, 6))
    os.utime(new / "d", ns=(5, 6))
    expected = [("changed", "a", ("mode",)), ("changed", "b", ("attributes",))]
    assert changes(view(old), view(new)) == expected
    assert changes(view(old), view(new), times=True) == [*expected, ("changed", "c", ("time",))]


@pytest.mark.root
def test_owners_and_devices(tmp_path: Path) -> None:
    old, new = (tree(tmp_path / name, a="1", d={}) for name in ("old", "new"))
    os.chown(new / "a", 1, 2)
    for place, minor in ((old, 3), (new, 5)):
        os.mknod(place / "device", 0o020600, os.makedev(1, minor))
    assert changes(view(old), view(new)) == [("changed", "a", ("owner",)), ("changed", "device", ("device",))]


def test_one_size_and_other_bytes(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3 << 20)
    other = data[:-1] + bytes([data[-1] ^ 1])
    old, same, changed = (
        tree(tmp_path / name, file=content) for name, content in (("a", data), ("b", data), ("c", other))
    )
    assert changes(view(old), view(same)) == []
    assert changes(view(old), view(changed)) == [("changed", "file", ("content",))]


def test_what_lies_in_a_shared_layer_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tree(tmp_path / "base", big={"a": "1", "sub": {"b": "2"}}, own={"c": "3"})
    one, other = tree(tmp_path / "one", own={"d": "4"}), tree(tmp_path / "other", own={"d": "5"})
    listed: list[str] = []
    children = MergedView.children

    def noting(self: MergedView, node: module.Node) -> object:
        listed.append(node.path)
        return children(self, node)

    monkeypatch.setattr(MergedView, "children", noting)
    assert changes(view(one, base), view(other, base)) == [("changed", "own/d", ("content",))]
    assert sorted(listed) == ["", "", "own", "own"]


@pytest.mark.root
def test_directories_that_go_on_in_other_layers_are_looked_at(tmp_path: Path) -> None:
    lower, other = (tree(tmp_path / name, origin={"file": name}) for name in ("lower", "other"))
    upper = tree(tmp_path / "upper", outer={"inner": {}})
    os.setxattr(upper / "outer", "trusted.overlay.opaque", b"y")
    os.setxattr(upper / "outer" / "inner", "trusted.overlay.redirect", b"/origin")
    assert changes(view(upper, lower), view(upper, other), "outer") == [("changed", "outer/inner/file", ("content",))]


def test_part_of_a_tree(tmp_path: Path) -> None:
    old, new = tree(tmp_path / "old", a={"x": "1"}, b="1"), tree(tmp_path / "new", a={"x": "2", "y": "3"}, b="2")
    assert changes(view(old), view(new), "a") == [("changed", "a/x", ("content",)), ("added", "a/y", ())]
    assert changes(view(old), view(new), "a/x") == [("changed", "a/x", ("content",))]
    assert changes(view(old), view(new), "none") == []


def patch_of(tmp_path: Path, before: object, after: object) -> bytes:
    pairs = [(tmp_path / "old", before), (tmp_path / "new", after)]
    old, new = (view(tree(place, **({} if content is None else {"f": content}))) for place, content in pairs)
    (change,) = compare(old, new)
    return patch(old, new, change)


LINES = [f"line {number}\n" for number in range(60)]
TEXTS = {
    "one line": ("".join(LINES), "".join([*LINES[:30], "other\n", *LINES[31:]])),
    "the first": ("".join(LINES), "".join(["first\n", *LINES])),
    "the last": ("".join(LINES), "".join(LINES[:-1])),
    "no end of line": ("a\nb\n", "a\nb"),
    "no end before": ("a\nb", "a\nb\nc"),
    "two places": ("".join(LINES), "".join([*LINES[:5], "x\n", *LINES[6:50], *LINES[52:]])),
    "carriage returns": ("a\r\nb\rc\n", "a\r\nb\rd\n"),
    "to nothing": ("a\n", ""),
    "from nothing": ("", "a\nb\n"),
    "repeated lines": ("x\n" * 20, "x\n" * 25),
}


@pytest.mark.skipif(not (shutil.which("patch") and shutil.which("diff")), reason="needs patch(1) and diff(1)")
@pytest.mark.parametrize("name", TEXTS)
def test_a_patch_turns_one_text_into_the_other(tmp_path: Path, name: str) -> None:
    before, after = TEXTS[name]
    text = patch_of(tmp_path, before, after)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "f").write_text(before, newline="")
    subprocess.run(["patch", "-p1", "--binary"], cwd=tmp_path / "work", input=text, check=True, capture_output=True)
    assert (tmp_path / "work" / "f").read_text() == Path(tmp_path / "new" / "f").read_text()
    said = subprocess.run(["diff", "-u", "old/f", "new/f"], cwd=tmp_path, capture_output=True, check=False).stdout
    assert text.splitlines()[2:] == said.splitlines()[2:]


def test_patches_of_files_that_come_and_go(tmp_path: Path) -> None:
    assert patch_of(tmp_path, None, "a\n") == b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+a\n"
    (tmp_path / "new" / "f").unlink()
    assert patch_of(tmp_path, "a\n", None) == b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (b"a\0", b"b\0", b"Binary files a/f and b/f differ\n"),
        (b"a" * (module.PATCH_BYTES + 1), b"", b"Files a/f and b/f differ, and are too large to be shown\n"),
        (b"", b"\n" * 30_000, b"Files a/f and b/f differ in too many lines to be shown\n"),
        ({"x": "1"}, "text\n", b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+text\n"),
    ],
)
def test_what_is_no_short_text_is_said_so(tmp_path: Path, before: object, after: object, said: bytes) -> None:
    pairs = [(tmp_path / "old", before), (tmp_path / "new", after)]
    old, new = (view(tree(place, f=content)) for place, content in pairs)
    assert patch(old, new, next(iter(compare(old, new)))) == said


def test_no_patch_where_no_content_changed(tmp_path: Path) -> None:
    old, new = (view(tree(tmp_path / name, a="1", d={})) for name in ("old", "new"))
    (tmp_path / "new" / "a").chmod(0o600)
    (change,) = compare(old, new)
    assert patch(old, new, change) == b""
    node = new.node("d")
    assert patch(old, new, Change("d", "added", (), None, node)) == b""


@pytest.mark.user
def test_files_that_are_closed_to_their_user_are_compared_all_the_same(tmp_path: Path) -> None:
    old, new = (view(tree(tmp_path / name, same="1\n", other=f"{name}\n")) for name in ("old", "new"))
    for place in ("old", "new"):
        for name in ("same", "other"):
            (tmp_path / place / name).chmod(0)
    (change,) = compare(old, new)
    assert (change.path, change.what) == ("other", ("content",))
    assert b"-old\n+new\n" in patch(old, new, change)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("plain/é b", "plain/é b".encode()),
        ("a\nb", b'"a\\nb"'),
        ('say "x"', b'"say \\"x\\""'),
        ("\udcff\udcfe", b'"\\377\\376"'),
        ("a\x1b[31m", b'"a\\033[31m"'),
        ("back\\slash", b'"back\\\\slash"'),
    ],
)
def test_a_path_is_one_line(path: str, shown: bytes) -> None:
    assert shown_path(path) == shown


def test_directories_that_nobody_wants_are_not_listed_and_contents_may_be_compared_elsewhere(tmp_path: Path) -> None:
    old = tree(tmp_path / "old", same="aaa", sub={"x": "1"}, gone={"y": "1"})
    new = tree(tmp_path / "new", same="bbb", sub={"x": "2"}, gone=None, fresh={"z": "3"})
    asked: list[str] = []

    def enters(one: Node | None, other: Node | None) -> bool:
        path = (other or one or view(new).stack.root()).path
        asked.append(path)
        return path in ("", "sub")

    found = compare(view(old), view(new, old), enters=enters, holds=lambda one, other: other.path == "same")
    assert [(change.how, change.path) for change in found] == [
        ("added", "fresh"),
        ("removed", "gone"),
        ("changed", "sub/x"),
    ]
    assert asked == ["", "fresh", "gone", "sub"]
