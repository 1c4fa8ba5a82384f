"""What is taken of the files that differ, within bounds."""

from __future__ import annotations

from enum import IntEnum

from worldfork.content.compare import Change
from worldfork.content.failures import naming
from worldfork.content.merged import MergedView
from worldfork.content.stack import Node
from worldfork.records.edits import MOST_DROPPED, EditedFile, Edits


class Rank(IntEnum):
    """What is taken first: nothing that a policy made pushes out what the task is about."""

    KNOWN = 0
    """A file of the starting state, or one that a pattern names in full."""
    NEW = 1
    CLUTTER = 2
    """A new file below a directory that tools fill."""


class Gathering:
    """Collects files, and at the end takes as many as the bounds let it.

    Args:
        files: how many are taken.
        size_bytes: how much, of all of them together.
    """

    def __init__(self, files: int, size_bytes: int) -> None:
        self._found: tuple[dict[str, Node], ...] = tuple({} for _ in Rank)
        self._removed: set[str] = set()
        self._dropped: set[tuple[str, str]] = set()
        self._most_files = files
        self._room_bytes = size_bytes

    def add(self, path: str, change: Change, rank: Rank) -> None:
        """Take in one path that differs; `path` is the task's."""
        if path in self._removed or any(path in each for each in self._found):
            return
        was_there = change.old is not None and change.old.seen.kind not in "dw"
        why = _refusal(path, change.new)
        if why is None and change.new is not None:
            if not _is_equal_here(change):
                self._keep(path, change.new, Rank.KNOWN if was_there else rank)
            return
        if why:
            self.drop(path, why)
        if was_there and _is_text(path):
            self._removed.add(path)

    def _keep(self, path: str, node: Node, rank: Rank) -> None:
        if _size_bytes(node) > self._room_bytes:
            self.drop(path, "bytes")
            return
        found = self._found[rank]
        found[path] = node
        if len(found) > 2 * self._most_files:
            self._thin(found, self._most_files)

    def _thin(self, found: dict[str, Node], most: int) -> None:
        """Leave out what lies deepest."""
        for path in sorted(found, key=lambda path: (path.count("/"), path))[most:]:
            del found[path]
            self.drop(path, "files")

    def drop(self, path: str, why: str) -> None:
        """Note what is not carried."""
        if len(self._dropped) < MOST_DROPPED:
            self._dropped.add((path.encode("utf-8", "backslashreplace").decode("utf-8"), why))

    def edits(self, new: MergedView) -> Edits:
        """Read what is taken. What is left out for want of room stays as the start has it, and is not removed.

        Raises:
            OutOfSpace, StoreError: something cannot be read; `path` and `errno` are fields.
        """
        files: dict[str, EditedFile] = {}
        for found in self._found:
            self._thin(found, self._most_files - len(files))
            # The small ones first: one that is large pushes out no other.
            for path, node in sorted(found.items(), key=lambda each: (_size_bytes(each[1]), each[0])):
                if _size_bytes(node) > self._room_bytes:
                    self.drop(path, "bytes")
                    continue
                with naming(node.path, "read"):
                    content = b"".join(new.pieces(node))
                self._room_bytes -= len(content)
                files[path] = EditedFile(content, _is_executable(node))
        return Edits(files, tuple(self._removed), tuple(sorted(self._dropped)))


def _refusal(path: str, node: Node | None) -> str | None:
    """Return why a path cannot be carried: empty where nothing is there to be carried, None where it can."""
    if node is None or node.seen.kind in "dw":
        return ""
    if node.seen.kind != "f" or node.seen.info is None:
        return "link" if node.seen.kind == "l" else "special"
    return None if _is_text(path) else "name"


def _size_bytes(node: Node) -> int:
    return node.seen.info.st_size if node.seen.info else 0


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
