"""Merged layers over real overlays: everything that may be at a path, layer by layer, against a plain directory."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.merged import seen_by_kernel, seen_by_us
from tests.overlays import Stack, mounting
from tests.trees import Manifest, Operation, Program, differences, program, without

from worldfork.content.layer import walk
from worldfork.content.merge import merge_layers
from worldfork.core.errors import ConfigError, Corrupt
from worldfork.core.remove import remove_tree

FORMS = ("trusted", "user") if os.geteuid() == 0 else ("user",)
STATES = ("absent", "file", "directory", "link")
CHANGES = (*STATES, "untouched")


@pytest.fixture(scope="module")
def mounts() -> Iterator[Program]:
    with mounting() as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[Program]:
    with program() as running:
        yield running


@pytest.fixture
def directory(home: Path) -> Iterator[Path]:
    """On the disk that carries homes, for not every file system carries an upper."""
    made = Path(tempfile.mkdtemp(prefix="merge-", dir=home))
    yield made
    remove_tree(made)


def make(path: str, state: str, seed: int) -> list[Operation]:
    """Make one path, in a way that tells in which layer it was made."""
    if state == "file":
        return [("write", path, seed, 10 + seed, "create")]
    if state == "link":
        return [("symlink", path, f"target{seed}")]
    if state == "directory":
        return [
            ("mkdir", path, 0o750),
            ("write", f"{path}/in", seed, 20 + seed, "create"),
            ("mkdir", f"{path}/sub{seed}", 0o755),
            ("write", f"{path}/sub{seed}/deep", seed, 5, "create"),
        ]
    return []


def change(path: str, before: str, after: str, seed: int) -> list[Operation]:
    if after == "untouched":
        return [("write", f"{path}/more{seed}", seed, 3, "create")] if before == "directory" and seed == 2 else []
    return [*([("remove_all", path)] if before != "absent" else []), *make(path, after, seed)]


def table(layers: int) -> list[list[Operation]]:
    """For each layer the operations that bring every path there from each state to each other one."""
    steps: list[list[Operation]] = [[] for _ in range(layers)]
    for first, *rest in itertools.product(STATES, *[CHANGES] * (layers - 1)):
        path = ".".join([first, *rest])
        steps[0] += make(path, first, 0)
        state = first
        for seed, after in enumerate(rest, 1):
            steps[seed] += change(path, state, after, seed)
            state = state if after == "untouched" else after
    return steps


def stack_of(mounts: Program, place: Path, form: str, steps: list[list[Operation]]) -> Stack:
    """A stack whose layers hold what each step did."""
    place.mkdir()
    stack = Stack(mounts, place, form, steps[0])
    try:
        for step in steps[1:]:
            stack.do(*step)
            stack.take()
    finally:
        stack.end()
    return stack


def expect_same(expected: Manifest, actual: Manifest, what: str) -> None:
    lines = differences(expected, actual)
    assert not lines, "\n".join([what, *lines])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layers", [2, 3])
def test_every_sequence_of_kinds_at_one_path(
    mounts: Program, plain: Program, directory: Path, form: str, layers: int
) -> None:
    steps = table(layers)
    stack = stack_of(mounts, directory / "stack", form, steps)
    oracle = directory / "oracle"
    oracle.mkdir()
    answer = plain.ask(oracle, operations=[operation for step in steps for operation in step])
    assert {outcome[0] for outcome in answer["outcomes"]} == {"done"}
    expected = without(answer["manifest"], "mtime_ns")
    point = directory / "point"
    shown = seen_by_kernel(mounts, point, stack.layers, form)
    expect_same(expected, without(shown, "mtime_ns"), "the kernel")
    expect_same(shown, seen_by_us(stack.layers, form), "our own lookup")
    for first, last in itertools.combinations(range(layers + 1), 2):
        merged = directory / f"merged.{first}.{last}"
        merge_layers(stack.layers[first:last], merged, form, ends=last == layers)
        stood = [*stack.layers[:first], merged, *stack.layers[last:]]
        expect_same(shown, seen_by_kernel(mounts, point, stood, form), f"layers {first} to {last - 1} merged")


@pytest.mark.root
def test_a_renamed_base_directory_keeps_what_lies_below_the_run(mounts: Program, directory: Path) -> None:
    steps: list[list[Operation]] = [
        [("mkdir", "old", 0o755), ("mkdir", "old/sub", 0o755), ("write", "old/sub/file", 1, 10, "create")],
        [("rename", "old", "new"), ("write", "new/more", 2, 5, "create")],
        [("mkdir", "away", 0o755), ("rename", "new/sub", "away/sub"), ("write", "away/sub/third", 3, 5, "create")],
        [("rename", "away/sub", "sub"), ("mkdir", "old", 0o755), ("rename", "new", "old/newest")],
    ]
    stack = stack_of(mounts, directory / "stack", "trusted", steps)
    shown = seen_by_kernel(mounts, directory / "point", stack.layers, "trusted")
    assert {"sub/file", "sub/third", "old/newest/more"} < shown.keys()
    merge_layers(stack.layers[:3], directory / "merged", "trusted")
    entries = {found.entry.path: found.entry for found in walk(directory / "merged", "trusted")}
    assert (entries["sub"].redirect, entries["old/newest"].redirect) == ("/old/sub", "/old")
    assert "sub/file" not in entries
    stood = [directory / "merged", stack.layers[3]]
    expect_same(shown, seen_by_kernel(mounts, directory / "point", stood, "trusted"), "merged")


@pytest.mark.root
def test_a_directory_renamed_in_place_is_redirected_by_its_name_alone(mounts: Program, directory: Path) -> None:
    steps: list[list[Operation]] = [
        [("mkdir", "a", 0o755), ("mkdir", "a/b", 0o755), ("write", "a/b/file", 1, 10, "create")],
        [("rename", "a/b", "a/c")],
        [("rename", "a/c", "a/d"), ("write", "a/d/more", 1, 1, "create")],
        [("rename", "a", "z")],
    ]
    stack = stack_of(mounts, directory / "stack", "trusted", steps)
    shown = seen_by_kernel(mounts, directory / "point", stack.layers, "trusted")
    merge_layers(stack.layers[:3], directory / "merged", "trusted")
    entries = {found.entry.path: found.entry for found in walk(directory / "merged", "trusted")}
    assert (entries["z"].redirect, entries["z/d"].redirect) == ("a", "b")
    stood = [directory / "merged", stack.layers[3]]
    expect_same(shown, seen_by_kernel(mounts, directory / "point", stood, "trusted"), "merged")


def test_holes_and_names_stay(directory: Path) -> None:
    lower, upper = directory / "lower", directory / "upper"
    for layer in (lower, upper):
        layer.mkdir()
    with open(upper / "sparse", "wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 29)
        file.write(b"x")
    (lower / "one").write_text("twice")
    os.link(lower / "one", lower / "two")
    (upper / "alone").write_text("")
    name = os.fsdecode(b"\xff\xfe\n")
    os.symlink(name, upper / name)
    merge_layers([upper, lower], directory / "merged", FORMS[-1])
    merged = directory / "merged"
    assert (merged / "sparse").stat().st_size == 1 << 30
    assert (merged / "sparse").stat().st_blocks < 1000
    assert (merged / "one").stat().st_ino == (merged / "two").stat().st_ino
    assert os.readlink(merged / name) == name


def test_deletions_that_hide_nothing_go(directory: Path) -> None:
    lower, upper = directory / "lower", directory / "upper"
    for layer in (lower, upper):
        layer.mkdir()
        os.mknod(layer / f"gone-{layer.name}", 0o020000, 0)
    merge_layers([upper, lower], directory / "over", FORMS[-1])
    assert sorted(path.name for path in (directory / "over").iterdir()) == ["gone-lower", "gone-upper"]
    merge_layers([upper, lower], directory / "bottom", FORMS[-1], ends=True)
    assert list((directory / "bottom").iterdir()) == []


def test_paths_of_any_length(directory: Path) -> None:
    """Longer than the kernel takes at once, in layers that hold different parts."""
    lower, upper = directory / "lower", directory / "upper"
    depth = 40
    for layer, name in ((lower, "below"), (upper, "above")):
        layer.mkdir()
        fd = os.open(layer, os.O_RDONLY)
        for _ in range(depth):
            os.mkdir("d" * 200, dir_fd=fd)
            deeper = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = deeper
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        os.close(fd)
    merge_layers([upper, lower], directory / "merged", FORMS[-1])
    paths = [found.entry.path for found in walk(directory / "merged", FORMS[-1])]
    assert [path.rpartition("/")[2] for path in paths[-2:]] == ["above", "below"]
    assert len(paths) == 1 + depth + 2


@pytest.mark.parametrize("form", FORMS)
def test_what_a_run_makes_and_deletes_is_not_listed(mounts: Program, directory: Path, form: str) -> None:
    """Nothing lies below such a deletion, and an overlay lists what it does not look at."""
    layers = [directory / name for name in ("later", "earlier", "base")]
    for layer in layers:
        layer.mkdir()
    (layers[1] / "made" / "sub").mkdir(parents=True)
    (layers[1] / "made" / "file").write_text("")
    (layers[0] / "made").mkdir()
    for name in ("sub", "file"):
        os.mknod(layers[0] / "made" / name, 0o020000, 0)
    shown = seen_by_kernel(mounts, directory / "point", layers, form)
    assert shown.keys() == {"", "made"}
    merge_layers(layers[:2], directory / "merged", form)
    stood = [directory / "merged", layers[2]]
    expect_same(shown, seen_by_kernel(mounts, directory / "point", stood, form), "merged")


@pytest.mark.parametrize("form", FORMS)
def test_capabilities_stay(mounts: Program, directory: Path, form: str) -> None:
    """A sandbox of an ordinary user sets them as root of its namespace; outside, its user may not."""
    steps: list[list[Operation]] = [
        [("mkdir", "sub", 0o755)],
        [("write", "sub/ping", 1, 10, "create"), ("capability", "sub/ping")],
        [("write", "sub/other", 1, 10, "create")],
    ]
    stack = stack_of(mounts, directory / "stack", form, steps)
    shown = seen_by_kernel(mounts, directory / "point", stack.layers, form)
    assert "security.capability" in shown["sub/ping"]["xattrs"]
    expect_same(shown, seen_by_us(stack.layers, form), "our own lookup")
    merge_layers(stack.layers[:2], directory / "merged", form)
    stood = [directory / "merged", stack.layers[2]]
    expect_same(shown, seen_by_kernel(mounts, directory / "point", stood, form), "merged")


def test_nothing_to_merge(directory: Path) -> None:
    with pytest.raises(ConfigError):
        merge_layers([], directory / "merged", FORMS[-1])


@pytest.mark.parametrize("form", FORMS)
def test_a_redirect_that_leads_nowhere_is_told(directory: Path, form: str) -> None:
    for layer in ("upper", "lower"):
        (directory / layer / "sub").mkdir(parents=True)
    os.setxattr(directory / "upper" / "sub", f"{form}.overlay.redirect", b"a/b")
    with pytest.raises(Corrupt) as caught:
        merge_layers([directory / "upper", directory / "lower"], directory / "merged", form)
    assert caught.value.actual == "a/b"
