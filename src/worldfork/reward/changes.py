"""How the editable files of two states differ, read on the host from their layers.

What that costs is decided by how much a policy left, so it is bounded by what is looked at and not by a clock: what
there is more is not carried, and a policy gains nothing by leaving much.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from worldfork.content.compare import Comparison
from worldfork.content.failures import naming
from worldfork.content.mapped import lines_of
from worldfork.content.merged import MergedView
from worldfork.content.stack import Node
from worldfork.core.errors import StoreError
from worldfork.keeping.browse import comparing
from worldfork.keeping.with_ids import with_ids
from worldfork.records.edits import Edits
from worldfork.records.globs import CLUTTER, Reach, is_editable, is_literal, taking_in
from worldfork.records.task import Task
from worldfork.reward.gathering import Gathering, Rank
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.store.store import Store

MOST_CHANGES = 50_000
"""How many entries that a policy left are looked at below a directory of editable files; a directory that holds more
than what is left of that is not looked into, but for the files that the start has there."""
MOST_PATH_BYTES = 8 << 20
"""The same of their paths and attributes together: deep ones take as much time as many."""
MOST_COMPARED_BYTES = 1 << 30
"""What is read of files that kept their size; behind that, such a file counts as another one."""

_TIMES = 4
"""So often these, for all directories of editable files together."""
_TOP = f"{TASK_DIRECTORY.strip('/')}/"
_LONGEST_BYTES = 3000
"""Of a path that is looked below."""
_SCAN = os.O_RDONLY | os.O_DIRECTORY
_ROOTS = frozenset(("pyvenv.cfg", "conda-meta"))
"""What is at the top of an environment of Python's, however that is called."""


class Bounds(NamedTuple):
    """What is looked at, and what is taken, at most."""

    files: int
    size_bytes: int
    """Of all files together."""
    changes: int
    path_bytes: int
    compared_bytes: int


def read_edits(store: Store, start_snapshot_id: str, end_snapshot_id: str, task: Task) -> Edits:
    """Return how the editable files of one state differ from those of another. Blocking.

    An editable path that is anything but a regular file, or lies below a link, counts as removed. What is more, or
    larger, than `task.limits` let be carried stays as the start has it: files of the start are taken first, then new
    ones, last those that tools make, such as a `.venv`. `Edits.dropped` says what and why.

    Raises:
        NotFound, ConfigError, OutOfSpace, StoreError: a state cannot be read.
        DriverUnavailable: its files are of a range of ids, and this user has none.
    """
    if start_snapshot_id == end_snapshot_id:
        return Edits()
    pair = start_snapshot_id, end_snapshot_id
    bounds = Bounds(
        task.limits.carry_files, task.limits.carry_bytes, MOST_CHANGES, MOST_PATH_BYTES, MOST_COMPARED_BYTES
    )
    return with_ids(store, pair, _read, *pair, task.editable, bounds)


def _read(store: Store, old_id: str, new_id: str, patterns: Sequence[str], bounds: Bounds) -> Edits:
    with comparing(store, old_id, new_id) as (old, new):
        try:
            return edits_between(old.view, new.view, patterns, bounds)
        except StoreError as error:
            if error.fields.get("errno") != errno.EACCES or new.view.form != "user" or os.geteuid() == 0:
                raise
        # The policy has closed what is this user's own, to this user too: one process reads all of it, not one a file.
        stacks = [list(map(str, view.stack.layers)) for view in (old.view, new.view)]
        told = [json.dumps(each) for each in ([new.view.form, *bounds], *stacks, list(patterns))]
        data = b"".join(base64.b64decode(line) for line in lines_of(__name__, "_lines_of_edits", *told))
        return Edits.from_bytes(data)


def _lines_of_edits(*told: str) -> Iterator[bytes]:
    (form, *bounds), old, new, patterns = map(json.loads, told)
    views = [MergedView([Path(layer) for layer in layers], form) for layers in (old, new)]
    data = edits_between(views[0], views[1], patterns, Bounds(*bounds)).to_bytes()
    for start in range(0, len(data), 1 << 20):
        yield base64.b64encode(data[start : start + (1 << 20)]) + b"\n"


