"""Push, pull, and single layers from elsewhere: only what the other side lacks crosses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from worldfork.content.archive import ArchiveReader, ArchiveWriter, ArrivingLayer, LayerHead, is_digest
from worldfork.content.blocks import Sink, Source, corrupt, failures_of_sink, is_archive
from worldfork.core.errors import ConfigError, NotFound, StoreError
from worldfork.core.ids import check_id
from worldfork.core.remove import remove_tree
from worldfork.exchange.arrival import arriving, write_layer
from worldfork.exchange.departure import LeavingLayer, leaving
from worldfork.exchange.passage import Passage, from_record_file, life_of, to_record_file
from worldfork.exchange.remotes import Remote, open_remote
from worldfork.records.snapshot import SnapshotRecord, expect_filesystem
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.store import Store

_LARGEST_RECORD_BYTES = 64 << 20


@dataclass
class PushReport:
    """What a push has done."""

    snapshots: list[str] = field(default_factory=list)
    """Ids of those that are whole on the other side now."""
    sent: list[str] = field(default_factory=list)
    """Digests of the layers that it lacked."""
    there: list[str] = field(default_factory=list)
    """Digests of those that it had."""
    notes: list[str] = field(default_factory=list)
    """What whoever pulls them should know."""


def push(store: Store, snapshot_ids: Sequence[str], remote: str) -> PushReport:
    """Copy snapshots to a remote: layers first, the lowest first, each record last.

    Any number of processes may push the same at once. A push that was killed is taken up by the next one.

    Args:
        store: whose.
        snapshot_ids: which.
        remote: a directory, made if it is missing, or `s3://bucket/prefix`.
    Raises:
        NotFound: there is no such snapshot.
        ConfigError: there is no such remote, or a snapshot holds memory; nothing was made.
        Corrupt: something here is damaged.
        StoreError: the remote has this id with another content, cannot be reached, or refuses.
    """
    for snapshot_id in snapshot_ids:
        # Before the remote is made: what is refused leaves no directory there.
        expect_filesystem(store.snapshot(snapshot_id), "copied to elsewhere")
    there = open_remote(remote, make=True)
    report = PushReport()
    for snapshot_id in snapshot_ids:
        with leaving(store, snapshot_id, "push") as departure:
            if there.has(_record_name(snapshot_id)):
                _note_there(_expect_there(there, departure.passage), report)
            else:
                for layer in departure.layers:
                    _send(there, layer, report)
                    fault("push:layer")
                _send_record(there, departure.passage)
            report.notes += departure.notes
        fault("push:record")
        there.make_lasting()
        fault("push:whole")
        store.set_exported(snapshot_id, there.where)
        report.snapshots.append(snapshot_id)
    return report


def _send(there: Remote, layer: LeavingLayer, report: PushReport) -> None:
    digest = layer.head.digest
    if digest in report.sent or digest in report.there:
        return

    def fill(sink: Sink) -> None:
        with failures_of_sink(), ArchiveWriter(sink, {"what": "layer", **layer.head._asdict()}) as archive:
            layer.write(archive)
            archive.end()

    is_new = not there.has(_layer_name(digest)) and there.create(_layer_name(digest), fill)
    (report.sent if is_new else report.there).append(digest)


def _send_record(there: Remote, passage: Passage) -> None:
    data = to_record_file(passage)
    if not there.create(_record_name(passage.record.snapshot_id), lambda sink: sink.write(data)):
        _expect_there(there, passage)


def _note_there(found: Passage, report: PushReport) -> None:
    # Its own layers, which may be others than those here: either side may have merged some.
    for head in found.layers.values():
        if head.digest not in report.sent and head.digest not in report.there:
            report.there.append(head.digest)


def _expect_there(there: Remote, passage: Passage) -> Passage:
    """Return what the remote has under this id, which is this snapshot."""
    snapshot_id = passage.record.snapshot_id
    found = _record(there, snapshot_id)
    expected, actual = life_of(passage.record), life_of(found.record)
    if actual != expected:
        raise StoreError(
            f"{snapshot_id} is in {there.where} already, and is another snapshot",
            remedy="push it elsewhere",
            expected=expected,
            actual=actual,
        )
    return found


def pull(store: Store, snapshot_ids: Sequence[str], remote: str, form: str) -> list[SnapshotRecord]:
    """Copy snapshots from a remote; return them, durable. Only layers that are not here are fetched.

    Args:
        store: where to.
        snapshot_ids: which.
        remote: a directory or `s3://bucket/prefix`.
        form: "trusted" or "user": that of the layers to be made.
    Raises:
        NotFound: the remote has no such snapshot, or lacks one of its layers.
        ConfigError: there is no such remote, or the form cannot carry something; `path`.
        Corrupt: what it has is damaged.
        Locked, OutOfSpace, StoreError: as `import_snapshot`.
    """
    there = open_remote(remote)
    arrived = []
    for snapshot_id in snapshot_ids:
        passage = _record(there, check_id("sn", snapshot_id))
        with arriving(store, passage, form) as arrival:
            for layer_id in list(arrival.missing):
                head = passage.layers[layer_id]
                with there.reading(_layer_name(head.digest)) as source, _only_layer(source, head) as layer:
                    arrival.receive(layer_id, layer)
                fault("pull:layer")
            arrived.append(arrival.publish())
    return arrived


def _record(there: Remote, snapshot_id: str) -> Passage:
    with there.reading(_record_name(snapshot_id)) as source:
        data = bytearray()
        while part := source.read(_LARGEST_RECORD_BYTES + 1 - len(data)):
            data += part
    if len(data) > _LARGEST_RECORD_BYTES:
        raise corrupt("the record of a snapshot is too large", _LARGEST_RECORD_BYTES, len(data))
    passage = from_record_file(bytes(data))
    if passage.record.snapshot_id != snapshot_id:
        raise corrupt("the record of another snapshot", snapshot_id, passage.record.snapshot_id)
    return passage


@contextmanager
def _only_layer(source: Source, head: LayerHead) -> Iterator[ArrivingLayer]:
    """Read an archive of one layer; when the block is left rightly, all of it has come."""
    reader = ArchiveReader(source)
    try:
        expected = {"what": "layer", **head._asdict()}
        if reader.head != expected:
            raise corrupt("it holds another layer", expected, dict(reader.head))
        coming = reader.layers()
        layer = next(coming, None)
        if layer is None or layer.head != head:
            raise corrupt("it holds another layer", list(head), None if layer is None else list(layer.head))
        yield layer
        if next(coming, None) is not None:
            raise corrupt("it holds more than one layer", 1, "more")
    finally:
        reader.close()


def fetch_layer(source: str, digest: str, target: Path, form: str) -> None:
    """Write the tree of one layer from elsewhere, and compare what was written with its digest.

    Args:
        source: a directory or `s3://bucket/prefix` that snapshots were pushed to, or a file that one was exported to.
        digest: of the layer.
        target: the directory to make; its parent exists. On any failure it is gone again.
        form: "trusted" or "user": that of the layer to be made.
    Raises:
        NotFound: the source has no such layer.
        ConfigError: there is no such source, or the form cannot carry something; `path`.
        Corrupt: the source is damaged.
        OutOfSpace, StoreError: it cannot be read or written.
    """
    if not is_digest(digest):
        raise ConfigError(f"{digest!r} is no digest of a layer", remedy="give b3: and 64 hex digits")
    manifest = target.with_name(f"{target.name}.manifest")
    try:
        with typed("the manifest of one that died cannot be removed"):
            manifest.unlink(missing_ok=True)
        path = Path(source)
        with typed(f"{source} cannot be looked at"):
            is_file = "://" not in source and path.is_file()
        if is_file:
            _fetch_from_file(path, digest, target, form, manifest)
        else:
            _fetch_from_remote(open_remote(source), digest, target, form, manifest)
    except BaseException:
        with suppress(FileNotFoundError):
            remove_tree(target)
        raise
    finally:
        with typed("the manifest cannot be removed"):
            manifest.unlink(missing_ok=True)


def _fetch_from_remote(there: Remote, digest: str, target: Path, form: str, manifest: Path) -> None:
    with there.reading(_layer_name(digest)) as source:
        reader = ArchiveReader(source)
        try:
            _write_from(reader, digest, target, form, manifest, there.where)
        finally:
            reader.close()


def _fetch_from_file(path: Path, digest: str, target: Path, form: str, manifest: Path) -> None:
    with typed(f"{path} cannot be read"):
        if not is_archive(path):
            raise ConfigError(f"{path} is no archive", remedy="give a file that worldfork export wrote")
        with open(path, "rb", buffering=0) as file:
            reader = ArchiveReader(file)
            try:
                _write_from(reader, digest, target, form, manifest, str(path))
            finally:
                reader.close()


def _write_from(reader: ArchiveReader, digest: str, target: Path, form: str, manifest: Path, where: str) -> None:
    for layer in reader.layers():
        if layer.head.digest == digest:
            write_layer(layer, target, form, manifest)
            return  # its own digest was right; what comes after it may be damaged
    raise NotFound(f"there is no layer {digest} in {where}", digest=digest)


def _layer_name(digest: str) -> str:
    return f"layers/{digest.removeprefix('b3:')}.wfa"


def _record_name(snapshot_id: str) -> str:
    return f"snapshots/{snapshot_id}.json"
