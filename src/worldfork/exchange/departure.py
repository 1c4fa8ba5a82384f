"""A snapshot leaves: everything that it needs elsewhere, sealed, held and written as a stream."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from worldfork.content.archive import ArchiveWriter, LayerHead
from worldfork.content.blocks import Sink, failures_of_sink
from worldfork.content.layer import walk
from worldfork.content.manifest import read_manifest, write_manifest
from worldfork.core.errors import ConfigError, WorldforkError
from worldfork.exchange.passage import Passage, base_layer_id, travelling_base, travelling_facts
from worldfork.keeping.sealing import manifest_path, seal
from worldfork.records.snapshot import SnapshotRecord, expect_filesystem
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.store import Store


@dataclass(frozen=True)
class LeavingLayer:
    """One layer that travels, and where it lies."""

    layer_id: str
    head: LayerHead
    root: Path
    manifest: Path

    def write(self, archive: ArchiveWriter) -> None:
        """Write it into an archive, comparing what is read with its manifest.

        Raises:
            Corrupt: its files or its manifest are damaged; `layer_id` and `path`.
            OutOfSpace, StoreError: it cannot be read.
        """
        try:
            with typed(f"the manifest of {self.layer_id} cannot be read"):
                archive.layer(self.head, self.root, read_manifest(self.manifest))
        except WorldforkError as error:
            raise type(error)(
                f"{self.layer_id}: {error.message}", remedy=error.remedy, **{**error.fields, "layer_id": self.layer_id}
            ) from error


@dataclass(frozen=True)
class Departure:
    """A snapshot that is held for its way out."""

    passage: Passage
    layers: tuple[LeavingLayer, ...]
    """The lowest first."""
    notes: tuple[str, ...]
    """What whoever takes it elsewhere should know."""


@dataclass(frozen=True)
class Exported:
    """What an export has written."""

    snapshot_id: str
    digest: str
    """Over every byte of the archive but the digest itself: `b3:` and 64 hex digits."""
    layers: int
    logical_bytes: int
    """What the files of its layers hold."""
    notes: tuple[str, ...]


def export_snapshot(store: Store, snapshot_id: str, sink: Sink) -> Exported:
    """Write a snapshot with all its layers as one archive: the same bytes for the same stored snapshot.

    Args:
        store: whose.
        snapshot_id: which.
        sink: where to; nothing is sought in it.
    Raises:
        NotFound: there is no such snapshot.
        ConfigError: its base is gone, or it holds memory.
        Corrupt: something in it is damaged: `layer_id`, `path`, `expected`, `actual`.
        OutOfSpace, StoreError: something could not be read or written.
        BrokenPipeError: whoever read the archive has gone.
    """
    with leaving(store, snapshot_id, "export") as departure:
        with failures_of_sink(), ArchiveWriter(_Typed(sink), departure.passage.to_json()) as archive:
            fault("export:begun")
            for layer in departure.layers:
                layer.write(archive)
                fault("export:layer")
            digest = archive.end()
            fault("export:ended")
    return Exported(
        snapshot_id,
        f"b3:{digest}",
        len(departure.layers),
        sum(layer.head.logical_bytes for layer in departure.layers),
        departure.notes,
    )


@contextmanager
def leaving(store: Store, snapshot_id: str, purpose: str) -> Iterator[Departure]:
    """Hold a snapshot while it is read, with all its layers sealed and its base as one of them.

    Args:
        store: whose.
        snapshot_id: which.
        purpose: one word for whoever asks who holds what.
    Raises: as `export_snapshot`.
    """
    with store.reading(snapshot_id=snapshot_id, purpose=purpose) as lease:
        record = dataclasses.replace(store.snapshot(snapshot_id), layers=lease.layers)
        expect_filesystem(record, "copied to elsewhere")
        layers = [_sealed(store, layer_id) for layer_id in reversed(lease.layers)]
        fault(f"{purpose}:sealed")
        base = record.base
        if base.get("kind") != "dir":
            yield _departure(record, layers)
            return
        with _base_layer(store, record) as lowest:
            fault(f"{purpose}:base")
            yield _departure(record, [lowest, *layers])


def _departure(record: SnapshotRecord, layers: list[LeavingLayer]) -> Departure:
    notes: tuple[str, ...] = ()
    if record.base.get("kind") == "host":
        notes = (
            f"{record.snapshot_id} stands on the userland of this machine, which does not travel: it can be restored "
            "where the same one is installed",
        )
    stack = tuple(layer.layer_id for layer in reversed(layers))
    facts = travelling_facts(record.facts)
    portable = dataclasses.replace(record, base=travelling_base(record.base), layers=stack, facts=facts)
    return Departure(Passage(portable, {layer.layer_id: layer.head for layer in layers}), tuple(layers), notes)


def _sealed(store: Store, layer_id: str) -> LeavingLayer:
    sealed = seal(store, layer_id)
    head = LayerHead(sealed.digest, sealed.entries, sealed.logical_bytes)
    return LeavingLayer(layer_id, head, store.layer_path(layer_id), manifest_path(store, layer_id))


@contextmanager
def _base_layer(store: Store, record: SnapshotRecord) -> Iterator[LeavingLayer]:
    """Look at a base in a directory as if it were a layer; what is found there is compared when it is read again."""
    root = Path(record.base["path"])
    if not root.is_dir():
        raise ConfigError(f"the base {root} of {record.snapshot_id} is gone", remedy="put it back, or build anew")
    manifest = store.home.tmp / f"manifest-{secrets.token_hex(8)}"
    try:
        with typed(f"the base {root} cannot be read"):
            sealed = write_manifest(walk(root, record.form), manifest)
        head = LayerHead(sealed.digest, sealed.entries, sealed.logical_bytes)
        yield LeavingLayer(base_layer_id(sealed.digest), head, root, manifest)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(manifest)


class _Typed:
    """A sink whose failures have a type, but for that of a reader who went away."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, data: bytes | memoryview, /) -> object:
        with typed("the archive cannot be written"):
            try:
                return self._sink.write(data)
            except BrokenPipeError as error:
                gone = error
        raise gone
