"""Applying patches, to the letter: every old line must stand where the patch says, or nothing is changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from io import BytesIO

from worldfork.content.patches.binary import applied
from worldfork.content.patches.model import (
    MAX_FILE_BYTES,
    MAX_RESULT_BYTES,
    REGULAR,
    FilePatch,
    Hunk,
    Patch,
    PatchFile,
    refusal,
)
from worldfork.core.errors import ConfigError

Read = Callable[[str], PatchFile | None]
"""Returns the file or link at a path; None for nothing, and for a directory unless it refuses that by raising."""


def apply_patch(patch: Patch, read: Read, *, moved: bool = False) -> dict[str, PatchFile | None]:
    """Return what a patch makes of a tree, which it does not touch.

    Args:
        patch: what `parse_patch` returned.
        read: looks into the tree; of a mapping of paths its `get` will do.
        moved: whether a hunk may also be applied elsewhere in its file, where its old lines stand in one place only,
            as in a file that has grown since. Without it, and always within a hunk, nothing is guessed.

    Returns:
        path -> the file as it is then, or None where there is none any more; sorted. Nothing of what is as before.

    Raises:
        ConfigError: it does not apply; `path`, `hunk` (from 1) and `why` tell where. Whatever `read` raises.
    """
    applying = _Applying(read, moved)
    # Whether a path is free is asked of the tree as it is at the end: two files may take each other's name.
    leaving = {each.old_path for each in patch.files if each.kind in ("delete", "rename") and each.old_path}
    for each in patch.files:
        try:
            applying.take(each, leaving)
        except ConfigError as error:
            if error.fields.get("field") == "patch" and not error.fields.get("path"):
                raise refusal(each.path, str(error.fields["why"]), error.fields.get("hunk")) from None
            raise
    return applying.result()


class _Applying:
    def __init__(self, read: Read, moved: bool) -> None:
        self._read = read
        self._moved = moved
        self._written: dict[str, PatchFile] = {}
        self._gone: set[str] = set()
        self._room_bytes = MAX_RESULT_BYTES

    def take(self, each: FilePatch, leaving: set[str]) -> None:
        """Apply what is said of one file."""
        before = None if each.old_path is None else self._present(each)
        if each.old_path is not None and before is None:
            if _makes_plain(each):
                self._write(each.path, PatchFile(_patched(each, b"", self._moved), REGULAR))
                return
            raise refusal(each.old_path, "the file is not there")
        old = before or PatchFile(b"", REGULAR)
        if each.old_mode and old.mode and (each.old_mode == 0o120000) != old.is_link:
            raise refusal(each.path, "of a link and a file, it is of the one, and the other is there")
        content = _patched(each, old.content, self._moved)
        if each.kind == "delete":
            if content:
                raise refusal(each.path, "the file that it removes has more in it than the patch says")
            self._written.pop(each.path, None)
            self._gone.add(each.path)
            return
        if each.kind in ("create", "rename", "copy"):
            self._expect_free(each.path, leaving)
        if each.kind == "rename" and each.old_path is not None and each.old_path not in self._written:
            self._gone.add(each.old_path)
        self._write(each.path, PatchFile(content, each.new_mode or old.mode))

    def _present(self, each: FilePatch) -> PatchFile | None:
        path = each.old_path or ""
        if each.kind in ("rename", "copy"):
            # These speak of the tree before the patch, whatever the order.
            return self._read(path) or self._written.get(path)
        if path in self._written:
            return self._written[path]
        return None if path in self._gone else self._read(path)

    def _expect_free(self, path: str, leaving: set[str]) -> None:
        there = path in self._written or (path not in leaving and self._read(path) is not None)
        if there:
            raise refusal(path, "a file is there already")

    def _write(self, path: str, file: PatchFile) -> None:
        self._room_bytes -= len(file.content)
        if len(file.content) > MAX_FILE_BYTES or self._room_bytes < 0:
            raise refusal(path, "what it makes is larger than is taken")
        self._written[path] = file

    def result(self) -> dict[str, PatchFile | None]:
        """Return what differs, once no file stands where another needs a directory."""
        sound: set[str] = set()
        for path in self._written:
            parent = path.rpartition("/")[0]
            while parent and parent not in sound:
                sound.add(parent)
                if parent in self._written or (parent not in self._gone and self._read(parent) is not None):
                    raise refusal(path, f"{parent!r} is a file or a link, and no directory")
                parent = parent.rpartition("/")[0]
        found: dict[str, PatchFile | None] = dict.fromkeys(self._gone)
        found |= self._written
        return {path: found[path] for path in sorted(found) if found[path] is None or found[path] != self._read(path)}


def _makes_plain(each: FilePatch) -> bool:
    """Whether a diff without git's heads is of a new file: its old side is empty, though it has a name."""
    return not each.from_git and each.kind == "change" and len(each.hunks) == 1 and each.hunks[0].old_start == 0


