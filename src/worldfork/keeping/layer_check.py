"""One layer against its manifest. Whoever calls holds a lease on it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from worldfork.content.entry import Entry
from worldfork.content.layer import walk
from worldfork.content.manifest import read_manifest
from worldfork.core.beneath import open_beneath
from worldfork.core.errors import NotFound, OutOfSpace, StoreError
from worldfork.keeping.compare import differences
from worldfork.keeping.findings import LAYER, CheckReport, Finding
from worldfork.store.failures import typed
from worldfork.store.store import Store

MANIFEST, CONTENT = "manifest", "fs"
"""What a layer's own directory holds, and how findings name it."""
_READ_BYTES = 1 << 20
_LONGEST_BYTES = 3000  # of a path that the kernel takes at once; it takes 4095


class _Row(NamedTuple):
    form: str
    state: str
    digest: str | None
    entries: int | None


def check_layer(store: Store, report: CheckReport, layer_id: str, read_data: bool) -> None:
    """Compare a layer with what it was when it was sealed, and add what differs to the report.

    Raises:
        NotFound: it is not there any more, or about to go.
        StoreError: the metadata failed, or its digest was changed meanwhile, as after a repair: look again.
    """
    row = _row(store, layer_id)
    _check_row(store, report, layer_id, row, read_data)
    if not report.sound and _row(store, layer_id).digest != row.digest:
        raise StoreError(f"{layer_id} was sealed anew while it was looked at", layer_id=layer_id)


def _check_row(store: Store, report: CheckReport, layer_id: str, row: _Row, read_data: bool) -> None:
    report.layers += 1
    place = store.layer_path(layer_id)
    found = _kind_of(place)
    if found != "a directory":
        report.add(Finding(LAYER, layer_id, CONTENT, "a directory", found))
    if row.digest is None:
        report.unsealed += 1
        return
    report.sealed += 1
    manifest = place.with_name(MANIFEST)
    problem = _manifest_problem(manifest, row.digest)
    if problem:
        report.add(Finding(LAYER, layer_id, MANIFEST, row.digest, problem))
    elif found == "a directory":
        _check_tree(report, layer_id, row, _Tree(place, row.form, read_data), manifest)


def _row(store: Store, layer_id: str) -> _Row:
    with store.database.read() as db:
        query = "SELECT form, state, digest, entries FROM layers WHERE layer_id = ?"
        row = db.execute(query, (layer_id,)).fetchone()
    if row is None or row[1] not in ("ready", "durable"):
        raise NotFound(f"there is no layer {layer_id}", layer_id=layer_id)
    return _Row(*row)


def _kind_of(path: Path) -> str:
    try:
        return "a directory" if stat.S_ISDIR(os.lstat(path).st_mode) else "something else"
    except FileNotFoundError:
        return "nothing"
    except OSError as error:
        return error.strerror or str(error)


def _manifest_problem(path: Path, digest: str) -> str:
    """Say what is wrong with a manifest; empty if it is the one of this digest. Everything else rests on it."""
    from blake3 import blake3

    from worldfork.content.compression import zstd

    found = blake3()
    try:
        with zstd.ZstdFile(path, "rb") as lines:
            while data := lines.read(_READ_BYTES):
                found.update(data)
    except FileNotFoundError:
        return "nothing"
    except OSError as error:
        return error.strerror or str(error)
    except (zstd.ZstdError, EOFError, ValueError) as error:
        return f"no manifest ({error})"
    actual = f"b3:{found.hexdigest()}"
    return "" if actual == digest else actual


def _check_tree(report: CheckReport, layer_id: str, row: _Row, tree: _Tree, manifest: Path) -> None:
    mine = CheckReport()
    try:
        try:
            _compare(mine, layer_id, row, manifest, tree.entries(mine), read_data=tree.read_data)
        except StoreError:
            if not tree.read_data:
                raise
            # Something cannot be read. Once more, in a slower way that says of each file whether it can be.
            mine = CheckReport()
            _compare(mine, layer_id, row, manifest, tree.entries_one_by_one(mine), read_data=True)
    except (StoreError, OutOfSpace) as error:
        where = error.fields.get("path")
        path = f"/{where}" if isinstance(where, str) else ""
        # The rest of this layer is unread.
        mine.add(Finding(LAYER, layer_id, path, "what can be read", error.message))
    report.absorb(mine)


def _compare(
    report: CheckReport, layer_id: str, row: _Row, manifest: Path, there: Iterator[Entry], *, read_data: bool
) -> None:
    with typed("its manifest cannot be read"):
        ranges = row.form == "user"
        for path, expected, found in differences(_counted(manifest, report), there, content=read_data, ranges=ranges):
            report.add(Finding(LAYER, layer_id, path, expected, found))
    if row.entries is not None and report.entries != row.entries:
        report.add(Finding(LAYER, layer_id, "entries", str(row.entries), str(report.entries)))


def _counted(manifest: Path, report: CheckReport) -> Iterator[Entry]:
    for entry in read_manifest(manifest):
        report.entries += 1
        yield entry


class _Tree:
    """What is there of a layer."""

    def __init__(self, root: Path, form: str, read_data: bool) -> None:
        self._root = root
        self._form = form
        self.read_data = read_data

    def entries(self, report: CheckReport) -> Iterator[Entry]:
        """Yield every path, with the digests of files if data is to be read."""
        for entry, _ in walk(self._root, self._form, hashed=self.read_data):
            if self.read_data and not entry.link:
                report.read_bytes += entry.size_bytes
            yield entry

    def entries_one_by_one(self, report: CheckReport) -> Iterator[Entry]:
        """Yield the same. A file that cannot be read does not end it, and has the reason in place of its digest."""
        with typed(f"{self._root} cannot be opened"):
            root = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for entry, stored_bytes in walk(self._root, self._form, hashed=False):
                if entry.kind == "f" and not entry.link:
                    report.read_bytes += entry.size_bytes
                    entry = entry._replace(content=_content(root, entry, stored_bytes < entry.size_bytes))
                yield entry
        finally:
            os.close(root)


def _content(root: int, entry: Entry, sparse: bool) -> str:
    """Return the digest of a file's content, or what keeps it from being read; empty if that is just its mode."""
    from worldfork.content.hashing import hash_file

    try:
        fd = _open(root, entry.path)
        try:
            return hash_file(fd, entry.size_bytes, sparse)
        finally:
            os.close(fd)
    except PermissionError:
        return ""
    except OSError as error:
        return error.strerror or errno.errorcode.get(error.errno or 0, str(error))


def _open(root: int, path: str) -> int:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    above = root
    try:
        while len(os.fsencode(path)) > _LONGEST_BYTES:
            head, _, path = path.partition("/")
            below = open_beneath(above, head, os.O_PATH | os.O_DIRECTORY)
            if above != root:
                os.close(above)
            above = below
        try:
            return open_beneath(above, path, flags | os.O_NOATIME)
        except PermissionError:
            return open_beneath(above, path, flags)
    finally:
        if above != root:
            os.close(above)
