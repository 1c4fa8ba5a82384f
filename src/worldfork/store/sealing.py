"""Sealing: what a layer holds is written down, and from then on it can be checked, compared and shared by it.

Never on the way of a fork or a checkpoint: whoever seals waits for the disk, and nobody waits for whoever seals.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from worldfork.content.layer import walk
from worldfork.content.manifest import Sealed, read_manifest, write_manifest
from worldfork.core.beneath import open_beneath
from worldfork.core.errors import Corrupt, NotFound, StoreError, WorldforkError
from worldfork.records.snapshot import LayerRecord
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.store import Store

LARGE_BYTES = 1 << 20
"""Files from this size on are worth sharing one by one."""
_SETTLED = ("ready", "durable")
_log = logging.getLogger("worldfork.store")
_said_mutex = threading.Lock()
_said: set[str] = set()


@dataclass
class SealReport:
    """What `seal_all` has done."""

    sealed: list[str] = field(default_factory=list)
    """Ids of the layers that have a digest now and had none."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Layers that could not be sealed, and why; the next time tries again."""


@dataclass
class ShareReport:
    """What sharing has done."""

    snapshots: int = 0
    """How often a snapshot was put onto the older of two equal layers."""
    shared_bytes: int = 0
    """What files share with equal ones since then."""
    unsupported: str = ""
    """Why files could not share bytes here; empty where they could."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Layers or files that were left out, and why."""


def manifest_path(store: Store, layer_id: str) -> Path:
    """Return where the manifest of a layer lies once it is sealed."""
    return store.layer_path(layer_id).with_name("manifest")


def seal(store: Store, layer_id: str) -> Sealed:
    """Write down what a layer holds: its manifest, its digest and its sizes. Slow; idempotent.

    Raises:
        NotFound: there is no such layer, or it went meanwhile.
        Corrupt: it was sealed before, its manifest was lost, and it holds something else now.
        OutOfSpace, StoreError: something in it cannot be read, named by `path`, or the disk failed; or this process
            stood still for so long that its lease ran out.
    """
    with store.single_flight(f"seal {layer_id}"), store.reading(layers=[layer_id], purpose="seal") as lease:
        known = store.layer(layer_id)
        place = manifest_path(store, layer_id)
        if known.digest is not None and place.exists():
            return _seal_of(known)
        draft = place.with_name("manifest.new")
        try:
            with typed(f"the manifest of {layer_id} cannot be written"):
                draft.unlink(missing_ok=True)  # of somebody who was killed
                sealed = _write(store, known, draft)
                fault("seal:synced")
                lease.check()
                if known.digest not in (None, sealed.digest):
                    raise Corrupt(
                        f"{layer_id} does not hold what it was sealed with",
                        expected=known.digest,
                        actual=sealed.digest,
                        layer_id=layer_id,
                    )
                draft.replace(place)
                fault("seal:renamed")
                _sync(place.parent)
                fault("seal:lasting")
        except BaseException:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        store.sealed(layer_id, sealed)
        return sealed


def _write(store: Store, record: LayerRecord, draft: Path) -> Sealed:
    try:
        return write_manifest(walk(store.layer_path(record.layer_id), record.form), draft)
    except StoreError as error:
        fields = {**error.fields, "layer_id": record.layer_id}
        raise StoreError(f"{record.layer_id}: {error.message}", remedy=error.remedy, **fields) from error


def _seal_of(record: LayerRecord) -> Sealed:
    assert record.digest is not None
    return Sealed(record.digest, record.entries or 0, record.logical_bytes or 0, record.stored_bytes or 0)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def seal_all(store: Store, *, stop: Callable[[], bool] = lambda: False) -> SealReport:
    """Seal every layer that has no digest, the oldest first. One that fails does not keep the rest.

    Args:
        store: whose.
        stop: asked before each layer.
    Raises:
        StoreError: the metadata cannot be read.
    """
    report = SealReport()
    for record in store.layers_known():
        if record.digest is not None or record.state not in _SETTLED:
            continue
        if stop():
            break
        try:
            seal(store, record.layer_id)
        except NotFound:
            continue  # it was collected meanwhile
        except WorldforkError as error:
            report.failures.append((record.layer_id, str(error)))
        else:
            report.sealed.append(record.layer_id)
    return report


