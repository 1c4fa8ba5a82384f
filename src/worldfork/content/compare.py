"""What differs between two merged trees, path by path, and how the text of a file changed."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import zip_longest
from typing import NamedTuple

from worldfork.content.entry import Entry
from worldfork.content.failures import naming
from worldfork.content.merged import Describing, MergedView
from worldfork.content.stack import Node

PATCH_BYTES = 1 << 20
"""The larger of two files up to which their texts are compared line by line."""
_PATCH_LINES = 20_000
"""As many lines that differ on each side; the time of a comparison grows with their product."""
_BINARY_BYTES = 8000
_CONTEXT = 3


class Change(NamedTuple):
    """One path that is not the same in both trees."""

    path: str
    how: str
    """"added", "removed" or "changed"."""
    what: tuple[str, ...]
    """Of a changed one: "kind", "content", "target", "device", "mode", "owner", "attributes", "time"."""
    old: Node | None
    new: Node | None

    @property
    def old_bytes(self) -> int | None:
        """The size of a file before; None where there was none."""
        return _size_bytes(self.old)

    @property
    def new_bytes(self) -> int | None:
        """The size of a file now; None where there is none."""
        return _size_bytes(self.new)


Enters = Callable[[Node | None, Node | None], bool]
"""Whether a comparison looks into two directories that differ; what it raises ends the comparison."""
Holds = Callable[[Node, Node], bool]
"""Whether two files of one size, in two places, hold the same."""


def compare(
    old: MergedView,
    new: MergedView,
    path: str = "",
    *,
    times: bool = False,
    enters: Enters | None = None,
    holds: Holds | None = None,
) -> Iterator[Change]:
    """Yield what differs below a path, in canonical order; what was added or removed with all that is in it.

    Files that are the same one in the same layer are not read, nor directories looked at that are merged from the
    same; else files of one size are compared byte by byte. Which names are hard links of each other is not compared.

    Args:
        old, new: views of layers of one form.
        path: of the tree; no link in it is followed. Nothing is yielded where neither has it.
        times: whether another time of last change alone makes a difference. Of a directory it never does.
        enters: asked of two directories, of which one may be missing or something else, before they are listed; by
            default all are looked into.
        holds: asked in the place of reading both files.
    Raises:
        OutOfSpace, StoreError: something cannot be read; `path` and `errno` are fields.
    """
    with naming(path, "read"):
        pair = (old.node(path), new.node(path))
    comparison = Comparison(old, new, times, holds)
    waiting = [iter([pair])]
    while waiting:
        nodes = next(waiting[-1], None)
        if nodes is None:
            waiting.pop()
            continue
        change = comparison.change(*nodes)
        if change is not None:
            yield change
        if not comparison.is_same_place(*nodes) and any(node and node.seen.kind == "d" for node in nodes):
            with naming((nodes[0] or nodes[1] or old.stack.root()).path, "read"):
                if enters is None or enters(*nodes):
                    waiting.append(iter(comparison.below(*nodes)))


class Comparison:
    """Compares two views, a pair of paths at a time. For its arguments see `compare`."""

    def __init__(self, old: MergedView, new: MergedView, times: bool, holds: Holds | None) -> None:
        self._old = old
        self._new = new
        self._times = times
        self._holds = holds
        self._describing = Describing(old.form), Describing(new.form)

    def is_same_place(self, old: Node | None, new: Node | None) -> bool:
        """Whether two paths are one and the same in one and the same layers, so that nothing in them can differ."""
        if old is None or new is None or old.seen.kind != new.seen.kind:
            return False
        mine, other = self._old.stack.layers, self._new.stack.layers
        if old.seen.kind != "d":
            return (mine[old.layer], old.inside) == (other[new.layer], new.inside)
        if [(mine[layer], inside) for layer, inside in old.stack] != [
            (other[layer], inside) for layer, inside in new.stack
        ]:
            return False
        # What is redirected goes on in any layer further below.
        return mine[old.layer :] == other[new.layer :]

    def below(self, old: Node | None, new: Node | None) -> list[tuple[Node | None, Node | None]]:
        """Return what two directories hold, in pairs of one name."""
        pairs: dict[str, tuple[Node | None, Node | None]] = {}
        if old is not None and old.seen.kind == "d":
            pairs |= {child.path: (child, None) for child in self._old.children(old)}
        if new is not None and new.seen.kind == "d":
            for child in self._new.children(new):
                pairs[child.path] = (pairs.get(child.path, (None, None))[0], child)
        return [pairs[path] for path in sorted(pairs, key=os.fsencode)]

    def change(self, old: Node | None, new: Node | None) -> Change | None:
        """Return how one path differs, whatever is in it; None where it does not.

        Raises:
            OutOfSpace, StoreError, OSError: it cannot be read.
        """
        if old is None or new is None:
            node = old or new
            if node is None:
                return None
            return Change(node.path, "added" if old is None else "removed", (), old, new)
        if self.is_same_place(old, new):
            return None
        what = self._what(old, new)
        return Change(new.path, "changed", what, old, new) if what else None

    def _what(self, old: Node, new: Node) -> tuple[str, ...]:
        one, other = self._describing[0].entry(old), self._describing[1].entry(new)
        if one.kind != other.kind:
            return ("kind",)
        found = [name for name, facts in _FACTS.items() if facts(one) != facts(other)]
        if one.kind == "f" and not self._is_equal(old, new, one, other):
            found.insert(0, "content")
        if self._times and one.kind != "d" and one.mtime_ns != other.mtime_ns:
            found.append("time")
        return tuple(found)

    def _is_equal(self, old: Node, new: Node, one: Entry, other: Entry) -> bool:
        if one.size_bytes != other.size_bytes:
            return False
        mine, theirs = old.seen.info, new.seen.info
        if mine is not None and theirs is not None and os.path.samestat(mine, theirs):
            return True
        with naming(new.path, "read"):
            if self._holds is not None:
                return self._holds(old, new)
            pairs = zip_longest(self._old.read(old), self._new.read(new))
            return all(left == right for left, right in pairs)


_FACTS: dict[str, Callable[[Entry], object]] = {
    "target": lambda entry: entry.target,
    "device": lambda entry: entry.device,
    "mode": lambda entry: entry.mode,
    "owner": lambda entry: (entry.uid, entry.gid),
    "attributes": lambda entry: entry.xattrs,
}


def _size_bytes(node: Node | None) -> int | None:
    if node is None or node.seen.info is None or not stat.S_ISREG(node.seen.info.st_mode):
        return None
    return node.seen.info.st_size


def patch(old: MergedView, new: MergedView, change: Change) -> bytes:
    """Return how a file's text changed, as a unified diff; one line that says so where it is no text, or too long.

    Nothing where neither side is a file, or the content is the same.

    Raises:
        OutOfSpace, StoreError: something cannot be read; `path` and `errno` are fields.
    """
    sizes = [size for size in (change.old_bytes, change.new_bytes) if size is not None]
    if not sizes or (change.how == "changed" and not {"content", "kind"}.intersection(change.what)):
        return b""
    names = [
        b"/dev/null" if size is None else side + shown_path(change.path)
        for side, size in ((b"a/", change.old_bytes), (b"b/", change.new_bytes))
    ]
    if max(sizes) > PATCH_BYTES:
        return b"Files %b and %b differ, and are too large to be shown\n" % (*names,)
    with naming(change.path, "read"):
        before, after = _text(old, change.old), _text(new, change.new)
    if b"\0" in before[:_BINARY_BYTES] or b"\0" in after[:_BINARY_BYTES]:
        return b"Binary files %b and %b differ\n" % (*names,)
    hunks = _hunks(BytesIO(before).readlines(), BytesIO(after).readlines())
    if hunks is None:
        return b"Files %b and %b differ in too many lines to be shown\n" % (*names,)
    return b"--- %b\n+++ %b\n" % (*names,) + hunks


def shown_path(path: str) -> bytes:
    """Return a path as one line of text: what could not be told apart there is escaped, and then all is in quotes."""
    if path.isprintable() and '"' not in path and "\\" not in path:
        return path.encode()
    escaped = "".join(char if char.isprintable() and char not in '"\\' else _escaped(char) for char in path)
    return b'"' + escaped.encode() + b'"'


def _escaped(char: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
    return named.get(char) or "".join(f"\\{byte:03o}" for byte in os.fsencode(char))


def _text(view: MergedView, node: Node | None) -> bytes:
    if _size_bytes(node) is None or node is None:
        return b""
    return b"".join(view.read(node))  # of PATCH_BYTES at most


def _hunks(before: list[bytes], after: list[bytes]) -> bytes | None:
    """Return the hunks of a unified diff; None where it would take too long."""
    begin = 0
    for one, other in zip(before, after, strict=False):
        if one != other:
            break
        begin += 1
    end = 0
    while end < min(len(before), len(after)) - begin and before[-1 - end] == after[-1 - end]:
        end += 1
    if max(len(before), len(after)) - begin - end > _PATCH_LINES:
        return None
    start, rest = max(0, begin - _CONTEXT), max(0, end - _CONTEXT)
    left, right = before[start : len(before) - rest], after[start : len(after) - rest]
    parts = []
    for group in difflib.SequenceMatcher(None, left, right).get_grouped_opcodes(_CONTEXT):
        first, last = group[0], group[-1]
        lines = _range(start + first[1], start + last[2]), _range(start + first[3], start + last[4])
        parts.append("@@ -{} +{} @@\n".format(*lines).encode())
        for tag, i, j, k, m in group:
            if tag == "equal":
                parts += [_line(b" ", line) for line in left[i:j]]
            else:
                parts += [_line(b"-", line) for line in left[i:j]]
                parts += [_line(b"+", line) for line in right[k:m]]
    return b"".join(parts)


def _range(start: int, stop: int) -> str:
    """Return lines as a hunk's head counts them."""
    count = stop - start
    if count == 1:
        return f"{start + 1}"
    return f"{start + 1 if count else start},{count}"


def _line(sign: bytes, line: bytes) -> bytes:
    return sign + line if line.endswith(b"\n") else sign + line + b"\n\\ No newline at end of file\n"