def _patched(each: FilePatch, old: bytes, moved: bool) -> bytes:
    if each.binary is not None:
        if each.old_id and each.old_path is not None and blob_id(old, len(each.old_id)) != each.old_id:
            raise refusal(each.path, "its binary piece is of another content than is there")
        return applied(each.binary, old)
    if not each.hunks:
        return b"" if each.kind == "delete" and not old else old
    return _with_hunks(each, old, moved)


def blob_id(content: bytes, digits: int = 40) -> str:
    """Return the name of a content in git, as 40 (SHA-1) or 64 (SHA-256) hex digits."""
    head = b"blob %d\0" % len(content)
    if digits == 64:
        return hashlib.sha256(head + content).hexdigest()
    return hashlib.sha1(head + content, usedforsecurity=False).hexdigest()


def _with_hunks(each: FilePatch, old: bytes, moved: bool) -> bytes:
    lines = BytesIO(old).readlines()
    made: list[bytes] = []
    place = shift = 0
    for number, hunk in enumerate(each.hunks, start=1):
        start = hunk.old_start - (1 if hunk.old else 0)
        at = start if _stands(lines, hunk, start, place) else None
        if at is None and moved:
            at = _elsewhere(lines, hunk, place, start + shift)
        if at is None:
            raise refusal(each.path, _why_not(lines, hunk, start, place), number)
        shift = at - start
        made += lines[place:at]
        made += hunk.new
        place = at + len(hunk.old)
        if hunk.new and not hunk.new[-1].endswith(b"\n") and place < len(lines):
            raise refusal(each.path, "it takes the end off a line that is not the last", number)
        if not hunk.new and place < len(lines) and made and not made[-1].endswith(b"\n"):
            raise refusal(each.path, "it joins two lines", number)
    made += lines[place:]
    if any(not line.endswith(b"\n") for line in made[:-1]):
        raise refusal(each.path, "it puts lines behind one without an end", len(each.hunks))
    return b"".join(made)


def _stands(lines: Sequence[bytes], hunk: Hunk, at: int, lowest: int) -> bool:
    return lowest <= at <= len(lines) and tuple(lines[at : at + len(hunk.old)]) == hunk.old


def _elsewhere(lines: Sequence[bytes], hunk: Hunk, lowest: int, hint: int) -> int | None:
    """Return the one place where the old lines of a hunk stand; where several do, the one that moved with the last."""
    if not hunk.old:
        return None
    found: list[int] = []
    size = len(hunk.old)
    for at in range(lowest, len(lines) - size + 1):
        if lines[at] == hunk.old[0] and tuple(lines[at : at + size]) == hunk.old:
            found.append(at)
            if len(found) > 1:
                return hint if _stands(lines, hunk, hint, lowest) else None
    return found[0] if found else None


def _why_not(lines: Sequence[bytes], hunk: Hunk, start: int, lowest: int) -> str:
    if start < lowest:
        return "it begins before the hunk before it ends"
    for offset, line in enumerate(hunk.old):
        there = lines[start + offset] if start + offset < len(lines) else None
        if there != line:
            what = "the file has ended" if there is None else f"the file has {_excerpt(there)}"
            return f"line {start + offset + 1} should be {_excerpt(line)}, and {what}"
    return f"the file has {len(lines)} lines, and it begins after line {start}"


def _excerpt(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", "backslashreplace"))