def share_equal(store: Store) -> ShareReport:
    """Let snapshots whose layers are equal stand on the oldest of these, so that the copies go with a collection.

    Only durable snapshots and layers; whoever holds a copy keeps it as long as that takes.

    Raises:
        StoreError: the metadata cannot be read.
    """
    report = ShareReport()
    equal: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in store.layers_known():
        if record.digest is not None and record.state == "durable":
            equal[record.form, record.digest].append(record.layer_id)
    copies = {copy: layer_ids[0] for layer_ids in equal.values() for copy in layer_ids[1:]}
    if not copies:
        return report
    used = {layer_id for snapshot in store.snapshots() for layer_id in snapshot.layers}
    for copy, oldest in copies.items():
        if copy not in used:
            continue
        try:
            with store.reading(layers=[oldest, copy], purpose="share"):
                report.snapshots += store.rewrite((copy,), (oldest,))
        except NotFound:
            continue  # one of them was collected meanwhile
        except WorldforkError as error:
            report.failures.append((copy, str(error)))
        fault("share_equal:rewritten")
    return report


def share_files(store: Store, fresh: Collection[str] | None = None) -> ShareReport:
    """Let large files of equal content in different layers share their bytes, on file systems that can.

    The kernel compares before it shares, and no reader sees anything of it.

    Args:
        store: whose.
        fresh: layers to find partners for; None means all of them. The rest is only looked at.
    Raises:
        StoreError: the metadata cannot be read.
    """
    report = ShareReport()
    records = [
        record
        for record in store.layers_known()
        if record.digest is not None and record.state in _SETTLED and (record.logical_bytes or 0) >= LARGE_BYTES
    ]
    if fresh is not None and not any(record.layer_id in fresh for record in records):
        return report
    for (_, size_bytes), places in _large_files(store, records, report).items():
        if fresh is None or any(layer_id in fresh for layer_id, _ in places):
            pairs = [(places[0], place) for place in places[1:]]
            _share(store, pairs, size_bytes, fresh, report)
        if report.unsupported:
            _say_once(store, report.unsupported)
            break
    return report


def _large_files(
    store: Store, records: list[LayerRecord], report: ShareReport
) -> dict[tuple[str, int], list[tuple[str, str]]]:
    """Return layer and path of all large files that are in several layers, by content hash and size."""
    found: dict[tuple[str, int], list[tuple[str, str]]] = defaultdict(list)
    for record in records:
        try:
            with store.reading(layers=[record.layer_id], purpose="share"), typed("its manifest cannot be read"):
                for entry in read_manifest(manifest_path(store, record.layer_id)):
                    if entry.kind == "f" and entry.size_bytes >= LARGE_BYTES and not entry.link:
                        found[entry.content, entry.size_bytes].append((record.layer_id, entry.path))
        except NotFound:
            continue
        except WorldforkError as error:
            report.failures.append((record.layer_id, str(error)))
    return {key: places for key, places in found.items() if len(places) > 1}


def _share(
    store: Store,
    pairs: list[tuple[tuple[str, str], tuple[str, str]]],
    size_bytes: int,
    fresh: Collection[str] | None,
    report: ShareReport,
) -> None:
    from worldfork.content.share import CannotShare, share_bytes

    for kept, other in pairs:
        if fresh is not None and kept[0] not in fresh and other[0] not in fresh:
            continue
        try:
            with (
                store.reading(layers=[kept[0], other[0]], purpose="share"),
                _opened(store, kept, other) as (source, target),
            ):
                with typed("its bytes cannot be shared"):
                    report.shared_bytes += share_bytes(source, target, size_bytes)
            fault("share_files:shared")
        except CannotShare as error:
            report.unsupported = str(error)
            return
        except NotFound:
            continue
        except WorldforkError as error:
            report.failures.append((f"{other[0]}/{other[1]}", str(error)))


@contextmanager
def _opened(store: Store, *places: tuple[str, str]) -> Iterator[list[int]]:
    """Open files of layers, never through a link, for reading: whoever owns a file may share it so."""
    fds: list[int] = []
    try:
        for layer_id, path in places:
            with typed(f"{path!r} in {layer_id} cannot be opened"):
                root = os.open(store.layer_path(layer_id), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fds.append(open_beneath(root, path, os.O_RDONLY | os.O_NONBLOCK))
                finally:
                    os.close(root)
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def _say_once(store: Store, why: str) -> None:
    with _said_mutex:
        if str(store.home.layers) in _said:
            return
        _said.add(str(store.home.layers))
    _log.info("equal files cannot share their bytes at %s: %s", store.home.layers, why)
