"""What was sealed against what is there, path by path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from worldfork.content.entry import Entry, sort_key
from worldfork.content.layer import NOBODY

_KINDS = {
    "f": "a file",
    "d": "a directory",
    "l": "a link",
    "c": "a character device",
    "b": "a block device",
    "p": "a FIFO",
    "s": "a socket",
    "w": "a whiteout",
}
_LONGEST = 120
_CONTENT = Entry._fields.index("content")


class Difference(NamedTuple):
    """One path that is not as it was sealed."""

    path: str
    """From the root of the layer, with a leading slash."""
    expected: str
    found: str


def differences(
    sealed: Iterable[Entry], there: Iterable[Entry], *, content: bool, ranges: bool
) -> Iterator[Difference]:
    """Compare two trees in canonical order and yield every path that differs. Holds one entry of each at a time.

    Args:
        sealed: what was.
        there: what is.
        content: compare the digests of files too, where what is there has one.
        ranges: owners are ids of a range, which look like nobody's to whoever is not in its user namespace: whether
            that was when the layer was sealed, or is now, such an owner stands for every one but root.
    """
    expected, found = iter(sealed), iter(there)
    want, have = next(expected, None), next(found, None)
    while want is not None or have is not None:
        side = _side(want, have)
        if side == 0 and ranges and want is not None and have is not None:
            have = _known_owner(want, have)
        if side == 0 and want is not None and have is not None and not _same(want, have, content=content):
            wanted, got = _told_apart(want, have, content=content)
            yield Difference(f"/{want.path}", wanted, got)
        elif side < 0 and want is not None:
            yield Difference(f"/{want.path}", _KINDS.get(want.kind, want.kind), "nothing")
        elif side > 0 and have is not None:
            yield Difference(f"/{have.path}", "nothing", _KINDS.get(have.kind, have.kind))
        if side <= 0:
            want = next(expected, None)
        if side >= 0:
            have = next(found, None)


def _side(want: Entry | None, have: Entry | None) -> int:
    """Return which of the two comes first: -1 the sealed one, 1 the other, 0 both."""
    if want is None or have is None:
        return 1 if want is None else -1
    if want.path == have.path:
        return 0
    return -1 if sort_key(want.path) < sort_key(have.path) else 1


def _same(want: Entry, have: Entry, *, content: bool) -> bool:
    if content and _has_content(want, have):
        return want == have
    return want[:_CONTENT] == have[:_CONTENT] and want[_CONTENT + 1 :] == have[_CONTENT + 1 :]


def _known_owner(want: Entry, have: Entry) -> Entry:
    if want.uid != have.uid and NOBODY in (want.uid, have.uid) and 0 not in (want.uid, have.uid):
        have = have._replace(uid=want.uid)
    if want.gid != have.gid and NOBODY in (want.gid, have.gid) and 0 not in (want.gid, have.gid):
        have = have._replace(gid=want.gid)
    return have


def _has_content(want: Entry, have: Entry) -> bool:
    # What has several names is read under the first of them.
    return bool(have.content) and not want.link


def _told_apart(want: Entry, have: Entry, *, content: bool) -> tuple[str, str]:
    """Put what differs into words, the same facts of both."""
    if want.kind != have.kind:
        return _KINDS.get(want.kind, want.kind), _KINDS.get(have.kind, have.kind)
    pairs = [
        (text(want), text(have))
        for name, text in _WORDS.items()
        if (name != "content" or (content and want.size_bytes == have.size_bytes and _has_content(want, have)))
        and getattr(want, name) != getattr(have, name)
    ]
    pairs += _attributes(dict(want.xattrs), dict(have.xattrs))
    return ", ".join(pair[0] for pair in pairs), ", ".join(pair[1] for pair in pairs)


_WORDS: dict[str, Callable[[Entry], str]] = {
    "size_bytes": lambda entry: f"{entry.size_bytes} bytes",
    "content": lambda entry: f"content {entry.content or 'unread'}",
    "target": lambda entry: f"a link to {_short(entry.target)}",
    "device": lambda entry: f"device {entry.device[0]}:{entry.device[1]}",
    "mode": lambda entry: f"mode {entry.mode:04o}",
    "uid": lambda entry: f"user {entry.uid}",
    "gid": lambda entry: f"group {entry.gid}",
    "mtime_ns": lambda entry: f"time {entry.mtime_ns // 10**9}.{entry.mtime_ns % 10**9:09d}",
    "link": lambda entry: f"the same file as /{_short(entry.link)}" if entry.link else "a file of its own",
    "opaque": lambda entry: "opaque" if entry.opaque else "not opaque",
    "redirect": lambda entry: f"redirect {_short(entry.redirect)}" if entry.redirect else "no redirect",
}


def _attributes(want: dict[str, bytes], have: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    for name in sorted(want.keys() | have.keys()):
        if want.get(name) != have.get(name):
            yield _attribute(name, want.get(name)), _attribute(name, have.get(name))


def _attribute(name: str, value: bytes | None) -> str:
    return f"no {name}" if value is None else f"{name}={_short(repr(value)[2:-1])}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
