"""Reading patches: unified diffs, with the heads of git or without."""

from __future__ import annotations

import re
from collections.abc import Iterator

from worldfork.content.patches.binary import decoded
from worldfork.content.patches.model import (
    EXECUTABLE,
    LINK,
    MAX_FILES,
    MAX_HUNKS,
    MAX_PATCH_BYTES,
    MAX_RESULT_BYTES,
    REGULAR,
    Binary,
    FilePatch,
    Hunk,
    Patch,
    checked_path,
    refusal,
)
from worldfork.content.patches.names import one_name, same_name, unquoted
from worldfork.core.errors import ConfigError

_HUNK = re.compile(rb"@@ -(\d{1,10})(?:,(\d{1,10}))? \+(\d{1,10})(?:,(\d{1,10}))? @@")
_INDEX = re.compile(rb"([0-9a-f]{4,64})\.\.([0-9a-f]{4,64})(?: (\d{6}))?$")
_PIECE = re.compile(rb"(literal|delta) (\d{1,12})$")
_FULL_ID = (40, 64)
_HEAD_BYTES = 9000
"""Longer than two paths; a longer head is none."""


def parse_patch(data: bytes | str, *, strip: int = 1) -> Patch:
    """Read a patch; text before, between and after its files is skipped, as of a mail.

    Args:
        data: a unified diff, also in git's form with modes, renames, copies and binary pieces; at most 64 MiB.
        strip: how many leading directories to take off every path (`a/` and `b/`).

    Raises:
        ConfigError: it is none, is damaged, larger than is taken, or names a path out of the tree. `path` and `hunk`
            (from 1) tell where.
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogateescape")
    if len(data) > MAX_PATCH_BYTES:
        raise refusal("", f"it has {len(data)} bytes, more than {MAX_PATCH_BYTES}")
    files = tuple(_Parser(data, strip).files())
    if not files and data.strip():
        raise refusal("", "there is no unified diff in it")
    return Patch(files)


class _Lines:
    """Lines without their ends, one looked at ahead; never all at once in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0
        self._end = 0
        self._find()

    def _find(self) -> None:
        found = self._data.find(b"\n", self._place)
        self._end = len(self._data) if found < 0 else found

    @property
    def over(self) -> bool:
        return self._place >= len(self._data)

    def peek(self) -> bytes:
        return self._data[self._place : self._end]

    def starts(self, *words: bytes) -> bool:
        return self._data.startswith(words, self._place)

    def take(self) -> bytes:
        line = self.peek()
        self._place = self._end + 1
        self._find()
        return line

    def after(self) -> bytes:
        """Return the beginning of the line after the next."""
        return self._data[self._end + 1 : self._end + 5]


class _Heads:
    """What the heads of one file say, before it is made into one record."""

    def __init__(self, name: str | None, strip: int, from_git: bool) -> None:
        self.name = name
        self.strip = strip
        self.from_git = from_git
        self.kind = ""
        self.names: dict[str, str | None] = {}
        self.modes = {"old": 0, "new": 0}
        self.old_id = ""
        self.mode = 0

    def take(self, line: bytes) -> bool:
        """Take in a head of git; False if it is none."""
        for word, read in _HEADS.items():
            if line.startswith(word):
                read(self, line[len(word) :])
                return True
        return False

    def skip(self, text: bytes) -> None:
        """Take in what decides nothing."""

    def old_mode(self, text: bytes) -> None:
        self.modes["old"] = _mode(text)

    def new_mode(self, text: bytes) -> None:
        self.modes["new"] = _mode(text)

    def created(self, text: bytes) -> None:
        self.kind = "create"
        self.modes["new"] = _mode(text)

    def deleted(self, text: bytes) -> None:
        self.kind = "delete"
        self.modes["old"] = _mode(text)

    def came(self, kind: str, side: str, text: bytes) -> None:
        self.kind = kind
        self.names[side] = checked_path(unquoted(text)[0] if text.startswith(b'"') else text)

    def index(self, text: bytes) -> None:
        found = _INDEX.match(text)
        if found is None:
            return
        if len(found[1]) in _FULL_ID:
            self.old_id = found[1].decode()
        if found[3]:
            self.mode = _mode(found[3])

    def sides(self, old: bytes, new: bytes) -> None:
        """Take in the heads of the text, `---` and `+++`."""
        for side, text in (("old", old), ("new", new)):
            name = one_name(text, self.strip)
            told = self.names.get(side, self.name)
            if self.kind in ("rename", "copy") and name != told:
                raise refusal(str(told), "its heads name different files")
            self.names[side] = name
        if self.names["old"] is None:
            self._expect("create")
        if self.names["new"] is None:
            self._expect("delete")

    def _expect(self, kind: str) -> None:
        if self.kind not in ("", kind):
            raise refusal(self.name or "", "its heads contradict each other")
        self.kind = kind

    def record(self, hunks: tuple[Hunk, ...], binary: Binary | None) -> FilePatch:
        """Return all of it as one record."""
        kind = self.kind or "change"
        old = None if kind == "create" else self.names.get("old", self.name)
        new = None if kind == "delete" else self.names.get("new", self.name)
        if (old is None and kind != "create") or (new is None and kind != "delete"):
            raise refusal(self.name or old or new or "", "its heads do not name the file")
        if kind == "change" and old != new:
            raise refusal(str(new), "its heads name different files and tell no rename")
        if kind == "change" and not (hunks or binary or self.modes["new"]):
            raise refusal(str(new), "nothing is said of it")
        old_mode = self.modes["old"] or (0 if kind == "create" else self.mode)
        new_mode = self.modes["new"] or (self.mode if kind == "create" else 0)
        return FilePatch(kind, old, new, old_mode, new_mode, hunks, binary, self.old_id, self.from_git)


