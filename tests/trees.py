"""The host's side of `tree_program`: programs that serve it, plain models of trees, operations for hypothesis."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

PROGRAM = Path(__file__).resolve().parent / "tree_program.py"
SOURCE = PROGRAM.read_text(encoding="utf-8")
PYTHON = ("-X", "utf8", "-I", "-S")

Operation = Sequence[Any]
Manifest = dict[str, dict[str, Any]]


class Program:
    """A `tree_program` that runs here and keeps on answering."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, *PYTHON, "-c", SOURCE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def ask(self, root: Path, **request: Any) -> dict[str, Any]:
        """Send a request; return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"root": str(root), **request}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the program ended on {request}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Let it end and wait for it."""
        self._process.communicate(timeout=10)


@contextmanager
def program(prefix: Sequence[str] = ()) -> Iterator[Program]:
    """A program for the time of a block."""
    running = Program(prefix)
    try:
        yield running
    finally:
        running.end()


class Holder:
    """A `tree_program` that runs here and holds files open when told by operations that name it."""

    def __init__(self, name: str, prefix: Sequence[str] = ()) -> None:
        argv = [*prefix, sys.executable, *PYTHON, "-c", SOURCE, "hold", name]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()


class Model:
    """A tree in a plain directory, in which hard links split as they do over layers."""

    def __init__(self, programs: Program, root: Path, sealed: Sequence[int] = ()) -> None:
        self.programs = programs
        self.root = root
        self.sealed = sealed

    def apply(self, operations: Sequence[Operation], outcomes: Sequence[Any], holder: str | None = None) -> Any:
        """Do what was done on layers, but what was refused there for the layers' sake; returns outcomes, manifest."""
        skip = [number for number, outcome in enumerate(outcomes) if outcome[0] == "EXDEV"]
        answer = self.programs.ask(self.root, operations=operations, skip=skip, sealed=self.sealed, holder=holder)
        self.sealed = answer["sealed"]
        return answer["outcomes"], answer["manifest"]

    def seal(self) -> None:
        """All that is there now lies in lower layers."""
        self.sealed = self.programs.ask(self.root, seal=True, describe=False)["sealed"]

    def clone(self, target: Path) -> Model:
        """The same tree elsewhere, sealed: what a restored sandbox begins with."""
        self.programs.ask(self.root, clone=str(target), describe=False)
        copy = Model(self.programs, target)
        copy.seal()
        return copy


def without(manifest: Manifest, *facts: str) -> Manifest:
    """A manifest that leaves some facts out."""
    return {
        path: {name: value for name, value in facts_of.items() if name not in facts}
        for path, facts_of in manifest.items()
    }


def live(manifest: Manifest, form: str) -> Manifest:
    """A manifest less what a live overlay may tell wrongly: in a user namespace it does not know where a file was
    copied up from, so that a file's number changes when it is copied up, but not under those who know it already."""
    return manifest if form == "trusted" else without(manifest, "same_as")


def with_links_of(manifest: Manifest, other: Manifest) -> Manifest:
    """A manifest that takes the word of another one for which names are one file."""
    return {path: {**facts, "same_as": other[path]["same_as"]} for path, facts in manifest.items()}


def differences(expected: Manifest, actual: Manifest) -> list[str]:
    """One line for each difference; none when they are equal."""
    lines = [f"{path!r} is missing: {expected[path]}" for path in sorted(expected.keys() - actual.keys())]
    lines += [f"{path!r} should not be: {actual[path]}" for path in sorted(actual.keys() - expected.keys())]
    for path in sorted(expected.keys() & actual.keys()):
        lines += [
            f"{path!r}: {name} is {actual[path].get(name)}, not {value}"
            for name, value in expected[path].items()
            if actual[path].get(name) != value
        ]
    return lines


def outcome_differences(
    operations: Sequence[Operation], inside: Sequence[Any], plain: Sequence[Any], *, base_dirs_move: bool
) -> list[str]:
    """One line for each operation that came out differently on layers and on a plain directory."""
    lines = []
    for operation, one, other in zip(operations, inside, plain, strict=True):
        refused = one[0] == "EXDEV" and not base_dirs_move and operation[0] in ("rename", "exchange") and "d" in one[2]
        if one != other and not (refused and other[0] == "skipped"):
            lines.append(f"{operation}: {one} on layers, {other} on a plain directory")
    return lines


