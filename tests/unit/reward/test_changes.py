"""What is read of two trees: each entry once, however many patterns, and no more than is bounded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from worldfork.content.merged import MergedView
from worldfork.content.stack import LayerStack, Node
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.globs import NO_CLUTTER
from worldfork.reward import changes
from worldfork.reward.changes import Bounds, edits_between

FORM = "trusted" if os.geteuid() == 0 else "user"
BOUNDS = Bounds(files=10, size_bytes=1000, changes=1000, path_bytes=1 << 20, compared_bytes=1 << 20)
TEN = tuple(f"pkg/**/*.{ending}" for ending in ("py", "pyi", "pyx", "pxd", "c", "h", "txt", "md", "rst", "toml"))


def layer(place: Path, **files: str) -> Path:
    for name, text in files.items():
        path = place / "workspace" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return place


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return layer(tmp_path / "start", a_dot_py="aaa", pkg__b_dot_py="bbb", pkg__data="big data")


@pytest.fixture
def end(tmp_path: Path) -> Path:
    place = tmp_path / "end"
    (place / "workspace" / "pkg").mkdir(parents=True)
    return place


def between(start: Path, *ends: Path, patterns: tuple[str, ...] = TEN, bounds: Bounds = BOUNDS) -> Edits:
    return edits_between(MergedView([start], FORM), MergedView([*ends, start], FORM), patterns, bounds)


@pytest.mark.parametrize("patterns", [("**/*.py",), ("**",)])
def test_what_tools_leave_pushes_no_change_out(start: Path, end: Path, patterns: tuple[str, ...]) -> None:
    clutter = {f"_dot_venv__n{number}_dot_py": "n" * 20 for number in range(30)}
    layer(end, pkg__b_dot_py="mended", pkg__new_dot_py="new", a_file__x__y__z_dot_py="deep", **clutter)
    for name in ("A", "Env"):
        layer(end, **{f"{name}__pyvenv_dot_cfg": "", f"{name}__bin__n_dot_py": "n" * 900})
    (end / "workspace" / "a.py").symlink_to("/etc/passwd")
    edits = between(start, end, patterns=patterns)
    assert {"pkg/b.py", "pkg/new.py", "a_file/x/y/z.py"} < set(edits.files)
    assert edits.removed == ("a.py",)
    assert ("a.py", "link") in edits.dropped
    assert len(edits.files) == BOUNDS.files
    assert {why for path, why in edits.dropped if path.startswith(".venv")} == {"files"}


def test_what_finds_no_room_stays_as_the_start_has_it(start: Path, end: Path) -> None:
    layer(start, **{f"pkg__old{number}_dot_py": "old" for number in range(12)})
    layer(end, **{f"pkg__old{number}_dot_py": "new" for number in range(12)}, pkg__b_dot_py="b" * 2000)
    edits = between(start, end)
    assert len(edits.files) == BOUNDS.files
    assert edits.removed == ()
    assert [why for _, why in edits.dropped] == ["bytes", "files", "files"]
    edits = between(start, end, bounds=BOUNDS._replace(files=20))
    assert (len(edits.files), edits.removed, edits.dropped) == (12, (), (("pkg/b.py", "bytes"),))


@pytest.mark.parametrize("beside", ["pkg", "pkg/zz", ".venv"])
def test_files_of_the_start_are_found_among_any_number_of_others(start: Path, end: Path, beside: str) -> None:
    layer(start, pkg__gone_dot_py="gone", zzz__c_dot_py="ccc")
    layer(end, pkg__b_dot_py="mended", zzz__c_dot_py="mended")
    layer(end, **{f"{beside}__n{number}_dot_py": "n" for number in range(500)})
    (end / "workspace" / "pkg" / "gone.py").symlink_to("/nowhere")
    edits = between(start, end, patterns=("**/*.py",), bounds=BOUNDS._replace(changes=50))
    assert set(edits.files) >= {"pkg/b.py", "zzz/c.py"}
    assert edits.removed == ("pkg/gone.py",)
    assert (f"{beside}/**", "files") in edits.dropped


def test_what_patterns_take_out_whole_is_not_looked_at(start: Path, end: Path) -> None:
    layer(end, pkg__b_dot_py="mended", **{f"pkg__node_modules__n{number}_dot_py": "n" for number in range(50)})
    edits = between(start, end, patterns=("**", *NO_CLUTTER), bounds=BOUNDS._replace(changes=20))
    assert (list(edits.files), edits.dropped) == (["pkg/b.py"], ())


def test_ten_patterns_cost_one_look_at_each_directory(start: Path, end: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        layer(end, **{f"pkg__d{number}__n_dot_py": "n"})
    listed: list[str] = []
    children = LayerStack.children

    def counted(self: LayerStack, parent: Node) -> Iterator[Node]:
        listed.append(parent.path)
        return children(self, parent)

    monkeypatch.setattr(LayerStack, "children", counted)
    edits = between(start, end, patterns=(*TEN, "pkg/d1/**", "pkg/d2/**/*.py"))
    assert len(edits.files) == BOUNDS.files
    # The two trees have pkg in common.
    assert sorted(listed) == sorted([*[f"workspace/pkg/d{number}" for number in range(50)], *["workspace/pkg"] * 2])


def test_too_many_entries_below_one_directory_leave_what_is_elsewhere(start: Path, end: Path) -> None:
    layer(end, a_dot_py="new", src__c_dot_py="c", **{f"pkg__many__n{number}_dot_py": "n" for number in range(30)})
    patterns = ("a.py", "pkg/**/*.py", "src/*.py")
    edits = between(start, end, patterns=patterns, bounds=BOUNDS._replace(changes=20))
    assert dict(edits.files) == {"a.py": EditedFile(b"new"), "src/c.py": EditedFile(b"c")}
    assert edits.dropped == (("pkg/many/**", "files"),)
    assert len(between(start, end, patterns=patterns, bounds=BOUNDS._replace(files=100)).files) == 32


def test_what_is_looked_at_is_bounded_over_all_directories(start: Path, end: Path) -> None:
    names = [f"d{number}" for number in range(10)]
    layer(end, **{f"{name}__n{number}_dot_py": "n" for name in names for number in range(30)})
    layer(end, e__n_dot_py="n")
    looked: list[str] = []
    counted = changes._Looking._take
    patch = pytest.MonkeyPatch()
    patch.setattr(changes._Looking, "_take", lambda self, size: (looked.append(""), counted(self, size))[1])
    try:
        edits = between(
            start, end, patterns=(*[f"{name}/*.py" for name in names], "e/*.py"), bounds=BOUNDS._replace(changes=20)
        )
    finally:
        patch.undo()
    assert not edits.files
    assert len(edits.dropped) == 11
    assert len(looked) < 5 * 20 + 10


def test_deep_paths_count_by_their_length(start: Path, end: Path) -> None:
    deep = end / "workspace" / "pkg"
    for _ in range(12):
        deep /= "d" * 200
        deep.mkdir()
    (deep / "n.py").write_text("n")
    assert between(start, end).files
    edits = between(start, end, bounds=BOUNDS._replace(path_bytes=5000))
    assert not edits.files
    assert [why for _, why in edits.dropped] == ["files"]
    assert edits.dropped[0][0].startswith("pkg/ddd")


def test_attributes_count_by_their_length(start: Path, end: Path) -> None:
    layer(end, pkg__n_dot_py="n")
    try:
        os.setxattr(end / "workspace" / "pkg" / "n.py", "user.much", bytes(3000))
    except OSError as error:
        pytest.skip(f"no attributes here: {error}")
    assert between(start, end).files
    assert not between(start, end, bounds=BOUNDS._replace(path_bytes=2000)).files


def test_names_that_lie_in_the_start_are_not_counted(start: Path, end: Path) -> None:
    layer(start, **{f"pkg__old__n{number}_dot_py": "n" for number in range(30)})
    layer(end, pkg__old__n3_dot_py="changed")
    edits = between(start, end, bounds=BOUNDS._replace(changes=3))
    assert list(edits.files) == ["pkg/old/n3.py"]
    assert not edits.dropped


def test_files_that_nobody_asks_for_are_not_read(start: Path, end: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer(end, pkg__data="other  !", pkg__b_dot_py="BBB")
    read: list[str] = []
    pieces = MergedView.pieces

    def counted(view: MergedView, node: Node) -> Iterator[bytes]:
        read.append(node.path)
        return pieces(view, node)

    monkeypatch.setattr(MergedView, "pieces", counted)
    assert list(between(start, end).files) == ["pkg/b.py"]
    assert set(read) == {"workspace/pkg/b.py"}


def test_behind_what_may_be_compared_a_file_counts_as_another(start: Path, end: Path) -> None:
    layer(end, pkg__b_dot_py="bbb")
    assert between(start, end).empty
    assert list(between(start, end, bounds=BOUNDS._replace(compared_bytes=2)).files) == ["pkg/b.py"]


def test_a_directory_of_the_task_that_is_none_any_more(start: Path, tmp_path: Path) -> None:
    place = tmp_path / "linked"
    place.mkdir()
    (place / "workspace").symlink_to("/tmp")
    edits = between(start, place, patterns=("**",))
    assert (dict(edits.files), edits.removed, edits.dropped) == ({}, ("a.py", "pkg/b.py", "pkg/data"), ())
