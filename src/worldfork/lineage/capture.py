"""Copying an upper while its processes stand still, as a layer that holds only what changed since the last copy.

A file counts as unchanged when its inode and change time are those of the last copy. Two cases would slip through
and are compared with that copy instead: a file that a process could still write through a mapping or an open
descriptor when it was copied, since a page that is dirty already takes writes without a new change time; and
anything changed so shortly before the freeze that a later change may fall into the same tick of the kernel's clock.

The new layer lies over the last copy's. A directory merges there with its own last copy if it is the same one still,
by its inode, its marks and the directories around it; else it hides what was in its place. Only for a directory of
the layers below that was renamed, and is not where the last copy has it, would that be wrong: then everything is
copied.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from worldfork.content.marks import data_xattrs
from worldfork.content.pieces import read_pieces
from worldfork.core.errors import NotCapturable
from worldfork.lineage.copier import Copier
from worldfork.lineage.upper import Copied, Entry, closed_again, scan

__all__ = ["Capture", "Copied", "copy_upper", "difference", "is_untouched"]

_MAX_CHAIN = 64
"""Copies over copies; deeper, each look-up costs more than a whole copy once in a while."""


@dataclass
class Capture:
    """The outcome of one copy."""

    copied: Copied
    changed: bool
    """False when nothing differs from the last copy; then nothing was written."""
    whole: bool
    """True when the new layer holds everything, and stands on the sandbox's own layers alone."""
    size_bytes: int


def copy_upper(
    upper: Path,
    target: Path,
    last: Copied,
    writable: Collection[tuple[int, int]] | None,
    form: str,
    below: Sequence[Path] = (),
) -> Capture:
    """Copy a frozen sandbox's upper into `target`, as a difference to `last` where that is simple.

    Args:
        upper: the overlay's upper directory; nothing may write it meanwhile.
        target: does not exist yet; made only if something changed.
        last: the last copy of this upper.
        writable: (device, inode), as seen inside, of files that the frozen processes can still write. The device of
            an overlay's file is the overlay's, so that the inode alone tells. None if nobody knows.
        form: "trusted" or "user": whose marks the overlay reads.
        below: where the layers of `last` lie.
    Raises:
        NotCapturable: an entry is of a kind that cannot be copied.
    """
    inodes = None if writable is None else {inode for _, inode in writable}
    return difference(upper, target, last, form, below, lambda modes: scan(str(upper), form, inodes, modes))


def difference(
    upper: Path,
    target: Path,
    last: Copied,
    form: str,
    below: Sequence[Path],
    look: Callable[[dict[str, int] | None], dict[str, Entry]],
) -> Capture:
    """Do what `copy_upper` does for whoever tells entries apart in another way.

    Args:
        upper, target, last, form, below: as there.
        look: returns what the upper holds; gets the `modes` of `scan`.

    Raises:
        NotCapturable: an entry is of a kind that cannot be copied.
    """
    try:
        with closed_again(str(upper)) as modes:
            now = look(modes)
            return _Difference(str(upper), now, last, modes or {}, form, [str(path) for path in below]).write(target)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise NotCapturable(
            "a path in the sandbox is too long to be copied",
            remedy="end what runs in the sandbox first, or checkpoint with stop=True",
            what=str(error.filename),
            why="longer than the kernel takes at once",
        ) from error


def is_untouched(upper: str, top: str, form: str) -> bool:
    """Whether a sandbox changed nothing: its upper is empty and its root looks like the layer's below."""
    try:
        with os.scandir(upper) as entries:
            if next(entries, None) is not None:
                return False
        return _facts(upper, form) == _facts(top, form)
    except PermissionError:
        return False  # closed by the sandbox's user to itself; one layer too many is no loss


def _facts(path: str, form: str) -> tuple[object, ...]:
    """All that a copy must have of a path besides its content; a directory's size means nothing."""
    info = os.lstat(path)
    kind = stat.S_IFMT(info.st_mode)
    return (
        info.st_mode,
        info.st_uid,
        info.st_gid,
        info.st_mtime_ns,
        data_xattrs(path, form),
        os.readlink(path) if kind == stat.S_IFLNK else info.st_size if kind == stat.S_IFREG else None,
    )