_HEADS = {
    b"old mode ": _Heads.old_mode,
    b"new mode ": _Heads.new_mode,
    b"new file mode ": _Heads.created,
    b"deleted file mode ": _Heads.deleted,
    b"rename from ": lambda heads, text: heads.came("rename", "old", text),
    b"rename to ": lambda heads, text: heads.came("rename", "new", text),
    b"rename old ": lambda heads, text: heads.came("rename", "old", text),
    b"rename new ": lambda heads, text: heads.came("rename", "new", text),
    b"copy from ": lambda heads, text: heads.came("copy", "old", text),
    b"copy to ": lambda heads, text: heads.came("copy", "new", text),
    b"similarity index ": _Heads.skip,
    b"dissimilarity index ": _Heads.skip,
    b"index ": _Heads.index,
}


class _Parser:
    def __init__(self, data: bytes, strip: int) -> None:
        self._lines = _Lines(data)
        self._strip = strip
        self._hunks = 0
        self._room_bytes = MAX_RESULT_BYTES

    def files(self) -> Iterator[FilePatch]:
        lines = self._lines
        count = 0
        while not lines.over:
            if lines.starts(b"diff --git "):
                yield self._of_git()
            elif lines.starts(b"--- ") and lines.after() == b"+++ ":
                yield self._plain()
            elif lines.starts(b"@@ -") and _HUNK.match(lines.peek()):
                raise refusal("", "a hunk comes before the heads that name its file")
            else:
                lines.take()
                continue
            count += 1
            if count > MAX_FILES:
                raise refusal("", f"it is of more than {MAX_FILES} files")

    def _of_git(self) -> FilePatch:
        lines = self._lines
        head = lines.take().removesuffix(b"\r")
        if len(head) > _HEAD_BYTES:
            raise refusal("", "its heads are longer than two paths")
        heads = _Heads(same_name(head.removeprefix(b"diff --git "), self._strip), self._strip, True)
        with _naming(heads):
            while not lines.over and heads.take(lines.peek()[:_HEAD_BYTES].removesuffix(b"\r")):
                lines.take()
            if lines.starts(b"Binary files ", b"Files ") and lines.peek().endswith(b" differ"):
                raise refusal(
                    heads.name or "", "its binary content is not in the patch; make that with `git diff --binary`"
                )
            if lines.starts(b"GIT binary patch"):
                lines.take()
                return heads.record((), self._binary())
            if lines.starts(b"--- ") and lines.after() == b"+++ ":
                self._sides(heads)
                return heads.record(tuple(self._all_hunks(heads)), None)
            return heads.record((), None)

    def _plain(self) -> FilePatch:
        heads = _Heads(None, self._strip, False)
        self._sides(heads)
        heads.name = heads.names["new"] or heads.names["old"]
        with _naming(heads):
            hunks = tuple(self._all_hunks(heads))
            if not hunks:
                raise refusal(heads.name or "", "no hunk follows its heads")
            if heads.kind == "" and heads.names["old"] != heads.names["new"]:
                heads.names["old"] = heads.names["new"]  # as of `diff -u file.orig file`: the new name counts
            return heads.record(hunks, None)

    def _sides(self, heads: _Heads) -> None:
        old, new = (self._lines.take().removesuffix(b"\r")[4:] for _ in range(2))
        heads.sides(old, new)

    def _all_hunks(self, heads: _Heads) -> Iterator[Hunk]:
        number = 0
        while self._lines.starts(b"@@ -"):
            number += 1
            self._hunks += 1
            if self._hunks > MAX_HUNKS:
                raise refusal("", f"it has more than {MAX_HUNKS} hunks")
            name = heads.names.get("new") or heads.names.get("old") or ""
            yield self._hunk(name, number)
        if number and self._lines.starts(b" ", b"+", b"-") and not self._lines.starts(b"--- ", b"-- ", b"--\n"):
            raise refusal(heads.name or "", "more lines follow than its head counts", number)

    def _hunk(self, path: str, number: int) -> Hunk:
        lines = self._lines
        head = _HUNK.match(lines.take())
        if head is None:
            raise refusal(path, "its head is not `@@ -LINE,COUNT +LINE,COUNT @@`", number)
        old_n, new_n = int(head[2] or 1), int(head[4] or 1)
        old: list[bytes] = []
        new: list[bytes] = []
        touched: tuple[list[bytes], ...] = ()
        while len(old) < old_n or len(new) < new_n or (touched and lines.starts(b"\\ ")):
            if lines.over:
                raise refusal(path, "it ends before all its lines are there", number)
            line = lines.take()
            sign = line[:1]
            if sign == b"\\" and touched:
                for side in touched:
                    side[-1] = side[-1].removesuffix(b"\n")
                touched = ()
                continue
            if sign not in (b" ", b"-", b"+", b""):
                raise refusal(path, f"a line begins with {sign!r}, or it has fewer than its head counts", number)
            touched = (old,) if sign == b"-" else (new,) if sign == b"+" else (old, new)
            for side in touched:
                side.append(line[1:] + b"\n")
            if len(old) > old_n or len(new) > new_n:
                raise refusal(path, "it has more lines than its head counts", number)
        for made in (old, new):
            if any(not line.endswith(b"\n") for line in made[:-1]):
                raise refusal(path, "a line without an end is not the last", number)
        return Hunk(int(head[1]), int(head[3]), tuple(old), tuple(new))

    def _binary(self) -> Binary:
        binary = self._one_binary()
        if binary is None:
            raise refusal("", "its binary piece has no head `literal SIZE` or `delta SIZE`")
        self._one_binary()  # the way back, which must be sound too
        return binary

    def _one_binary(self) -> Binary | None:
        found = _PIECE.match(self._lines.peek().removesuffix(b"\r"))
        if found is None:
            return None
        self._lines.take()
        self._room_bytes -= int(found[2])
        if self._room_bytes < 0:
            raise refusal("", f"its binary pieces are larger than {MAX_RESULT_BYTES} bytes")
        return decoded(self._piece(), int(found[2]), found[1] == b"delta")

    def _piece(self) -> Iterator[bytes]:
        while not self._lines.over:
            line = self._lines.take().removesuffix(b"\r")
            if not line:
                return
            yield line


class _naming:
    """Names the file in what is raised without a name."""

    def __init__(self, heads: _Heads) -> None:
        self._heads = heads

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError) and not error.fields.get("path"):
            name = self._heads.name or next(filter(None, self._heads.names.values()), "")
            raise refusal(name, str(error.fields.get("why", error.message)), error.fields.get("hunk")) from None


def _mode(text: bytes) -> int:
    try:
        mode = int(text.strip(), 8)
    except ValueError:
        raise refusal("", f"mode {text[:20]!r} is none") from None
    kind = mode & 0o170000
    if kind == LINK:
        return LINK
    if kind == 0o100000:
        return EXECUTABLE if mode & 0o111 else REGULAR
    raise refusal("", f"mode {mode:06o} is neither a file's nor a link's; repositories in it cannot be carried")
