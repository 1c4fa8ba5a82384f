"""A snapshot arrives: nothing of it is published before all of it is here and right, and then at once."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import cast

from worldfork.content.archive import ArchiveReader, ArrivingLayer, LayerHead
from worldfork.content.blocks import Source, corrupt
from worldfork.content.entry import Entry
from worldfork.content.layer import Found, walk
from worldfork.content.manifest import Sealed, read_manifest, write_manifest
from worldfork.core.errors import ConfigError, Corrupt, NotFound, StoreError, WorldforkError
from worldfork.core.idmap import own_map
from worldfork.exchange.passage import Passage, life_of, passage_of
from worldfork.keeping.sealing import manifest_path, seal
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.readings import Reading
from worldfork.store.store import Store


def import_snapshot(store: Store, source: Source, form: str) -> SnapshotRecord:
    """Read an archive into the store; return its snapshot, which is durable. Again is fine, also by many at once.

    Layers that are here already are taken as they are. Whatever fails, the store stays as it was.

    Args:
        store: where to.
        source: the archive; it is read to its end.
        form: "trusted" or "user": that of the layers to be made, which decides who can restore the snapshot.
    Raises:
        Corrupt: the archive is damaged, is none, or does not hold what it says; `expected`, `actual`.
        FormatUnsupported: a newer version wrote it.
        ConfigError: the form cannot carry something in it; `path`.
        Locked: another process is just making one of its layers.
        StoreError: this id, or that of a layer, is here already with another content; or the disk failed.
        OutOfSpace: the disk is full.
    """
    with typed("the archive cannot be read"):
        reader = ArchiveReader(source)
        try:
            passage = passage_of(reader.head)
            with arriving(store, passage, form) as arrival:
                coming = reader.layers()
                for layer_id, head in passage.layers.items():
                    layer = next(coming, None)
                    if layer is None or layer.head != head:
                        found = None if layer is None else list(layer.head)
                        raise corrupt("its layers are not those of its head", list(head), found, layer_id=layer_id)
                    if layer_id in arrival.missing:
                        arrival.receive(layer_id, layer)
                if next(coming, None) is not None:
                    raise corrupt("it has more layers than its head says", len(passage.layers), "more")
                fault("import:read")
                return arrival.publish()
        finally:
            reader.close()


@contextmanager
def arriving(store: Store, passage: Passage, form: str) -> Iterator[Arrival]:
    """Begin an arrival; what was received and not published when the block is left is abandoned.

    One at a time for each snapshot, and for each lowest layer that is missing, so that whoever comes second finds
    what the first one brought.

    Raises: as `import_snapshot`.
    """
    with ExitStack() as stack:
        stack.enter_context(store.single_flight(f"import {passage.record.snapshot_id}"))
        lease = stack.enter_context(store.reading(purpose="import"))
        with typed("the layers cannot be opened"):
            # Before anything is written: an error of a write-back is told only to who was there already.
            sync_fd = os.open(store.home.layers, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, sync_fd)
        arrival = Arrival(store, passage, form, lease, sync_fd)
        while arrival.missing:
            lowest = arrival.missing[0]
            with store.single_flight(f"import {lowest}"):
                arrival.look()
                if arrival.missing[:1] == [lowest]:
                    with arrival.abandoned_unless_published():
                        yield arrival
                    return
        yield arrival


class Arrival:
    """A snapshot that is being received, under a lease on those of its layers that are here.

    Raises: as `import_snapshot`.
    """

    def __init__(self, store: Store, passage: Passage, form: str, lease: Reading, sync_fd: int) -> None:
        self._store = store
        self._passage = passage
        self._form = form
        self._lease = lease
        self._sync_fd = sync_fd
        self._drafts: list[str] = []
        self._checked: set[str] = set()
        self.known = self._find_known()
        """The snapshot, where it is here already."""
        self.missing: list[str] = []
        """Layers to be received, the lowest first."""
        self.look()

    def look(self) -> None:
        """Take a lease on the layers that are here, and see which are not."""
        wanted = [] if self.known is not None else list(self._passage.layers)
        here = self._lease.claim(wanted) if wanted else set()
        for layer_id in sorted(here - self._checked):
            self._expect_same(layer_id)
            self._checked.add(layer_id)
        self.missing = [layer_id for layer_id in wanted if layer_id not in here]

    def _find_known(self) -> SnapshotRecord | None:
        record = self._passage.record
        try:
            known = self._store.snapshot(record.snapshot_id)
        except NotFound:
            return None
        expected, actual = life_of(record), life_of(known)
        if actual != expected:
            raise StoreError(
                f"{record.snapshot_id} is here already, and is another snapshot",
                remedy=f"if it may go: worldfork snapshots rm {record.snapshot_id}",
                expected=expected,
                actual=actual,
            )
        return known

    def _expect_same(self, layer_id: str) -> None:
        """See that a layer of this id is the same layer, and can be in a stack with the others."""
        record = self._store.layer(layer_id)
        if record.form != self._form:
            raise ConfigError(
                f"{layer_id} is here already, with the form {record.form}, and not {self._form}",
                remedy="import it into another home (WORLDFORK_HOME)",
                layer_id=layer_id,
            )
        expected = self._passage.layers[layer_id].digest
        actual = record.digest if record.digest is not None else seal(self._store, layer_id).digest
        if actual != expected:
            raise StoreError(
                f"{layer_id} is here already, with another content",
                remedy="import it into another home (WORLDFORK_HOME)",
                layer_id=layer_id,
                expected=expected,
                actual=actual,
            )

    def receive(self, layer_id: str, layer: ArrivingLayer) -> None:
        """Write a layer that is missing, and compare what was written with what was announced.

        Raises: as `import_snapshot`.
        """
        draft = self._store.begin_layer(form=self._form, layer_id=layer_id)
        self._drafts.append(layer_id)
        fault("import:begun")
        manifest = manifest_path(self._store, layer_id)
        new = manifest.with_name("manifest.new")
        sealed = write_layer(layer, draft.path, self._form, new)
        fault("import:written")
        with typed(f"the manifest of {layer_id} cannot be written"):
            new.replace(manifest)
        self._store.sealed(layer_id, sealed)
        fault("import:sealed")

    def publish(self) -> SnapshotRecord:
        """Make the snapshot known, once every missing layer was received, and bring it to disk."""
        record = self._passage.record
        if self.known is None:
            self._lease.check()
            # Under a map its files may belong to any id of that; without one, to root alone.
            facts = {**record.facts, "ids": ids} if (ids := own_map()) else record.facts
            arrived = dataclasses.replace(record, form=self._form, made_by="import", facts=facts)
            self._store.publish(arrived, self._drafts)
            self._drafts.clear()
            fault("import:published")
        self._store.make_durable(record.snapshot_id, [self._sync_fd])
        fault("import:durable")
        return self._store.snapshot(record.snapshot_id)

    @contextmanager
    def abandoned_unless_published(self) -> Iterator[None]:
        """Give up what was received in the block and not published."""
        try:
            yield
        finally:
            for layer_id in self._drafts:
                with suppress(WorldforkError):
                    self._store.abandon_layer(layer_id, owner_id=self._store.owner_id)
            if self._drafts:
                with suppress(WorldforkError):
                    self._store.empty_trash()


def write_layer(layer: ArrivingLayer, target: Path, form: str, manifest: Path) -> Sealed:
    """Write a layer that arrives, and look at every path of it again.

    Args:
        layer: of an archive.
        target: the directory to make.
        form: of the layer to be made.
        manifest: the file to write its manifest to.
    Raises:
        Corrupt: it is not what was announced, or what is on disk now is not what came.
        ConfigError, OutOfSpace, StoreError: it cannot be written.
    """
    from worldfork.content.writing import Writer

    head = layer.head
    announced_paths: list[int] = []
    with typed("the manifest cannot be written"), Writer(target, form) as writer:
        announced = write_manifest(_written(writer, layer, announced_paths), manifest)
        writer.finish()
        found = LayerHead(announced.digest, announced.entries, announced.logical_bytes)
        if found != head:
            raise corrupt("a layer is not what was announced", list(head), list(found))
        stored = _compare(announced_paths, walk(target, form, hashed=False), manifest)
    return announced._replace(stored_bytes=stored)


def _written(writer: object, layer: ArrivingLayer, announced_paths: list[int]) -> Iterator[Found]:
    from worldfork.content.writing import Writer

    add = cast(Writer, writer).add
    for entry, content in layer.files():
        add(entry, cast("Iterator[bytes | int]", content))
        announced_paths.append(hash(entry._replace(content="")))
        fault("import:path")
        yield Found(entry, 0)


def _compare(expected: list[int], there: Iterator[Found], manifest: Path) -> int:
    """Compare what was to be written with what is there; contents were compared on their way. Return the disk space.

    Args:
        expected: hashes of the entries without their contents: what they are is read again only where one differs.
        there: the tree.
        manifest: the entries.
    """
    stored = 0
    count = 0
    for entry, stored_bytes in there:
        if count == len(expected) or hash(entry) != expected[count]:
            raise _not_as_it_came(entry, next(itertools.islice(read_manifest(manifest), count, None), None))
        stored += stored_bytes
        count += 1
    if count != len(expected):
        raise _not_as_it_came(None, next(itertools.islice(read_manifest(manifest), count, None), None))
    return stored


def _not_as_it_came(found: Entry | None, wanted: Entry | None) -> Corrupt:
    path = wanted.path if wanted is not None else found.path if found is not None else ""
    return Corrupt(
        f"{path!r} is not on disk as it came",
        remedy="this file system may not keep times, owners or attributes as the other one did",
        path=path,
        expected=str(wanted),
        actual=str(found),
    )