NAMES = ("a", "b", "A", "d", "\udcff\udcfe", "line\nend", "é")
MODES = (0o755, 0o700, 0o000, 0o500, 0o1777, 0o2775, 0o4755, 0o644, 0o200)
XATTRS = ("user.k", "user.a.overlay.opaque", "user.b.overlay.origin")
OVERLAY_XATTRS = ("user.overlay.opaque", "user.overlay.redirect", "user.overlay.origin", "user.overlay.whatever")
TIMES_NS = (0, 1, 1_000_000_000, 1_700_000_000_123_456_789, -5_000_000_001, 4_102_444_800_000_000_007)

_number = st.integers(0, 40)
_spot = st.tuples(st.integers(0, 12), st.sampled_from(NAMES)).map(list)
_existing = _number
_size = st.sampled_from([0, 1, 10, 5000, 70000])
_target = st.sampled_from(["a", "../b", "nowhere", "/workspace", "x" * 300])


def operations(
    owners: Sequence[tuple[int, int]], *, overlay_xattrs: bool, capabilities: bool
) -> st.SearchStrategy[Any]:
    """Single operations on paths that are there, most of the time."""
    xattr = st.sampled_from(XATTRS + (OVERLAY_XATTRS if overlay_xattrs else ()))
    where = st.one_of(_existing, _spot)
    kinds: list[st.SearchStrategy[Any]] = [
        st.tuples(st.just("write"), where, st.integers(0, 255), _size, st.sampled_from(["create", "append", "patch"])),
        st.tuples(st.just("sparse"), where, st.integers(0, 255), st.sampled_from([0, 65536, 3_000_000])),
        st.tuples(st.just("truncate"), _existing, st.sampled_from([0, 3, 100_000])),
        st.tuples(st.just("mkdir"), _spot, st.sampled_from(MODES)),
        st.tuples(st.just("mkdir"), _spot, st.just(0o755)),
        st.tuples(st.just("symlink"), _spot, _target),
        st.tuples(st.just("fifo"), _spot),
        st.tuples(st.just("socket"), _spot),
        st.tuples(st.just("remove"), _existing),
        st.tuples(st.just("remove_all"), _existing),
        st.tuples(st.just("remake"), _existing),
        st.tuples(st.just("turn"), _existing),
        st.tuples(st.just("rename"), _existing, where),
        st.tuples(st.just("rename"), _existing, _spot),
        st.tuples(st.just("exchange"), _existing, _existing),
        st.tuples(st.just("link"), _existing, _spot),
        st.tuples(st.just("chmod"), _existing, st.sampled_from(MODES)),
        st.tuples(st.just("chown"), _existing, st.sampled_from(owners)).map(lambda t: (t[0], t[1], *t[2])),
        st.tuples(st.just("set_xattr"), _existing, xattr, st.sampled_from(["", "v", "w"])),
        st.tuples(st.just("remove_xattr"), _existing, xattr),
        st.tuples(st.just("acl"), _existing, st.sampled_from(["access", "default"]), st.sampled_from([4, 7])),
        st.tuples(st.just("utime"), _existing, st.sampled_from(TIMES_NS)),
        st.tuples(st.just("hold"), _existing),
        st.tuples(st.just("poke"), st.integers(0, 5), st.integers(0, 255)),
        st.tuples(st.just("poke"), st.integers(0, 5), st.integers(0, 255)),
    ]
    if capabilities:
        kinds.append(st.tuples(st.just("capability"), _existing))
    return st.one_of(kinds).map(list)


FIRST: tuple[Operation, ...] = (
    ("mkdir", "base", 0o755),
    ("mkdir", "base/sub", 0o750),
    ("write", "base/file", 1, 100, "create"),
    ("write", "base/sub/deep", 2, 5000, "create"),
    ("write", "base/sub/other", 3, 10, "create"),
    ("link", "base/file", "base/twin"),
    ("symlink", "base/link", "file"),
    ("mkdir", "other", 0o755),
    ("write", "other/file", 4, 10, "create"),
    ("link", "other/file", "other/sub"),
    ("fifo", "other/pipe"),
    ("set_xattr", "base", "user.k", "old"),
    ("set_xattr", "base/file", "user.k", "old"),
    ("utime", "base/sub", 1_000_000_007),
)
"""What the layer below everything holds: base directories, hard links, and a few of each kind."""
