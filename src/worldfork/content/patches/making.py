"""Making patches in git's form, which git and `parse_patch` take."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from io import BytesIO

from worldfork.content.patches.applying import blob_id
from worldfork.content.patches.binary import encoded
from worldfork.content.patches.lines import Budget, Stretch, differing
from worldfork.content.patches.model import REGULAR, PatchFile, checked_path
from worldfork.content.patches.names import quoted

CONTEXT = 3
_BINARY_BYTES = 8000
"""A zero byte in as many at the beginning makes a file binary, as in git."""
_NO_END = b"\\ No newline at end of file\n"


def make_patch(old: Mapping[str, PatchFile], new: Mapping[str, PatchFile]) -> bytes:
    """Return how one tree becomes another, as a unified diff in git's form: binary pieces whole, names in full.

    A file that only has another path is told as renamed. Where a side does not know a file's mode, no change of it is
    told; a new file's is then 0o100644.

    Args:
        old, new: path -> file.

    Raises:
        ConfigError: a path is none within a tree.
    """
    for path in sorted({*old, *new}):
        checked_path(os.fsencode(path))
    gone = {path: old[path] for path in old if path not in new}
    parts: list[bytes] = []
    budget = Budget()
    renamed = _renamed(gone, {path: new[path] for path in new if path not in old})
    for path in sorted({*old, *new} - set(renamed.values()), key=os.fsencode):
        before, after = old.get(path), new.get(path)
        if path in renamed:
            parts.append(_rename(renamed[path], path, old[renamed[path]], new[path]))
        elif before is None and after is not None:
            parts.append(_created(path, after, budget))
        elif after is None and before is not None:
            parts.append(_deleted(path, before, budget))
        elif before is not None and after is not None:
            parts += _changed(path, before, after, budget)
    return b"".join(parts)


def _renamed(gone: Mapping[str, PatchFile], fresh: Mapping[str, PatchFile]) -> dict[str, str]:
    """Return new path -> old path of files that are otherwise the same."""
    by_content: dict[tuple[bytes, bool], list[str]] = {}
    for path, file in sorted(gone.items(), reverse=True):
        if file.content:
            by_content.setdefault((file.content, file.is_link), []).append(path)
    found: dict[str, str] = {}
    for path, file in sorted(fresh.items()):
        candidates = by_content.get((file.content, file.is_link))
        if candidates:
            found[path] = candidates.pop()
    return found


def _heads(old_path: str, new_path: str) -> bytes:
    return b"diff --git %b %b\n" % (_name(b"a/", old_path), _name(b"b/", new_path))


def _name(side: bytes, path: str) -> bytes:
    return quoted(side + os.fsencode(path))


def _rename(old_path: str, new_path: str, before: PatchFile, after: PatchFile) -> bytes:
    names = quoted(os.fsencode(old_path)), quoted(os.fsencode(new_path))
    modes = _modes(before, after)
    return _heads(old_path, new_path) + modes + b"similarity index 100%%\nrename from %b\nrename to %b\n" % names


def _created(path: str, after: PatchFile, budget: Budget) -> bytes:
    head = _heads(path, path) + b"new file mode %06o\n" % (after.mode or REGULAR)
    return head + _body(None, path, b"", after.content, b"", budget)


def _deleted(path: str, before: PatchFile, budget: Budget) -> bytes:
    head = _heads(path, path) + b"deleted file mode %06o\n" % (before.mode or REGULAR)
    return head + _body(path, None, before.content, b"", b"", budget)


def _changed(path: str, before: PatchFile, after: PatchFile, budget: Budget) -> list[bytes]:
    if before.mode and after.mode and before.is_link != after.is_link:
        return [_deleted(path, before, budget), _created(path, after, budget)]
    modes = _modes(before, after)
    if before.content == after.content:
        return [_heads(path, path) + modes] if modes else []
    mode = b" %06o" % before.mode if before.mode and not modes else b""
    return [_heads(path, path) + modes + _body(path, path, before.content, after.content, mode, budget)]


def _modes(before: PatchFile, after: PatchFile) -> bytes:
    if not before.mode or not after.mode or before.mode == after.mode:
        return b""
    return b"old mode %06o\nnew mode %06o\n" % (before.mode, after.mode)


def _body(
    old_path: str | None, new_path: str | None, before: bytes, after: bytes, mode: bytes, budget: Budget
) -> bytes:
    ids = [
        b"0" * 40 if path is None else blob_id(content).encode()
        for path, content in ((old_path, before), (new_path, after))
    ]
    index = b"index %b..%b%b\n" % (*ids, mode)
    if b"\0" in before[:_BINARY_BYTES] or b"\0" in after[:_BINARY_BYTES]:
        return index + b"GIT binary patch\n" + encoded(after) + encoded(before)
    if not before and not after:
        return index
    names = [
        b"/dev/null" if path is None else _tabbed(_name(side, path))
        for side, path in ((b"a/", old_path), (b"b/", new_path))
    ]
    return index + b"--- %b\n+++ %b\n" % (*names,) + b"".join(text_hunks(before, after, budget))


def _tabbed(name: bytes) -> bytes:
    # Without it, what follows a space could be taken for a time.
    return name + b"\t" if b" " in name and not name.startswith(b'"') else name


def text_hunks(before: bytes, after: bytes, budget: Budget | None = None) -> Iterator[bytes]:
    """Yield the hunks of a unified diff of two texts, with three lines of context."""
    old, new = BytesIO(before).readlines(), BytesIO(after).readlines()
    group: list[Stretch] = []
    for stretch in differing(old, new, budget):
        if group and stretch[0] - group[-1][1] > 2 * CONTEXT:
            yield _hunk(old, new, group)
            group = []
        group.append(stretch)
    if group:
        yield _hunk(old, new, group)


def _hunk(old: list[bytes], new: list[bytes], group: list[Stretch]) -> bytes:
    above = min(CONTEXT, group[0][0])
    below = min(CONTEXT, len(old) - group[-1][1])
    sides = (group[0][0] - above, group[-1][1] + below), (group[0][2] - above, group[-1][3] + below)
    parts = [b"@@ -%b +%b @@\n" % tuple(_range(start, stop - start) for start, stop in sides)]
    place = sides[0][0]
    for a, b, c, d in group:
        parts += [_line(b" ", line) for line in old[place:a]]
        parts += [_line(b"-", line) for line in old[a:b]]
        parts += [_line(b"+", line) for line in new[c:d]]
        place = b
    parts += [_line(b" ", line) for line in old[place : sides[0][1]]]
    return b"".join(parts)


def _range(start: int, count: int) -> bytes:
    if count == 1:
        return b"%d" % (start + 1)
    return b"%d,%d" % (start + 1 if count else start, count)


def _line(sign: bytes, line: bytes) -> bytes:
    return sign + line if line.endswith(b"\n") else sign + line + b"\n" + _NO_END
