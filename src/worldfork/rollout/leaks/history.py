"""What a git repository in a world would tell: read from its files, without git, because nothing in it is trusted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

MAX_INDEX_BYTES = 256 << 20
"""Of the index of a pack."""
_MAX_TEXT_BYTES = 1 << 20
"""Of a list of references; of a log or a head a fraction of it."""
_MAX_LOGS = 1000
_INDEX_HEADER = b"\xfftOc\0\0\0\x02"
_FANOUT_BYTES = 1024
_NAME_BYTES = (20, 32)
_TRAILERS = 2

Read = Callable[[str, int], bytes]
"""Returns the content of a file of the repository, by its path there, up to so many bytes."""


def is_repository(names: frozenset[str]) -> bool:
    """Tell whether a directory of these names is a repository, be it `.git` or a bare one."""
    return {"HEAD", "objects", "refs"} <= names


def secret_objects(files: frozenset[str], read: Read, wanted: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Yield the names of objects that are wanted and there, loose or packed.

    Args:
        files: paths of all files below the repository.
        read: reads one of them.
        wanted: names of objects, 40 or 64 hex digits.
    """
    for name in wanted:
        if f"objects/{name[:2]}/{name[2:]}" in files:
            yield name
    for path in files:
        if path.startswith("objects/pack/") and path.endswith(".idx"):
            yield from _packed(read(path, MAX_INDEX_BYTES), wanted)


def other_states(files: frozenset[str], read: Read) -> list[str]:
    """Return, for people, what leads to other states than the one that is checked out."""
    found = []
    references = {path for path in files if path.startswith("refs/")}
    if "packed-refs" in files:
        references |= {
            line.split()[1].decode("utf-8", "replace")
            for line in read("packed-refs", _MAX_TEXT_BYTES).splitlines()
            if len(line.split()) == 2 and not line.startswith((b"#", b"^"))
        }
    said = read("HEAD", _MAX_TEXT_BYTES >> 8) if "HEAD" in files else b""
    head = said.decode("utf-8", "replace").strip().removeprefix("ref: ")
    others = sorted(references - {head})
    if others:
        found.append(f"{len(others)} other branches, tags or stashes, such as {others[0]}")
    logs = sorted(path for path in files if path.startswith("logs/"))[:_MAX_LOGS]
    moved = sum(len(read(path, _MAX_TEXT_BYTES >> 4).splitlines()) > 1 for path in logs)
    if moved:
        found.append(f"{moved} logs of where branches stood before")
    left = sorted(files & {"ORIG_HEAD", "FETCH_HEAD", "MERGE_HEAD", "objects/info/alternates"})
    if left:
        found.append(f"it has {', '.join(left)}")
    commits = _history(files, read, head)
    if commits:
        found.append(commits)
    return found


def _history(files: frozenset[str], read: Read, head: str) -> str:
    if "shallow" in files or not any(path.startswith("objects/") for path in files):
        return ""
    return f"the history of {head or 'a commit'} is there; code of later commits may be among its objects"


def _packed(index: bytes, wanted: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Look names up in the index of a pack, version 2: a table of counts by first byte, then the sorted names."""
    head = len(_INDEX_HEADER)
    if not index.startswith(_INDEX_HEADER) or len(index) < head + _FANOUT_BYTES:
        return
    counts = [int.from_bytes(index[at : at + 4], "big") for at in range(head, head + _FANOUT_BYTES, 4)]
    if any(after < before for before, after in itertools.pairwise(counts)):
        return
    names = head + _FANOUT_BYTES
    for size in _NAME_BYTES:
        # Names, checksums of 4 bytes, offsets of 4 bytes, and two hashes at the end, large offsets before them.
        if names + counts[-1] * (size + 8) + _TRAILERS * size > len(index):
            continue
        for name in wanted:
            if len(name) == 2 * size and _is_among(index, names, size, counts, bytes.fromhex(name)):
                yield name


def _is_among(index: bytes, names: int, size: int, counts: list[int], name: bytes) -> bool:
    low, high = counts[name[0] - 1] if name[0] else 0, counts[name[0]]
    while low < high:
        middle = (low + high) // 2
        found = index[names + middle * size : names + (middle + 1) * size]
        if found == name:
            return True
        low, high = (middle + 1, high) if found < name else (low, middle)
    return False
