"""How the editable files of two states differ, read on the host from their layers.

What that costs is decided by how much a policy left, so it is bounded by what is looked at and not by a clock: what
there is more is not carried, and a policy gains nothing by leaving much.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from worldfork.content.compare import Enters, compare
from worldfork.content.failures import naming
from worldfork.content.mapped import lines_of
from worldfork.content.merged import MergedView
from worldfork.content.stack import Node
from worldfork.core.errors import StoreError
from worldfork.keeping.browse import comparing
from worldfork.keeping.with_ids import with_ids
from worldfork.records.edits import Edits
from worldfork.records.globs import Reach, is_editable, is_literal, taking_in
from worldfork.records.task import Task
from worldfork.reward.gathering import Gathering, pieces_of
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.store.store import Store

MOST_CHANGES = 50_000
"""How many entries that a policy left are looked at below a directory of editable files; more, and none is carried."""
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

    An editable path that is anything but a regular file, or lies below a link, counts as removed; so does what is
    more, or larger, than `task.limits` let be carried. `Edits.dropped` says what and why.

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
    looking = _Looking(old, new, patterns, bounds)
    for pattern in filter(is_literal, taking_in(patterns)):
        looking.at(pattern, gathering)
    for directory, meant in _directories(patterns).items():
        trial = gathering.copy()
        try:
            looking.below(directory, trial)
            gathering = trial
        except _TooMuch:
            for pattern in meant:
                gathering.drop(pattern, "files")
    return gathering.edits()


def _directories(patterns: Sequence[str]) -> dict[str, list[str]]:
    """Return the directories below which patterns mean many paths, none below another, each with its patterns."""
    fixed = []
    for pattern in taking_in(patterns):
        if not is_literal(pattern):
            names = pattern.split("/")[:-1]
            count = next((number for number, name in enumerate(names) if not is_literal(name)), len(names))
            fixed.append(("/".join(names[:count]), pattern))
    found: dict[str, list[str]] = {}
    for directory, pattern in sorted(fixed):
        above = next((each for each in found if not each or f"{directory}/".startswith(f"{each}/")), directory)
        found.setdefault(above, []).append(pattern)
    return found


class _TooMuch(Exception):
    """There is more than is looked at."""


class _Looking:
    """Looks at what differs, and counts what that takes."""

    def __init__(self, old: MergedView, new: MergedView, patterns: Sequence[str], bounds: Bounds) -> None:
        self._old = old
        self._new = new
        self._patterns = patterns
        self._bounds = bounds
        self._all_left = bounds.changes * _TIMES, bounds.path_bytes * _TIMES
        self._left = 0, 0
        self._compared_left = bounds.compared_bytes
        self._reaches: dict[str, Reach] = {}
        """Of directories that were entered, by the task's path."""

    def at(self, path: str, gathering: Gathering) -> None:
        """Look at one path, and at nothing below it."""
        self._look(path, gathering, lambda *_: False)

    def below(self, directory: str, gathering: Gathering) -> None:
        """Look at all that patterns can mean below a directory.

        Raises:
            _TooMuch: there is more than the bounds allow.
        """
        self._left = min(self._bounds.changes, self._all_left[0]), min(self._bounds.path_bytes, self._all_left[1])
        self._look(directory, gathering, self._enters)

    def _look(self, path: str, gathering: Gathering, enters: Enters) -> None:
        place = (_TOP + path).rstrip("/")
        for change in compare(self._old, self._new, place, enters=enters, holds=self._holds):
            if self._is_meant(change.path):
                with naming(change.path, "read"):
                    gathering.add(_inside(change.path), change, self._new)

    def _is_meant(self, path: str) -> bool:
        inside = _inside(path)
        if not inside:
            return False
        above, _, name = inside.rpartition("/")
        reach = self._reaches.get(above)
        return is_editable(inside, self._patterns) if reach is None else reach.means(name, inside)

    def _holds(self, old: Node, new: Node) -> bool:
        """Tell whether a file holds what it did; of one that nobody asks for, and within bounds."""
        if not self._is_meant(new.path):
            return True
        for one, other in zip_longest(pieces_of(self._old, old), pieces_of(self._new, new)):
            self._compared_left -= len(other or b"")
            if one != other or self._compared_left < 0:
                return False
        return True

    def _enters(self, old: Node | None, new: Node | None) -> bool:
        inside = _inside((new or old or self._new.stack.root()).path)
        reach = self._reaches[inside] = self._reach(inside)
        if not reach.leads_on(inside):
            return False
        if new is not None and new.seen.kind == "d":
            self._count(old, new)
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


def _inside(path: str) -> str:
    """Return the task's path of a path of the tree; empty for the task's directory."""
    return f"{path}/".removeprefix(_TOP).rstrip("/")
