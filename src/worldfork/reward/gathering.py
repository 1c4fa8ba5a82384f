"""What is taken of the files that differ, within bounds."""

from __future__ import annotations

import os
from collections.abc import Iterator

from worldfork.content.compare import Change
from worldfork.content.merged import MergedView
from worldfork.content.stack import Node
from worldfork.records.edits import EditedFile, Edits

_MOST_DROPPED = 100
_CHUNK_BYTES = 1 << 20


class Gathering:
    """Collects files.

    Args:
        files: how many are taken.
        size_bytes: how much, of all of them together.
    """

    def __init__(self, files: int, size_bytes: int) -> None:
        self._files: dict[str, EditedFile] = {}
        self._removed: set[str] = set()
        self._dropped: set[tuple[str, str]] = set()
        self._most_files = files
        self._room_bytes = size_bytes

    def copy(self) -> Gathering:
        """Return one that has what this one has, and from then on does not change with it."""
        other = Gathering(self._most_files, self._room_bytes)
        other._files, other._removed, other._dropped = dict(self._files), set(self._removed), set(self._dropped)
        return other

    def add(self, path: str, change: Change, new: MergedView) -> None:
        """Take in one path that differs; `path` is the task's.

        Raises:
            OSError: it cannot be read.
        """
        if path in self._files or path in self._removed:
            return
        why = self._refusal(path, change.new)
        if why is None and change.new is not None:
            if _is_equal_here(change):
                return
            content = b"".join(pieces_of(new, change.new))
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


def pieces_of(view: MergedView, node: Node) -> Iterator[bytes]:
    """Yield a file's content, piece by piece.

    Raises:
        OSError: it cannot be read, for one because its owner has closed it.
    """
    fd = view.open_node(node)
    try:
        while data := os.read(fd, _CHUNK_BYTES):
            yield data
    finally:
        os.close(fd)


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
