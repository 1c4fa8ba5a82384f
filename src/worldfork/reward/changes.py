"""How the editable files of two states differ, read on the host from their layers, in bounded time and memory."""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from worldfork.content.compare import Change, compare
from worldfork.content.failures import naming
from worldfork.content.mapped import lines_of
from worldfork.content.merged import MergedView
from worldfork.content.stack import Node
from worldfork.core.beneath import open_beneath
from worldfork.core.errors import StoreError
from worldfork.keeping.browse import comparing
from worldfork.keeping.with_ids import with_ids
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.globs import is_editable, is_literal, taking_in
from worldfork.records.task import Task
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.store.store import Store

MOST_CHANGES = 50_000
"""How many paths that differ are looked at; more below a directory of editable files, and none of it is carried."""

_TOP = f"{TASK_DIRECTORY.strip('/')}/"
_MOST_DROPPED = 100
_MOST_PATH_BYTES = 3000
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)


class Bounds(NamedTuple):
    """What is looked at, and what is taken, at most."""

    files: int
    size_bytes: int
    """Of all files together."""
    changes: int


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
    bounds = Bounds(task.limits.carry_files, task.limits.carry_bytes, MOST_CHANGES)
    return with_ids(store, pair, _read, *pair, task.editable, bounds)


def _read(store: Store, old_id: str, new_id: str, patterns: Sequence[str], bounds: Bounds) -> Edits:
    with comparing(store, old_id, new_id) as (old, new):
        try:
            return edits_between(old.view, new.view, patterns, bounds)
        except StoreError as error:
            if error.fields.get("errno") != errno.EACCES or new.view.form != "user" or os.geteuid() == 0:
                raise
        # The policy has closed what is this user's own, to this user too.
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

    Args:
        old, new: of one form.
        patterns: of paths in the task's directory.
        bounds: what there is more is not carried.

    Raises:
        OutOfSpace, StoreError: something cannot be read; `path` and `errno` are fields.
    """
    gathering = _Gathering(bounds)
    for pattern in taking_in(patterns):
        found = _changes(old, new, pattern, bounds.changes)
        if found is None:
            gathering.drop(pattern, "files")
            continue
        for change in found:
            if not is_editable(change.path.removeprefix(_TOP), patterns):
                continue
            with naming(change.path, "read"):
                gathering.add(change, new)
    return gathering.edits()


def _changes(old: MergedView, new: MergedView, pattern: str, most: int) -> list[Change] | None:
    """Return what differs of the files that a pattern means; None where too much does to be looked at."""
    if is_literal(pattern):
        return [change for change in _bounded(old, new, _TOP + pattern, 1) if change.path == _TOP + pattern]
    fixed: list[str] = []
    for name in pattern.split("/")[:-1]:
        if not is_literal(name):
            break
        fixed.append(name)
    above = (_TOP + "/".join(fixed)).rstrip("/")
    if _is_wide(old, new, above, most):
        return None
    changes = list(_bounded(old, new, above, most))
    if len(changes) >= most:
        return None
    return [change for change in changes if is_editable(change.path.removeprefix(_TOP), [pattern])]


def _bounded(old: MergedView, new: MergedView, path: str, most: int) -> Iterator[Change]:
    for count, change in enumerate(compare(old, new, path), start=1):
        yield change
        if count >= most:
            return


def _is_wide(old: MergedView, new: MergedView, path: str, most: int) -> bool:
    """Whether the layers that a policy wrote have too many entries below a path, or too deep ones.

    Counted name by name without keeping any, since a comparison lists directories whole.
    """
    before = frozenset(old.stack.layers)
    return any(_is_wide_layer(layer, path, most) for layer in new.stack.layers if layer not in before)


def _is_wide_layer(layer: Path, path: str, most: int) -> bool:
    top = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        count = 0
        waiting = [path]
        while waiting:
            directory = waiting.pop()
            if len(os.fsencode(directory)) > _MOST_PATH_BYTES:
                return True
            for entry in _entries(top, directory):
                count += 1
                if count > most:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{directory}/{entry.name}")
        return False
    finally:
        os.close(top)


def _entries(top: int, directory: str) -> Iterator[os.DirEntry[str]]:
    try:
        descriptor = open_beneath(top, directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in _NOT_THERE:
            with naming(directory, "read"):
                raise
        return  # closed to this user: then comparing meets it too, and a process that may read it does all again
    try:
        with os.scandir(descriptor) as entries:
            yield from entries
    finally:
        os.close(descriptor)


class _Gathering:
    """Collects files within bounds."""

    def __init__(self, bounds: Bounds) -> None:
        self._files: dict[str, EditedFile] = {}
        self._removed: set[str] = set()
        self._dropped: set[tuple[str, str]] = set()
        self._most_files = bounds.files
        self._room_bytes = bounds.size_bytes

    def add(self, change: Change, new: MergedView) -> None:
        """Take in one path that differs."""
        path = change.path.removeprefix(_TOP)
        if path in self._files or path in self._removed:
            return
        why = self._refusal(path, change.new)
        if why is None and change.new is not None:
            if _is_equal_here(change):
                return
            content = b"".join(new.read(change.new))
            self._room_bytes -= len(content)
            self._files[path] = EditedFile(content, _is_executable(change.new))
            return
        if why:
            self.drop(path, why)
        if change.old is not None and change.old.seen.kind != "d" and _is_text(path):
            self._removed.add(path)

    def _refusal(self, path: str, node: Node | None) -> str | None:
        """Return why a path is not carried: empty where nothing is there to be carried, None where it is."""
        if node is None or node.seen.kind in "dw":
            return ""
        if node.seen.kind != "f" or node.seen.info is None:
            return "link" if node.seen.kind == "l" else "special"
        if not _is_text(path):
            return "name"
        if len(self._files) >= self._most_files:
            return "files"
        if node.seen.info.st_size > self._room_bytes:
            return "bytes"
        return None

    def drop(self, path: str, why: str) -> None:
        """Note what is not carried."""
        if len(self._dropped) < _MOST_DROPPED:
            self._dropped.add((path.encode("utf-8", "backslashreplace").decode("utf-8"), why))

    def edits(self) -> Edits:
        """Return what was collected."""
        return Edits(self._files, tuple(self._removed), tuple(sorted(self._dropped)))


def _is_text(path: str) -> bool:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_equal_here(change: Change) -> bool:
    """Whether only an owner, an attribute or a permission is another, of which nothing is carried."""
    same = change.how == "changed" and not {"kind", "content"} & set(change.what)
    return same and _is_executable(change.old) == _is_executable(change.new)


def _is_executable(node: Node | None) -> bool:
    return bool(node and node.seen.info and node.seen.info.st_mode & 0o111)
