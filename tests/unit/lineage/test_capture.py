"""Copies of an upper and copies over copies, on real overlays: what is restored is what was there."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.overlays import Stack, mounting
from tests.trees import FIRST, Manifest, Operation, Program, differences, live

from worldfork.core.errors import NotCapturable
from worldfork.core.remove import remove_tree
from worldfork.lineage.capture import copy_upper
from worldfork.lineage.upper import Copied

FORMS = ("trusted", "user") if os.geteuid() == 0 else ("user",)


@pytest.fixture(scope="module")
def mounts() -> Iterator[Program]:
    with mounting() as running:
        yield running


@pytest.fixture
def directory(home: Path) -> Iterator[Path]:
    """On the disk that carries homes, for not every file system carries an upper."""
    made = Path(tempfile.mkdtemp(prefix="capture-", dir=home))
    yield made
    remove_tree(made)


Make = Callable[..., Stack]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(mounts: Program, directory: Path, form: str) -> Iterator[Make]:
    made = []

    def one(*first: Operation) -> Stack:
        place = directory / str(len(made))
        place.mkdir()
        made.append(Stack(mounts, place, form, first or FIRST))
        return made[-1]

    yield one
    for stack in made:
        stack.end()


@pytest.fixture
def stack(make: Make) -> Stack:
    return make()


def assert_same(stack: Stack, expected: Manifest) -> None:
    lines = differences(live(expected, stack.form), live(stack.copied(), stack.form))
    assert not lines, "\n".join(lines)


def settle() -> None:
    """Wait until what was done is older than a tick of the clock, so that nothing is suspect for its age."""
    time.sleep(0.025)


def copy_after(stack: Stack, *operations: Operation) -> None:
    """Do something and check the copy of it."""
    expected = stack.do(*operations)
    settle()
    stack.copy()
    assert_same(stack, expected)


def test_first_copy_holds_every_kind(stack: Stack) -> None:
    copy_after(
        stack,
        ("mkdir", "n", 0o2775),
        ("write", "n/file", 5, 70000, "create"),
        ("sparse", "n/holes", 6, 3_000_000),
        ("link", "n/file", "base/other name"),
        ("symlink", "n/dangling", "nowhere/at all"),
        ("fifo", "n/pipe"),
        ("socket", "n/sock"),
        ("write", "n/\udcff\udcfe", 1, 1, "create"),
        ("write", "n/line\nend", 1, 1, "create"),
        ("remove", "base/sub/deep"),
        ("remove_all", "other"),
        ("set_xattr", "n", "user.k", "v"),
        ("set_xattr", "n/file", "user.k", ""),
        ("acl", "n", "access", 7),
        ("chmod", "n/file", 0o4711),
        ("utime", "n/file", -5_000_000_001),
        ("utime", "n", 4_102_444_800_000_000_007),
    )


def test_second_copy_holds_only_the_change(stack: Stack) -> None:
    stack.do(("write", "big", 1, 100_000, "create"), ("mkdir", "d", 0o755), ("write", "d/x", 1, 9, "create"))
    settle()
    first = stack.copy()
    expected = stack.do(("write", "d/y", 2, 5000, "create"))
    second = stack.copy()
    assert_same(stack, expected)
    assert first.whole
    assert second.changed
    assert not second.whole
    assert first.size_bytes > 200_000
    assert second.size_bytes < 20_000
    assert {path.name for path in stack.copies[0].rglob("*")} == {"d", "y"}


def test_without_a_change_nothing_is_written(stack: Stack) -> None:
    expected = stack.do(("write", "a", 1, 9, "create"), ("remove", "base/sub/deep"), ("mkdir", "d", 0o755))
    settle()
    stack.copy()
    again = stack.copy()
    assert not again.changed
    assert len(stack.copies) == 1
    assert_same(stack, expected)


def test_suspects_that_are_equal_are_no_change(stack: Stack) -> None:
    stack.do(("write", "a", 1, 9, "create"), ("mkdir", "d", 0o700), ("symlink", "l", "a"), ("fifo", "p"))
    stack.copy()
    assert any(entry.suspect for entry in stack.last.entries.values())
    assert not stack.copy().changed


@pytest.mark.parametrize("seen", ["its own number", "the number of the file that it was copied up from"])
def test_file_that_could_be_written_is_compared(stack: Stack, seen: str) -> None:
    inside = stack.directory / "base" / "base/sub/deep" if "copied up" in seen else None
    stack.do(("write", "base/sub/deep", 8, 5000, "patch"))
    settle()
    path = stack.upper / "base/sub/deep"
    number = (inside or path).stat().st_ino
    stack.copy([(0, number)])
    # As by a mapping whose page was dirty: other content, and nothing else to tell it by.
    before = path.stat()
    path.write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    entry = stack.last.entries["base/sub/deep"]
    assert entry.suspect
    stack.last.entries["base/sub/deep"] = entry._replace(ctime_ns=path.stat().st_ctime_ns)
    assert stack.copy([(0, number)]).changed
    assert (stack.copies[0] / "base/sub/deep").read_bytes() == b"x" * before.st_size


@pytest.mark.user
def test_without_known_origins_every_file_that_was_copied_up_is_compared(stack: Stack) -> None:
    stack.do(("write", "base/sub/deep", 8, 50, "patch"), ("write", "new", 8, 50, "create"))
    settle()
    stack.copy()
    assert not any(entry.suspect for entry in stack.last.entries.values())
    stack.copy([(0, 1)])
    assert {path for path, entry in stack.last.entries.items() if entry.suspect} == {"base/sub/deep"}


def test_every_file_is_compared_when_nobody_knows_what_is_open(stack: Stack) -> None:
    stack.do(("write", "a", 1, 9, "create"), ("mkdir", "d", 0o755), ("write", "d/b", 1, 9, "create"))
    settle()
    stack.copy(None)
    assert {path for path, entry in stack.last.entries.items() if entry.suspect} == {"a", "d/b"}
    assert not stack.copy(None).changed


def test_others_are_not_suspect(stack: Stack) -> None:
    stack.do(("write", "a", 1, 9, "create"), ("write", "b", 1, 9, "create"))
    settle()
    stack.copy([(0, (stack.upper / "a").stat().st_ino)])
    assert {path for path, entry in stack.last.entries.items() if entry.suspect} == {"a"}


def test_removed_entries_stay_removed(stack: Stack) -> None:
    copy_after(stack, ("mkdir", "d", 0o755), ("write", "d/x", 1, 1, "create"), ("write", "base/n", 1, 1, "create"))
    copy_after(stack, ("remove", "d/x"), ("remove", "base/n"), ("remove", "base/file"))
    copy_after(stack, ("remove_all", "d"), ("remove_all", "base"))
    copy_after(stack, ("mkdir", "base", 0o755), ("mkdir", "d", 0o755))


def test_directory_made_anew_is_empty(stack: Stack) -> None:
    copy_after(stack, ("write", "base/sub/n", 1, 1, "create"))
    copy_after(stack, ("remake", "base"))
    copy_after(stack, ("write", "base/file", 9, 1, "create"))
    copy_after(stack, ("remake", "base"), ("mkdir", "base/sub", 0o755))


def test_directory_made_anew_with_the_same_inode(stack: Stack) -> None:
    copy_after(stack, ("write", "base/sub/n", 1, 1, "create"))
    inode = (stack.upper / "base/sub").stat().st_ino
    for _ in range(50):
        expected = stack.do(("remake", "base/sub"))
        if (stack.upper / "base/sub").stat().st_ino == inode:
            break
    else:
        pytest.skip("this file system does not give a number again so soon")
    stack.copy()
    assert_same(stack, expected)


def test_directory_moved_away_and_into_another_one_of_the_old_name(stack: Stack) -> None:
    # Below a directory that is new itself, for elsewhere the kernel marks what is moved.
    copy_after(
        stack,
        ("mkdir", "n", 0o755), ("mkdir", "n/k", 0o755), ("mkdir", "n/d", 0o755), ("mkdir", "n/d/e", 0o755),
        ("write", "n/d/e/f", 1, 9, "create"),
    )  # fmt: skip
    copy_after(
        stack,
        ("rename", "n/d/e", "n/k/e"),
        ("rename", "n/d", "n/gone"),
        ("mkdir", "n/d", 0o755),
        ("rename", "n/k/e", "n/d/e"),
    )


def test_file_becomes_directory_and_back(stack: Stack) -> None:
    copy_after(stack, ("turn", "base"), ("turn", "other/file"), ("write", "n", 1, 1, "create"))
    copy_after(stack, ("turn", "base"), ("turn", "other/file"), ("turn", "n"))
    copy_after(stack, ("turn", "base"), ("turn", "n"))


def test_directories_change_places(stack: Stack) -> None:
    copy_after(
        stack,
        ("mkdir", "x", 0o755), ("write", "x/1", 1, 1, "create"),
        ("mkdir", "y", 0o700), ("write", "y/2", 1, 1, "create"),
    )  # fmt: skip
    copy_after(stack, ("exchange", "x", "y"))
    copy_after(stack, ("rename", "x", "y/x"), ("mkdir", "x", 0o711))


@pytest.mark.root
def test_renamed_directory_of_the_base(make: Make, form: str) -> None:
    if form == "user":
        pytest.skip("the kernel renames no base directory in user form")
    stack = make()
    copy_after(stack, ("rename", "base", "moved"))
    copy_after(stack, ("write", "moved/sub/n", 1, 9, "create"))
    copy_after(stack, ("remove", "moved/file"), ("mkdir", "base", 0o755))
    copy_after(stack, ("rename", "moved/sub", "base/sub"))
    copy_after(stack, ("mkdir", "moved/sub", 0o755), ("rename", "moved", "base/moved"))
    copy_after(stack, ("rename", "base/moved", "base2"), ("rename", "base", "moved"), ("remake", "moved"))


@pytest.mark.root
def test_renamed_base_directory_whose_parent_is_another_one(make: Make, form: str) -> None:
    if form == "user":
        pytest.skip("the kernel renames no base directory in user form")
    stack = make()
    copy_after(stack, ("mkdir", "p", 0o755), ("rename", "base", "p/base"))
    copy_after(stack, ("rename", "p/base", "base"), ("remake", "p"), ("rename", "base", "p/base"))


def test_hard_links_stay_one_file(stack: Stack) -> None:
    copy_after(stack, ("write", "a", 1, 5000, "create"), ("link", "a", "base/b"), ("link", "a", "c"))
    copy_after(stack, ("chmod", "c", 0o600))
    copy_after(stack, ("link", "c", "base/sub/d"))
    shown = stack.copied()
    assert [shown[path]["same_as"] for path in ("a", "base/b", "base/sub/d", "c")] == ["a"] * 4
    copy_after(stack, ("remove", "a"))
    copy_after(stack, ("remake", "c"))


def test_other_names_of_a_file_go_where_it_goes(stack: Stack) -> None:
    copy_after(stack, ("mkdir", "d", 0o755), ("write", "a", 1, 5000, "create"), ("link", "a", "d/b"))
    copy_after(stack, ("rename", "d", "e"))
    shown = stack.copied()
    assert shown["e/b"]["same_as"] == shown["a"]["same_as"] == "a"


def test_whiteouts_are_not_copied_again(stack: Stack) -> None:
    stack.do(("remove", "base/link"), ("remove", "base/file"))
    settle()
    stack.copy()
    expected = stack.do(("remove", "base/sub/deep"))
    stack.copy()
    assert_same(stack, expected)
    assert {path.name for path in stack.copies[0].rglob("*")} == {"base", "sub", "deep"}


def test_default_acl_reaches_no_entry_that_lacks_it(stack: Stack) -> None:
    copy_after(
        stack,
        ("mkdir", "d", 0o755),
        ("write", "d/before", 1, 9, "create"),
        ("mkdir", "d/inner", 0o755),
        ("acl", "d", "default", 7),
        ("write", "d/after", 1, 9, "create"),
    )
    copy_after(stack, ("write", "d/before", 2, 9, "patch"), ("acl", "base", "default", 4))


@pytest.mark.parametrize("name", ["user.x.overlay.opaque", "user.x.overlay.origin", "user.overlay.opaque"])
def test_attributes_that_look_like_marks_are_data(stack: Stack, name: str) -> None:
    outcomes, _ = stack.apply(("set_xattr", "base", name, "y"))
    if outcomes[0][0] != "done":
        pytest.skip(f"this kernel keeps {name} for itself in {stack.form} form: {outcomes[0][0]}")
    copy_after(stack, ("write", "base/n", 1, 1, "create"))
    copy_after(stack, ("write", "base/n", 2, 1, "create"), ("set_xattr", "base/n", name, "y"))


@pytest.mark.root
def test_owners_and_capabilities(make: Make, form: str) -> None:
    owner = (1234, 5678) if form == "trusted" else (0, 0)
    copy_after(
        make(),
        ("write", "a", 1, 9, "create"),
        ("chown", "a", *owner),
        ("chmod", "a", 0o6755),
        ("chown", "base", *owner),
        ("symlink", "l", "a"),
        ("chown", "l", *owner),
        ("write", "ping", 1, 9, "create"),
        ("capability", "ping"),
    )


def test_what_is_closed_to_its_owner(stack: Stack) -> None:
    operations = [
        ("mkdir", "d", 0o755), ("mkdir", "d/e", 0o755), ("write", "d/e/f", 1, 9, "create"),
        ("chmod", "d/e/f", 0), ("chmod", "d/e", 0), ("chmod", "d", 0o200), ("chmod", "base", 0o555),
    ]  # fmt: skip
    copy_after(stack, *operations)
    copy_after(stack, ("write", "d/e/f", 2, 8, "create"))
    copy_after(stack, ("write", "n", 2, 8, "create"))
    # What had to be opened for the copy is copied again; nothing else is.
    assert {path.name for path in stack.copies[0].iterdir()} <= {"n", "d"}


@pytest.mark.user
def test_attribute_that_an_ordinary_user_cannot_copy_is_an_error(stack: Stack) -> None:
    stack.do(("write", "ping", 1, 9, "create"), ("capability", "ping"))
    with pytest.raises(NotCapturable) as caught:
        stack.copy()
    assert "stop=True" in str(caught.value)


def test_path_longer_than_the_kernel_takes_is_an_error(mounts: Program, directory: Path, form: str) -> None:
    upper = directory / "upper"
    upper.mkdir()
    here = os.open(upper, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("n" * 250, dir_fd=here)
        below = os.open("n" * 250, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(NotCapturable):
        copy_upper(upper, directory / "copy", Copied(), (), form)


def test_long_chain_ends_in_a_whole_copy(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worldfork.lineage.capture._MAX_CHAIN", 3)
    depths = []
    for number in range(5):
        copy_after(stack, ("write", f"n{number}", number, 9, "create"))
        depths.append(len(stack.copies))
    assert depths == [1, 2, 3, 1, 2]


def test_copy_after_the_upper_became_a_layer(stack: Stack) -> None:
    copy_after(stack, ("remake", "base"), ("write", "base/n", 1, 1, "create"), ("remove", "other/sub"))
    stack.take()
    copy_after(stack, ("remake", "base"), ("write", "other/sub", 2, 2, "create"))
    copy_after(stack, ("remove_all", "other"), ("remove_all", "base"))


UNTOUCHED_OR_NOT: dict[str, tuple[Operation, ...]] = {
    "mode": (("chmod", "", 0o711),),
    "time": (("utime", "", 1_234_567_890_123_456_789),),
    "attribute": (("set_xattr", "", "user.k", "new"),),
    "attribute removed": (("remove_xattr", "", "user.k"),),
    "access list": (("acl", "", "access", 4),),
    "default list": (("acl", "", "default", 4),),
    "entry": (("write", "n", 1, 1, "create"),),
    "deletion": (("remove_all", "other"),),
    "change deep down": (("write", "base/sub/deep", 1, 1, "patch"),),
}


@pytest.mark.parametrize("what", UNTOUCHED_OR_NOT)
def test_every_change_shows(make: Make, what: str) -> None:
    stack = make(*FIRST, ("set_xattr", "", "user.k", "old"), ("utime", "", 1_000_000_000_000_000_001))
    assert stack.is_untouched()
    before = stack.do()
    assert stack.is_untouched()
    assert stack.do(*UNTOUCHED_OR_NOT[what]) != before
    assert not stack.is_untouched()


@pytest.mark.root
def test_owner_of_the_root_shows(make: Make, form: str) -> None:
    if form == "user":
        pytest.skip("one id alone")
    stack = make()
    stack.do(("chown", "", 12, 13))
    assert not stack.is_untouched()


def test_mark_like_attribute_of_the_root_shows(stack: Stack) -> None:
    outcomes, _ = stack.apply(("set_xattr", "", "user.overlay.redirect", "y"))
    if outcomes[0][0] != "done":
        pytest.skip(f"this kernel keeps it for itself: {outcomes[0][0]}")
    assert not stack.is_untouched()


def test_what_came_and_went_is_no_change(make: Make) -> None:
    stack = make(*FIRST, ("utime", "", 1_000_000_000_000_000_001))
    stack.do(
        ("mkdir", "n", 0o755), ("write", "n/x", 1, 1, "create"), ("remove_all", "n"),
        ("utime", "", 1_000_000_000_000_000_001),
    )  # fmt: skip
    assert stack.is_untouched()


@pytest.mark.user
def test_closed_root_counts_as_touched(stack: Stack) -> None:
    stack.do(("chmod", "", 0))
    assert not stack.is_untouched()
