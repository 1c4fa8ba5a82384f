"""Looking into snapshots without a sandbox: what they hold, resolved inside them, and how two of them differ."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from worldfork.content.compare import Change, compare
from worldfork.content.entry import Entry
from worldfork.content.failures import naming
from worldfork.content.manifest import read_manifest
from worldfork.content.merged import Describing, MergedView
from worldfork.content.stack import Node
from worldfork.core.errors import ConfigError, Corrupt, PathError
from worldfork.keeping.sealing import manifest_path
from worldfork.records.snapshot import LayerRecord, SnapshotRecord, expect_filesystem
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.store import Store


class Browsed:
    """A snapshot that is being looked into; made by `browsing`.

    What a `host` base shows from the machine (`/usr` and its like) is in no layer, and the machine may have changed
    since: such a path is refused. So is nothing else; what every sandbox gets of its own, as `/etc/hosts`, is shown
    as it lies in the layers.
    """

    def __init__(self, record: SnapshotRecord, view: MergedView) -> None:
        self.record = record
        self.view = view
        self._mounted = {target.strip("/") for _, target in record.base.get("binds", ())}

    def node(self, path: str, *, follow: bool = True) -> Node:
        """Return what a path leads to inside the snapshot.

        Raises:
            PathError: it leads nowhere (`errno` ENOENT, ENOTDIR, ELOOP), or into what a `host` base shows from the
                machine (EXDEV).
            OutOfSpace, StoreError: a layer cannot be read.
        """
        with self._errors(path, "looked up"):
            node = self.view.resolve(path, follow=follow, passing=self._pass)
        return node

    def expect_stored(self, path: str) -> None:
        """Refuse a path, without links in it, that lies in what a `host` base shows.

        Raises:
            PathError: it does (`errno` EXDEV).
        """
        for mounted in self._mounted:
            if f"{path}/".startswith(f"{mounted}/"):
                error = OSError(errno.EXDEV, os.strerror(errno.EXDEV), mounted)
                raise _path_error(self.record, path, "compared", error)

    def list(self, path: str = "/") -> list[Entry]:
        """Return what a directory holds, or the one path itself where it is none; names sorted by their bytes.

        Raises:
            PathError, OutOfSpace, StoreError: as `node`.
        """
        node = self.node(path)
        describing = Describing(self.record.form)
        with self._errors(path, "listed"):
            if node.seen.kind != "d":
                return [describing.entry(node)]
            return [describing.entry(child) for child in self.view.children(node)]

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file, piece by piece.

        Raises:
            PathError: as `node`; EISDIR for a directory, EINVAL for anything else that is no file, EACCES for one of
                another user.
            OutOfSpace, StoreError: a layer cannot be read.
        """
        node = self.node(path)
        with self._errors(path, "read"):
            yield from self.view.read(node)

    def _pass(self, node: Node) -> None:
        if node.path in self._mounted:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), node.path)

    @contextmanager
    def _errors(self, path: str, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, PathError) or error.errno not in _OF_PATHS:
                with typed(f"{path!r} in {self.record.snapshot_id} cannot be {doing}"):
                    raise
            raise _path_error(self.record, path, doing, error) from error


_OF_PATHS = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EISDIR,
    errno.EINVAL,
    errno.EACCES,
    errno.EXDEV,
)


def _path_error(record: SnapshotRecord, path: str, doing: str, error: OSError) -> PathError:
    number = error.errno or errno.EIO
    why, remedy = os.strerror(number), ""
    if number == errno.EXDEV:
        why = f"/{error.filename} is the machine's own, which the base {record.base.get('kind')!r} only shows"
        remedy = "read it on the machine, or start a sandbox of the snapshot"
    elif number == errno.EINVAL:
        why = "it is no file"
    elif number == errno.EACCES:
        remedy = "start a sandbox of the snapshot and read it there as root"
    return PathError(
        f"{path!r} in {record.snapshot_id} cannot be {doing}: {why}", remedy=remedy, path=path, errno=number
    )


@contextmanager
def browsing(store: Store, snapshot_id: str) -> Iterator[Browsed]:
    """Look into a snapshot; its layers are kept for the length of the block.

    Raises:
        NotFound: there is no such snapshot.
        ConfigError: its base's directory is gone, or it holds memory.
        StoreError: on leaving: this process stood still for so long that what was read may have holes.
    """
    with store.reading(snapshot_id=snapshot_id, purpose="browse") as lease:
        fault("browse:held")
        record = store.snapshot(snapshot_id)
        expect_filesystem(record, "looked into")
        yield _browsed(store, record, lease.layers)


@contextmanager
def comparing(store: Store, old_id: str, new_id: str) -> Iterator[tuple[Browsed, Browsed]]:
    """Look into two snapshots at a time.

    Raises:
        NotFound, ConfigError, StoreError: as `browsing`.
        ConfigError: their layers are of different forms, so that owners and marks cannot be compared.
    """
    with browsing(store, old_id) as old, browsing(store, new_id) as new:
        if old.record.form != new.record.form:
            raise ConfigError(
                f"{old_id} is of form {old.record.form!r} and {new_id} of form {new.record.form!r}",
                remedy="export one and import it in the form of the other",
            )
        yield old, new


def compared(old: Browsed, new: Browsed, path: str = "", *, times: bool = False) -> Iterator[Change]:
    """Yield what differs between two snapshots at and below a path, in which no link is followed; see `compare`.

    Raises:
        PathError: neither has such a path (`errno` ENOENT), or it lies in what a `host` base shows (EXDEV).
        OutOfSpace, StoreError: something cannot be read; `path` and `errno` are fields.
    """
    path = "/".join(name for name in path.split("/") if name)
    for snapshot in (old, new):
        snapshot.expect_stored(path)
    with naming(path, "read"):
        if old.view.node(path) is None and new.view.node(path) is None:
            error = OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            raise _path_error(new.record, path, "compared", error)
    yield from compare(old.view, new.view, path, times=times)


def _browsed(store: Store, record: SnapshotRecord, layers: Sequence[str]) -> Browsed:
    places = [store.layer_path(layer_id) for layer_id in layers]
    base = str(record.base.get("path") or "")
    if base:
        if not os.path.isdir(base):
            raise ConfigError(f"the base {base} of {record.snapshot_id} is gone", remedy="put it back, or build anew")
        places.append(Path(base))
    known = [_SealedContent(store, store.layer(layer_id)) for layer_id in layers]
    return Browsed(record, MergedView(places, record.form, known))


class _SealedContent(Mapping[str, str]):
    """The content hashes of a layer's files by path, from its manifest, which is read when the first is asked for.

    Empty where the layer is not sealed or its manifest is damaged: then the files themselves tell.
    """

    def __init__(self, store: Store, record: LayerRecord) -> None:
        self._place = manifest_path(store, record.layer_id)
        self._digest = record.digest

    @functools.cached_property
    def _hashes(self) -> dict[str, str]:
        if self._digest is None:
            return {}
        try:
            return {entry.path: entry.content for entry in read_manifest(self._place, self._digest) if entry.content}
        except (Corrupt, OSError):
            return {}

    def __getitem__(self, path: str) -> str:
        return self._hashes[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hashes)

    def __len__(self) -> int:
        return len(self._hashes)


def read_file(store: Store, snapshot_id: str, path: str) -> bytes:
    """Return the content of a file of a snapshot, links followed inside it.

    Raises:
        NotFound, PathError, ConfigError, OutOfSpace, StoreError: as `browsing` and `Browsed.chunks`.
    """
    with browsing(store, snapshot_id) as snapshot:
        return b"".join(snapshot.chunks(path))
