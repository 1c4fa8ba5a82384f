"""What a patch says, and what it is applied to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

from worldfork.core.errors import ConfigError

REGULAR = 0o100644
EXECUTABLE = 0o100755
LINK = 0o120000

MAX_PATCH_BYTES = 64 << 20
MAX_FILES = 20_000
MAX_HUNKS = 200_000
MAX_FILE_BYTES = 256 << 20
"""What one file may be, before and after; also what a binary piece may unpack to."""
MAX_RESULT_BYTES = 1 << 30
"""What all files that a patch makes may be together."""

_PATH_BYTES = 4095
_NAME_BYTES = 255


class PatchFile(NamedTuple):
    """A file in a tree."""

    content: bytes
    """Of a link: where it leads."""
    mode: int = 0
    """0o100644, 0o100755, 0o120000 for a link; 0 where it is not known."""

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return self.mode == LINK


class Hunk(NamedTuple):
    """Lines that stand at one place, and those that take theirs."""

    old_start: int
    """As written: from 1; where there are no old lines, the line after which the new ones come."""
    new_start: int
    old: tuple[bytes, ...]
    """With their line ends; context is in both."""
    new: tuple[bytes, ...]


class Binary(NamedTuple):
    """The change of a file that is no text."""

    is_delta: bool
    data: bytes
    """The whole new content; or a delta of the old one, in the form of git's packs."""


@dataclass(frozen=True)
class FilePatch:
    """What a patch does to one file."""

    kind: str
    """`change`, `create`, `delete`, `rename` or `copy`."""
    old_path: str | None
    """None for a new file."""
    new_path: str | None
    """None for one that is removed."""
    old_mode: int = 0
    new_mode: int = 0
    """0: as it was."""
    hunks: tuple[Hunk, ...] = ()
    binary: Binary | None = None
    old_id: str = ""
    """The name of the old content in git, 40 or 64 hex digits; empty where it is not told in full."""
    from_git: bool = True
    """Whether it has the heads of git, which tell a new file from an empty one."""

    @property
    def path(self) -> str:
        """The path to name it by."""
        return self.new_path or self.old_path or ""


@dataclass(frozen=True)
class Patch:
    """A whole patch."""

    files: tuple[FilePatch, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path that it reads or writes, sorted."""
        return tuple(sorted({path for each in self.files for path in (each.old_path, each.new_path) if path}))


def refusal(path: str, why: str, hunk: int | None = None) -> ConfigError:
    """Return the error of a patch that cannot be read or applied.

    Args:
        path: the file; empty where the patch is wrong before any.
        why: what is wrong.
        hunk: from 1, within the file.
    """
    where = shown(path) + (f", hunk {hunk}" if hunk else "")
    return ConfigError(f"patch{': ' + where if path else ''}: {why}", field="patch", path=path, hunk=hunk, why=why)


def shown(path: str) -> str:
    """Return a path for a message."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def checked_path(name: bytes) -> str:
    """Return a name as the path of a file within a tree.

    Raises:
        ConfigError: it is none: absolute, out of the tree, within `.git`, or longer than any system takes.
    """
    path = os.fsdecode(name)
    names = name.split(b"/")
    if not name or b"\0" in name or any(each in (b"", b".", b"..") for each in names):
        raise refusal(path or "(empty)", "its path leaves the tree, or is not in plain form")
    if any(each.lower() == b".git" for each in names):
        raise refusal(path, "its path lies within a repository's own files")
    if len(name) > _PATH_BYTES or any(len(each) > _NAME_BYTES for each in names):
        raise refusal(path[:200], "its path is too long for any file system")
    return path
