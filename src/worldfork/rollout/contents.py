"""What a starting state holds, as a digest: one that was built again is the same, although its snapshot is another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from worldfork.content.entry import Entry, encode
from worldfork.content.layer import walk
from worldfork.content.manifest import read_manifest
from worldfork.core.errors import Corrupt, WorldforkError
from worldfork.core.ids import content_id
from worldfork.core.recent import Recent
from worldfork.keeping.sealing import manifest_path
from worldfork.store.store import Store

_LAYERS: Recent[str] = Recent(4 << 20)
"""By id. A world's layers are those of all tasks that stand on it, and are read once."""
_EACH_BYTES = 300
_TOO_LARGE = "too large"
_QUICK_BYTES, _QUICK_ENTRIES = 64 << 20, 10_000
"""A layer that nobody has sealed yet is read at once up to here. Upkeep seals all, beside what runs."""
_BATCH = 1000
_COMPILED = "__pycache__"


@runtime_checkable
class Told(Protocol):
    """A starting state that can tell what it holds."""

    def content(self, *, quick: bool = False) -> str | None:
        """Return the digest; None where nobody can tell, or not without reading much. Blocking."""
        ...


def told_of(start: object, *, quick: bool = False) -> str | None:
    """Return the digest of a starting state's content; None where it cannot be told. Blocking.

    Args:
        start: the state.
        quick: rather tell nothing than read a large layer whole, which takes seconds for each gigabyte.
    """
    try:
        return start.content(quick=quick) if isinstance(start, Told) else None
    except (WorldforkError, OSError):
        return None


def content_of(store: Store, snapshot_id: str, *, quick: bool = False) -> str | None:
    """Return a digest of what a snapshot holds: every path, but no times and no compiled Python, which holds times.

    Equal ones hold the same. Other ones need not hold anything else: it goes layer by layer. None where it stands on a
    directory, whose content nobody has sealed. Blocking; `quick` as of `told_of`.

    Raises:
        NotFound: there is no such snapshot. OutOfSpace, StoreError: something in it cannot be read.
    """
    record = store.snapshot(snapshot_id)
    if record.base.get("kind") != "host":
        return None
    with store.reading(snapshot_id=snapshot_id, purpose="compare") as lease:
        layers = [_layer(store, layer_id, record.form, quick) for layer_id in lease.layers]
    if _TOO_LARGE in layers:
        return None
    about = [record.form, str(record.base.get("fingerprint") or ""), *layers]
    return content_id(*(each.encode() for each in about))


def _layer(store: Store, layer_id: str, form: str, quick: bool) -> str:
    found = _LAYERS.get(layer_id)
    if found == _TOO_LARGE and quick and store.layer(layer_id).digest is None:
        return found
    if found is None or found == _TOO_LARGE:
        found = _read(store, layer_id, form, quick)
        _LAYERS.put(layer_id, found, _EACH_BYTES)
    return found


def _read(store: Store, layer_id: str, form: str, quick: bool) -> str:
    try:
        sealed = _sealed(store, layer_id)
        if sealed is not None:
            return _digest(sealed)
    except (Corrupt, FileNotFoundError):
        pass  # the layer itself tells
    path = store.layer_path(layer_id)
    if quick and not _is_small(path, form):
        return _TOO_LARGE
    return _digest(each.entry for each in walk(path, form))


def _is_small(path: Path, form: str) -> bool:
    size_bytes = 0
    for number, each in enumerate(walk(path, form, hashed=False)):
        size_bytes += each.entry.size_bytes
        if size_bytes > _QUICK_BYTES or number > _QUICK_ENTRIES:
            return False
    return True


def _sealed(store: Store, layer_id: str) -> Iterator[Entry] | None:
    digest = store.layer(layer_id).digest
    return None if digest is None else read_manifest(manifest_path(store, layer_id), digest)


def _digest(entries: Iterable[Entry]) -> str:
    from blake3 import blake3

    digest, lines = blake3(), list[bytes]()
    for entry in entries:
        if _COMPILED in entry.path.split("/"):
            continue
        lines.append(encode(entry._replace(mtime_ns=0)))
        if len(lines) == _BATCH:
            digest.update(b"".join(lines))
            lines.clear()
    digest.update(b"".join(lines))
    return str(digest.hexdigest())