class _Difference:
    """Between an upper and its last copy."""

    def __init__(
        self, upper: str, now: dict[str, Entry], last: Copied, modes: dict[str, int], form: str, below: list[str]
    ) -> None:
        self.upper = upper
        self.now = now
        self.last = last
        self.before = last.entries
        self.modes = modes
        self.form = form
        self.below = below
        self.same: set[str] = set()
        """Directories that are the ones of the last copy, at the same place."""
        self.whole = not last.layers or len(last.layers) >= _MAX_CHAIN
        if not self.whole:
            self._find_same()
            self.whole = self._shows_other_places()
        if self.whole:
            self.before = {}
            self.same = set()

    def write(self, target: Path) -> Capture:
        """Write the layer, if there is any difference."""
        gone = self._gone()
        changed = {path for path in self.now if self._is_changed(path)}
        if not changed and not gone:
            return Capture(Copied(self.last.layers, self.now), changed=False, whole=False, size_bytes=0)
        changed |= self._other_names(changed)
        wanted = {""} | changed
        for path in [*changed, *gone]:
            parent = os.path.dirname(path)
            while parent not in wanted:
                wanted.add(parent)
                parent = os.path.dirname(parent)
        replacing = {
            path
            for path in wanted
            if path in self.before and self.now[path].kind == stat.S_IFDIR and path not in self.same
        }
        copier = Copier(self.upper, str(target), self.form, self.modes, self.same, replacing)
        copier.run([path for path in self.now if path in wanted], gone)
        return Capture(Copied((), self.now), changed=True, whole=self.whole, size_bytes=copier.size_bytes)

    def _find_same(self) -> None:
        for path, new in self.now.items():  # parents first
            old = self.before.get(path)
            if old is None or new.kind != stat.S_IFDIR or old.kind != new.kind:
                continue
            # A directory made anew may get the inode of the one that was removed; then its marks tell.
            if (old.inode, old.opaque, old.redirect) != (new.inode, new.opaque, new.redirect):
                continue
            if not path or os.path.dirname(path) in self.same:
                self.same.add(path)

    def _shows_other_places(self) -> bool:
        """Whether a directory that shows what lies in the layers below all copies is not where it was."""
        redirects = {path for path, entry in self.now.items() if entry.redirect}
        before = {path for path, entry in self.before.items() if entry.redirect}
        return "" not in self.same or redirects != before or not redirects <= self.same

    def _gone(self) -> list[str]:
        """Return paths of the last copy that are no more; not below a directory that is gone or replaced itself."""
        return [path for path in self.before if path not in self.now and os.path.dirname(path) in self.same]

    def _is_changed(self, path: str) -> bool:
        old, new = self.before.get(path), self.now[path]
        if old is None or old.kind != new.kind or (path and os.path.dirname(path) not in self.same):
            return True
        if new.kind == stat.S_IFCHR:
            return False  # a whiteout is as good as another; they are links to one inode, whose time tells nothing
        if new.kind == stat.S_IFDIR and path not in self.same:
            return True
        if old.inode != new.inode:
            return True
        if old.suspect:
            return self._differs_from_copy(path)
        return old.ctime_ns != new.ctime_ns

    def _differs_from_copy(self, path: str) -> bool:
        for layer in self.below:
            mine, copy = f"{self.upper}/{path}", f"{layer}/{path}"
            try:
                if _facts(copy, self.form) != _facts(mine, self.form):
                    return True
                return self.now[path].kind == stat.S_IFREG and not _equal(mine, copy)
            except (FileNotFoundError, NotADirectoryError):
                continue  # it did not change for that layer
            except PermissionError:
                return True  # a copy that is closed to an ordinary user, as its original was
        return True

    def _other_names(self, changed: set[str]) -> set[str]:
        """Return the other names of files that will be written, so that they stay one file."""
        files = (stat.S_IFDIR, stat.S_IFCHR)
        inodes = {self.now[path].inode for path in changed if self.now[path].kind not in files}
        return {path for path, entry in self.now.items() if entry.inode in inodes and entry.kind not in files}


def _equal(one: str, other: str) -> bool:
    with open(one, "rb", buffering=0) as left, open(other, "rb", buffering=0) as right:
        pieces = zip_longest(read_pieces(left.fileno()), read_pieces(right.fileno()))
        return all(mine == theirs for mine, theirs in pieces)
