"""The ids that an ordinary user may give to others' files: ranges of /etc/subuid and /etc/subgid, as one map."""

from __future__ import annotations

import functools
import os
import pwd
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MOST = 65535
"""Ids besides root's own that a map has at most: 1 to 65535, as far as any distribution counts."""
FEWEST = 1000
"""A range with fewer ids is left alone: system accounts alone take that many."""
MOST_EXTENTS = 64
"""Ranges that are put together; the kernel takes a page of text as a map."""
SUBUID, SUBGID = "/etc/subuid", "/etc/subgid"
_DIRECTORIES = "/usr/bin:/usr/local/bin:/bin:/usr/sbin:/sbin"


class Extent(NamedTuple):
    """Consecutive ids."""

    inside: int
    outside: int
    size: int


@dataclass(frozen=True)
class Lacking:
    """Why there is no range here."""

    reason: str
    remedy: str
    """The command that mends it; empty where nothing is amiss."""


@dataclass(frozen=True)
class IdMap:
    """Which ids of a user namespace are which of the host's. Root inside is the user who makes it."""

    uids: tuple[Extent, ...]
    gids: tuple[Extent, ...]

    @property
    def text(self) -> str:
        """What `parse` reads, such as `u0:1000:1,1:100000:65535 g0:1000:1,1:100000:65535`."""
        return f"u{_written(self.uids)} g{_written(self.gids)}"

    @classmethod
    def parse(cls, text: str) -> IdMap:
        """Read what `text` returned.

        Raises:
            ValueError: it is no such text.
        """
        uids, gids = text.split(" ")
        if uids[:1] != "u" or gids[:1] != "g":
            raise ValueError(text)
        return cls(_read(uids[1:]), _read(gids[1:]))

    def covers(self, other: IdMap) -> bool:
        """Whether every id of another map is the same one of the host's here."""
        return all(
            any(_within(extent, wider) for wider in mine)
            for theirs, mine in ((other.uids, self.uids), (other.gids, self.gids))
            for extent in theirs
        )


def covers(present: str, wanted: str) -> bool:
    """Whether files that were made under the map `wanted` have their right owners under `present`.

    Args:
        present, wanted: texts of maps; empty for a single id, which every map has.
    """
    if not wanted or present == wanted:
        return True
    try:
        return bool(present) and IdMap.parse(present).covers(IdMap.parse(wanted))
    except ValueError:
        return False


@functools.cache
def own_map() -> str:
    """Return the map of the namespace that this process lives in, as text; empty unless it is one like these."""
    found = []
    for name in ("uid_map", "gid_map"):
        rows = [line.split() for line in Path("/proc/self", name).read_text().splitlines()]
        found.append(tuple(Extent(*(int(field) for field in row)) for row in rows))
    uids, gids = found
    # Root is one of the host's users, and others are others: not the first namespace, nor one with a single id.
    like = all(len(extents) > 1 and extents[0].inside == 0 and extents[0].size == 1 for extents in found)
    return IdMap(uids, gids).text if like and os.geteuid() == 0 else ""


def find_id_map() -> IdMap | Lacking:
    """Return the map that newuidmap(1) and newgidmap(1) would write for this user, as far as files tell."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        return Lacking("root has all ids", "")
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return Lacking(f"uid {uid} has no account, and newuidmap serves accounts only", "run as a user of this machine")
    if not (tool("newuidmap") and tool("newgidmap")):
        return Lacking("newuidmap is not installed", "sudo apt-get install uidmap (elsewhere: shadow-utils)")
    found = []
    for path, own in ((SUBUID, uid), (SUBGID, gid)):
        extents = _extents(_lines(path), (name, str(uid)), own)
        if sum(extent.size for extent in extents) < FEWEST:
            remedy = f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {name}"
            return Lacking(f"{path} gives {name} no range of ids (at least {FEWEST})", remedy)
        found.append(extents)
    return IdMap(found[0], found[1])


def tool(name: str) -> str | None:
    """Return the path of newuidmap or newgidmap."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_DIRECTORIES}")


def arguments(extents: Iterable[Extent]) -> list[str]:
    """Return a map as those programs take it."""
    return [str(number) for extent in extents for number in extent]


def _extents(lines: Iterable[str], owners: tuple[str, ...], own: int) -> tuple[Extent, ...]:
    """Put root's own id and an owner's ranges one after another, in the order of the file."""
    extents = [Extent(0, own, 1)]
    for line in lines:
        fields = line.strip().split(":")
        if len(fields) != 3 or fields[0] not in owners or not (fields[1].isdecimal() and fields[2].isdecimal()):
            continue
        first, inside = int(fields[1]), extents[-1].inside + extents[-1].size
        count = min(int(fields[2]), MOST + 1 - inside)
        overlaps = any(first < one.outside + one.size and one.outside < first + count for one in extents)
        if count > 0 and not overlaps and len(extents) < MOST_EXTENTS:
            extents.append(Extent(inside, first, count))
    return tuple(extents)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _written(extents: tuple[Extent, ...]) -> str:
    return ",".join(":".join(str(number) for number in extent) for extent in extents)


def _read(text: str) -> tuple[Extent, ...]:
    extents = []
    for part in text.split(","):
        inside, outside, size = (int(number) for number in part.split(":"))
        extents.append(Extent(inside, outside, size))
    return tuple(extents)


def _within(extent: Extent, wider: Extent) -> bool:
    offset = extent.inside - wider.inside
    return 0 <= offset <= wider.size - extent.size and extent.outside - wider.outside == offset
