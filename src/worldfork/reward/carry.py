"""What leaves a policy's sandbox: the declared files, as plain bytes, and nothing else.

The sandbox is stopped first, with every process in it, and what it wrote becomes a layer. That is read on the host, by
the rules of an overlay and without a mount, so that nothing of the policy's stands beside whoever reads, and the cost
follows what changed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from worldfork.content.compare import Change, compare
from worldfork.content.stack import Node
from worldfork.core.beneath import open_beneath
from worldfork.core.errors import NotFound, WorldforkError
from worldfork.keeping.browse import Browsed, comparing
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.place import place
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.globs import is_editable, is_literal
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.places import TASK_DIRECTORY

MOST_CHANGES = 50_000
"""How many paths that differ are looked at; more below a directory of editable files, and none of it is carried."""

_MOST_DROPPED = 100
_MOST_PATH_CHARACTERS = 3000


@dataclass(frozen=True)
class Carried:
    """What a policy left."""

    edits: Edits
    end_snapshot_id: str
    """The state at the end, everything in it stopped; for throwing away. The caller deletes it."""

    async def drop(self) -> None:
        """Delete the state at the end. Idempotent."""
        with contextlib.suppress(NotFound):
            await AsyncSandbox.delete_snapshot(self.end_snapshot_id)


async def carry_out(
    sandbox: AsyncSandbox, task: Task, *, start_snapshot_id: str, level: str = "volatile", label: str | None = None
) -> Carried:
    """End a policy's sandbox and every process in it, then read what it made of the task's editable files.

    An editable path that is anything but a regular file, or lies below a link, counts as removed; so does what is
    more, or larger, than `task.limits` let be carried. `Edits.dropped` says what and why.

    Args:
        sandbox: ends in any case.
        task: the problem.
        start_snapshot_id: the starting state that the sandbox was forked from.
        level, label: of the state at the end; one that is to be kept is `local`.

    Raises:
        SandboxDied: the sandbox did not live to be stopped. OutOfSpace: it was ended for its disk, or the host is full.
        SandboxError, StoreError, ForkError: it could not be stopped or read.
    """
    end = await sandbox.checkpoint(stop=True, level=level, label=label)
    here = place()
    try:
        edits = await here.work(partial(read_edits, start_snapshot_id, end.snapshot_id, task))
    except BaseException:
        with contextlib.suppress(WorldforkError):
            await AsyncSandbox.delete_snapshot(end.snapshot_id)
        raise
    return Carried(edits, end.snapshot_id)


def read_edits(start_snapshot_id: str, end_snapshot_id: str, task: Task) -> Edits:
    """Return how the editable files of one state differ from those of another. Blocking.

    Raises:
        NotFound, ConfigError, OutOfSpace, StoreError: a state cannot be read.
    """
    if start_snapshot_id == end_snapshot_id:
        return Edits()
    gathering = _Gathering(task.limits)
    with comparing(place().store, start_snapshot_id, end_snapshot_id) as (old, new):
        for pattern in task.editable:
            found = _changes(old, new, pattern)
            if found is None:
                gathering.drop(pattern, "files")
                continue
            for change in found:
                gathering.add(change, new)
    return gathering.edits()


def _changes(old: Browsed, new: Browsed, pattern: str) -> list[Change] | None:
    """Return what differs of the files that a pattern means; None where too much does to be looked at."""
    top = f"{TASK_DIRECTORY.strip('/')}/"
    if is_literal(pattern):
        return [change for change in _bounded(old, new, top + pattern, 1) if change.path == top + pattern]
    fixed: list[str] = []
    for name in pattern.split("/")[:-1]:
        if not is_literal(name):
            break
        fixed.append(name)
    if _is_wide(old, new, top + "/".join(fixed)):
        return None
    changes = list(_bounded(old, new, (top + "/".join(fixed)).rstrip("/"), MOST_CHANGES))
    if len(changes) >= MOST_CHANGES:
        return None
    return [change for change in changes if is_editable(change.path.removeprefix(top), [pattern])]


def _bounded(old: Browsed, new: Browsed, path: str, most: int) -> Iterator[Change]:
    for count, change in enumerate(compare(old.view, new.view, path), start=1):
        yield change
        if count >= most:
            return


def _is_wide(old: Browsed, new: Browsed, path: str) -> bool:
    """Whether the layers that a policy wrote have too many entries below a path, or too deep ones.

    Counted name by name without keeping any, since a comparison lists directories whole.
    """
    before = frozenset(old.view.stack.layers)
    return any(_is_wide_layer(layer, path) for layer in new.view.stack.layers if layer not in before)


def _is_wide_layer(layer: Path, path: str) -> bool:
    top = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        count = 0
        waiting = [path.rstrip("/")]
        while waiting:
            directory = waiting.pop()
            for entry in _entries(top, directory):
                count += 1
                if count > MOST_CHANGES or len(directory) > _MOST_PATH_CHARACTERS:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{directory}/{entry.name}")
        return False
    finally:
        os.close(top)


def _entries(top: int, directory: str) -> Iterator[os.DirEntry[str]]:
    try:
        descriptor = open_beneath(top, directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # not there, a link, or closed to this user: then a process that may read it lists it
    try:
        with os.scandir(descriptor) as entries:
            yield from entries
    finally:
        os.close(descriptor)


class _Gathering:
    """Collects files within the limits of a task."""

    def __init__(self, limits: TaskLimits) -> None:
        self._files: dict[str, EditedFile] = {}
        self._removed: set[str] = set()
        self._dropped: set[tuple[str, str]] = set()
        self._most_files = limits.carry_files
        self._room_bytes = limits.carry_bytes

    def add(self, change: Change, new: Browsed) -> None:
        path = change.path.removeprefix(f"{TASK_DIRECTORY.strip('/')}/")
        if path in self._files or path in self._removed:
            return
        why = self._refusal(path, change.new)
        if why is None and change.new is not None:
            if change.what and not {"kind", "content", "mode"} & set(change.what):
                return  # another owner, attribute or time: not carried, and no difference to what is
            content = b"".join(new.view.read(change.new))
            self._room_bytes -= len(content)
            info = change.new.seen.info
            self._files[path] = EditedFile(content, bool(info and info.st_mode & 0o111))
            return
        if why:
            self.drop(path, why)
        if change.old is not None and change.old.seen.kind != "d":
            self._removed.add(path)

    def _refusal(self, path: str, node: Node | None) -> str | None:
        """Return why a path is not carried: empty where nothing is there to be carried, None where it is."""
        if node is None or node.seen.kind in "dw":
            return ""
        if node.seen.kind != "f" or node.seen.info is None:
            return "link" if node.seen.kind == "l" else "special"
        try:
            path.encode("utf-8")
        except UnicodeEncodeError:
            return "name"
        if len(self._files) >= self._most_files:
            return "files"
        if node.seen.info.st_size > self._room_bytes:
            return "bytes"
        return None

    def drop(self, path: str, why: str) -> None:
        if len(self._dropped) < _MOST_DROPPED:
            self._dropped.add((path.encode("utf-8", "backslashreplace").decode("utf-8"), why))

    def edits(self) -> Edits:
        return Edits(self._files, tuple(self._removed), tuple(sorted(self._dropped)))