def edits_between(old: MergedView, new: MergedView, patterns: Sequence[str], bounds: Bounds) -> Edits:
    """Return how the files that patterns mean differ between two trees.

    Every entry is looked at once, however many patterns there are.

    Args:
        old, new: of one form.
        patterns: of paths in the task's directory.
        bounds: what there is more is not carried.

    Raises:
        OutOfSpace, StoreError: something cannot be read; `path` and `errno` are fields.
    """
    gathering = Gathering(bounds.files, bounds.size_bytes)
    looking = _Looking(old, new, patterns, bounds, gathering)
    for pattern in filter(is_literal, taking_in(patterns)):
        looking.at(pattern)
    for directory in _directories(patterns):
        looking.below(directory)
    return gathering.edits(new)


def _directories(patterns: Sequence[str]) -> list[str]:
    """Return the directories below which patterns mean many paths, none below another."""
    fixed = set()
    for pattern in taking_in(patterns):
        if not is_literal(pattern):
            names = pattern.split("/")[:-1]
            count = next((number for number, name in enumerate(names) if not is_literal(name)), len(names))
            fixed.add("/".join(names[:count]))
    found: list[str] = []
    for directory in sorted(fixed):
        if not any(not each or f"{directory}/".startswith(f"{each}/") for each in found):
            found.append(directory)
    return found


class _TooMuch(Exception):
    """There is more than is looked at."""


class _Pair(NamedTuple):
    """A directory in both trees, in one of which it may be missing or something else."""

    old: Node | None
    new: Node | None
    rank: Rank
    """Of new files in it."""


