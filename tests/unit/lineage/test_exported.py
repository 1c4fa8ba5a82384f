"""Copies of an upper that come whole each time, as from a machine: only what changed is kept, and it is all there."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.overlays import ExportingStack, Stack, mounting
from tests.trees import Operation, Program, differences, live

from worldfork.core.remove import remove_tree
from worldfork.lineage import exported
from worldfork.lineage.exported import whole_copy

FORMS = ("trusted", "user") if os.geteuid() == 0 else ("user",)


@pytest.fixture(scope="module")
def mounts() -> Iterator[Program]:
    with mounting() as running:
        yield running


@pytest.fixture
def directory(home: Path) -> Iterator[Path]:
    """On the disk that carries homes, for not every file system carries an upper."""
    made = Path(tempfile.mkdtemp(prefix="exported-", dir=home))
    yield made
    remove_tree(made)


@pytest.fixture(params=FORMS)
def stack(mounts: Program, directory: Path, request: pytest.FixtureRequest) -> Iterator[Stack]:
    made = ExportingStack(mounts, directory, str(request.param))
    yield made
    made.end()


def copy_after(stack: Stack, *operations: Operation) -> None:
    """Do something and check the copy of it."""
    expected = stack.do(*operations)
    stack.copy()
    lines = differences(live(expected, stack.form), live(stack.copied(), stack.form))
    assert not lines, "\n".join(lines)


def test_a_second_copy_holds_only_the_change(stack: Stack) -> None:
    stack.do(("write", "big", 1, 100_000, "create"), ("mkdir", "d", 0o755), ("write", "d/x", 1, 9, "create"))
    first = stack.copy()
    copy_after(stack, ("write", "d/y", 2, 5000, "create"))
    assert first.whole
    assert {path.name for path in stack.copies[0].rglob("*")} == {"d", "y"}
    assert len(stack.copies) == 2


def test_without_a_change_nothing_is_written(stack: Stack) -> None:
    stack.do(
        ("write", "a", 1, 9, "create"), ("link", "a", "base/b"), ("remove", "base/sub/deep"), ("mkdir", "d", 0o700),
        ("symlink", "l", "a"), ("fifo", "p"), ("sparse", "holes", 6, 3_000_000), ("set_xattr", "a", "user.k", "v"),
    )  # fmt: skip
    assert stack.copy().changed
    assert not stack.copy().changed
    assert len(stack.copies) == 1


@pytest.mark.parametrize(
    "change",
    [
        ("chmod", "a", 0o600),
        ("utime", "a", 5_000_000_001),
        ("utime", "d", 5_000_000_001),
        ("set_xattr", "a", "user.k", "w"),
        ("remove", "l"),
        ("remake", "a"),
    ],
)
def test_a_change_of_anything_is_one(stack: Stack, change: Operation) -> None:
    stack.do(("write", "a", 1, 9, "create"), ("mkdir", "d", 0o700), ("symlink", "l", "a"))
    stack.copy()
    copy_after(stack, change)
    assert len(stack.copies) == 2


def test_removed_entries_stay_removed(stack: Stack) -> None:
    copy_after(stack, ("mkdir", "d", 0o755), ("write", "d/x", 1, 1, "create"), ("write", "base/n", 1, 1, "create"))
    copy_after(stack, ("remove", "d/x"), ("remove", "base/n"), ("remove", "base/file"))
    copy_after(stack, ("remove_all", "d"), ("remove_all", "base"))
    copy_after(stack, ("mkdir", "base", 0o755), ("mkdir", "d", 0o755))


def test_directories_that_are_made_anew_or_change_places(stack: Stack) -> None:
    copy_after(stack, ("write", "base/sub/n", 1, 1, "create"), ("mkdir", "x", 0o755), ("write", "x/1", 1, 1, "create"))
    copy_after(stack, ("remake", "base"), ("mkdir", "y", 0o700), ("write", "y/2", 1, 1, "create"))
    copy_after(stack, ("write", "base/file", 9, 1, "create"), ("exchange", "x", "y"))
    copy_after(stack, ("rename", "x", "y/x"), ("mkdir", "x", 0o711))
    copy_after(stack, ("remake", "base"), ("mkdir", "base/sub", 0o755), ("remake", "y"))


def test_file_becomes_directory_and_back(stack: Stack) -> None:
    copy_after(stack, ("turn", "base"), ("turn", "other/file"), ("write", "n", 1, 1, "create"))
    copy_after(stack, ("turn", "base"), ("turn", "other/file"), ("turn", "n"))
    copy_after(stack, ("turn", "base"), ("turn", "n"))


def test_renamed_directory_of_the_base(stack: Stack) -> None:
    if stack.form == "user":
        pytest.skip("the kernel renames no base directory in user form")
    copy_after(stack, ("rename", "base", "moved"))
    copy_after(stack, ("write", "moved/sub/n", 1, 9, "create"))
    copy_after(stack, ("remove", "moved/file"), ("mkdir", "base", 0o755))
    copy_after(stack, ("rename", "moved/sub", "base/sub"))
    copy_after(stack, ("rename", "moved", "base2"), ("rename", "base", "moved"), ("remake", "moved"))


def test_hard_links_stay_one_file(stack: Stack) -> None:
    copy_after(stack, ("write", "a", 1, 5000, "create"), ("link", "a", "base/b"), ("link", "a", "c"))
    copy_after(stack, ("chmod", "c", 0o600))
    copy_after(stack, ("link", "c", "base/sub/d"))
    shown = stack.copied()
    assert [shown[path]["same_as"] for path in ("a", "base/b", "base/sub/d", "c")] == ["a"] * 4
    copy_after(stack, ("remove", "a"))
    copy_after(stack, ("remake", "c"))


def test_after_a_copy_that_could_not_be_looked_at_the_next_is_whole(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENAMETOOLONG, "too long")

    stack.do(("write", "a", 1, 9, "create"))
    with monkeypatch.context() as patch:
        patch.setattr(exported, "scan", refuse)
        assert whole_copy(stack.upper, stack.form, 1).copied.entries == {}
    first = stack.copy()
    assert first.whole
    assert first.copied.entries
