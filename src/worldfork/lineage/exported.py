"""A copy of an upper that comes whole each time, made a layer that holds only what changed since the last copy.

What a machine has written reaches this host as a tree of new files, so that neither inodes nor change times tell what
is as it was: each path is compared with the last copy, by all that it is and holds.
"""

from __future__ import annotations

import errno
import hashlib
import stat
from collections.abc import Sequence
from pathlib import Path

from worldfork.lineage.capture import Capture, Copied, difference
from worldfork.lineage.upper import Entry, closed_again, scan


def whole_copy(exported: Path, form: str, size_bytes: int) -> Capture:
    """Return what a copy is that stands on the sandbox's own layers alone. Blocking.

    Args:
        exported: the tree, which is the layer.
        form: "trusted" or "user": whose marks it has.
        size_bytes: of its files.
    """
    try:
        with closed_again(str(exported)) as modes:
            entries = _look(exported, form, modes)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        entries = {}  # the next copy is whole too
    return Capture(Copied((), entries), changed=True, whole=True, size_bytes=size_bytes)


def difference_of(exported: Path, target: Path, last: Copied, form: str, below: Sequence[Path]) -> Capture:
    """Write the layer that makes the last copy what the tree is. Blocking.

    Args:
        exported: the tree.
        target: does not exist yet; made only if something changed.
        last: the last copy, of the same sandbox; it has entries.
        form: "trusted" or "user": whose marks both have.
        below: where the layers of `last` lie.

    Raises:
        NotCapturable: an entry cannot be copied.
    """
    return difference(exported, target, last, form, below, lambda modes: _look(exported, form, modes))


def _look(exported: Path, form: str, modes: dict[str, int] | None) -> dict[str, Entry]:
    """Let a file be the one that has its first name, and let nothing be believed of it but what it is and holds."""
    entries = scan(str(exported), form, None, modes)
    first: dict[int, str] = {}
    for path in sorted(entries):
        first.setdefault(entries[path].inode, path)
    found = {}
    for path, entry in entries.items():
        name = path if entry.kind == stat.S_IFDIR else first[entry.inode]
        found[path] = Entry(_number(name), 0, entry.kind, entry.redirect, entry.opaque, suspect=True)
    return found


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=7).digest(), "big")