class _Looking:
    """Looks at what differs, and counts what that takes.

    Directories of the start come first, then others, those near the top before those below; what tools fill comes last.
    """

    def __init__(
        self, old: MergedView, new: MergedView, patterns: Sequence[str], bounds: Bounds, gathering: Gathering
    ) -> None:
        self._old = old
        self._new = new
        self._patterns = patterns
        self._bounds = bounds
        self._gathering = gathering
        self._comparison = Comparison(old, new, False, self._holds)
        self._all_left = bounds.changes * _TIMES, bounds.path_bytes * _TIMES
        self._left = 0, 0
        self._compared_left = bounds.compared_bytes
        self._reaches: dict[str, Reach] = {}
        """Of directories that were entered, by the task's path."""

    def at(self, path: str) -> None:
        """Look at one path, and at nothing below it."""
        with naming(_TOP + path, "read"):
            self._look(self._old.node(_TOP + path), self._new.node(_TOP + path), Rank.KNOWN)

    def below(self, directory: str) -> None:
        """Look at all that patterns can mean below a directory. Where there is more than the bounds allow, it is said.

        Files of the start are looked at however much lies beside them.
        """
        self._left = min(self._bounds.changes, self._all_left[0]), min(self._bounds.path_bytes, self._all_left[1])
        place = (_TOP + directory).rstrip("/")
        with naming(place, "read"):
            first = _Pair(self._old.node(place), self._new.node(place), Rank.NEW)
        waiting: tuple[deque[_Pair], ...] = tuple(deque() for _ in Rank)
        waiting[0].append(first)
        while (queue := next(filter(None, waiting), None)) is not None:
            for pair in self._enter(queue.popleft()):
                waiting[0 if _is_directory(pair.old) else pair.rank].append(pair)

    def _enter(self, pair: _Pair) -> Iterator[_Pair]:
        """Look at all that a directory holds; yield the directories among that."""
        old, new, rank = pair
        whole = (new or old or self._new.stack.root()).path
        inside = _inside(whole)
        if self._comparison.is_same_place(old, new) or not (_is_directory(old) or _is_directory(new)):
            return
        reach = self._reaches[inside] = self._reach(inside)
        if not reach.leads_on(inside):
            return
        with naming(whole, "read"):
            before = {child.path: child for child in self._old.children(old)} if old and _is_directory(old) else {}
            after = self._names(inside, old, new, before) if new and _is_directory(new) else {}
        if not _is_directory(old) and any(_name(path) in _ROOTS for path in after):
            rank = Rank.CLUTTER
        for path in sorted({*before, *after}, key=os.fsencode):
            one, other = before.get(path), after.get(path)
            with naming(path, "read"):
                self._look(one, other, rank)
            if _is_directory(one) or _is_directory(other):
                yield _Pair(one, other, Rank.CLUTTER if _name(path) in CLUTTER else rank)

    def _names(self, inside: str, old: Node | None, new: Node, before: Iterable[str]) -> dict[str, Node]:
        """Return what a directory holds now; where that is too much, what of it was in the start."""
        left = self._left
        try:
            self._count(old, new)
            return {child.path: child for child in self._new.children(new)}
        except _TooMuch:
            self._left = left
            self._gathering.drop(f"{inside}/**".lstrip("/"), "files")
            found = ((path, self._new.stack.child(new, _name(path))) for path in before)
            return {path: node for path, node in found if node is not None and node.seen.kind != "w"}

    def _look(self, old: Node | None, new: Node | None, rank: Rank) -> None:
        if self._is_meant((new or old or self._new.stack.root()).path):
            change = self._comparison.change(old, new)
            if change is not None:
                self._gathering.add(_inside(change.path), change, rank)

    def _is_meant(self, path: str) -> bool:
        inside = _inside(path)
        if not inside:
            return False
        above, _, name = inside.rpartition("/")
        reach = self._reaches.get(above)
        return is_editable(inside, self._patterns) if reach is None else reach.means(name, inside)

    def _holds(self, old: Node, new: Node) -> bool:
        """Tell whether a file holds what it did, within bounds."""
        for one, other in zip_longest(self._old.pieces(old), self._new.pieces(new)):
            self._compared_left -= len(other or b"")
            if one != other or self._compared_left < 0:
                return False
        return True

    def _reach(self, inside: str) -> Reach:
        if not inside:
            return Reach.of(self._patterns)
        above, _, name = inside.rpartition("/")
        return (self._reaches.get(above) or self._reach(above)).below(name)

    def _count(self, old: Node | None, new: Node) -> None:
        """Count the names of a directory without keeping any, since a comparison lists it whole.

        Names that lie where they lay are the start's, and its own business.
        """
        length = len(os.fsencode(new.path)) + 1
        if length > _LONGEST_BYTES:
            raise _TooMuch
        before = self._old.stack.layers
        known = {(before[layer], inside) for layer, inside in old.stack} if old is not None else set()
        for layer, inside in new.stack:
            if (self._new.stack.layers[layer], inside) in known:
                continue
            fd = self._new.stack.open(layer, inside, _SCAN)
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        self._take(length + len(os.fsencode(entry.name)) + _attributes_bytes(fd, entry.name))
            finally:
                os.close(fd)

    def _take(self, path_bytes: int) -> None:
        self._left = self._left[0] - 1, self._left[1] - path_bytes
        self._all_left = self._all_left[0] - 1, self._all_left[1] - path_bytes
        if min(self._left) < 0:
            raise _TooMuch


def _attributes_bytes(directory: int, name: str) -> int:
    """Return the size of what a name's extended attributes hold: they are read with it."""
    place = f"/proc/self/fd/{directory}/{name}"
    names = os.listxattr(place, follow_symlinks=False)
    return sum(len(each) + len(os.getxattr(place, each, follow_symlinks=False)) for each in names)


def _is_directory(node: Node | None) -> bool:
    return node is not None and node.seen.kind == "d"


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _inside(path: str) -> str:
    """Return the task's path of a path of the tree; empty for the task's directory."""
    return f"{path}/".removeprefix(_TOP).rstrip("/")
