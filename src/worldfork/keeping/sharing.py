"""Equal layers become one, and equal files share their bytes, without anybody who uses them noticing."""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from worldfork.content.ids import ids_of
from worldfork.content.manifest import read_manifest
from worldfork.core.beneath import open_beneath
from worldfork.core.errors import NotFound, WorldforkError
from worldfork.keeping.sealing import SETTLED, manifest_path
from worldfork.records.snapshot import LayerRecord
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.store import Store

LARGE_BYTES = 1 << 20
"""Files from this size on are worth sharing one by one."""
_log = logging.getLogger("worldfork.store")
_said_mutex = threading.Lock()
_said: set[str] = set()


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


def share_equal(store: Store) -> ShareReport:
    """Let snapshots whose layers are equal stand on the oldest of these, so that the copies go with a collection.

    Only durable snapshots and layers; whoever holds a copy keeps it as long as that takes.

    Raises:
        StoreError: the metadata cannot be read.
    """
    report = ShareReport()
    equal: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for record in store.layers_known():
        if record.digest is not None and record.state == "durable":
            # Owners are as seen inside in a digest: under another map the same ones are others on disk.
            ids = ids_of(store.layer_path(record.layer_id))
            equal[record.form, ids, record.digest].append(record.layer_id)
    copies = {copy: layer_ids[0] for layer_ids in equal.values() for copy in layer_ids[1:]}
    if not copies:
        return report
    wanted = {
        layer_id
        for snapshot in store.snapshots()
        if snapshot.state == "durable"
        for layer_id in copies.keys() & set(snapshot.layers)
        if copies[layer_id] not in snapshot.layers
    }
    for copy, oldest in copies.items():
        if copy not in wanted:
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
        if record.digest is not None and record.state in SETTLED and (record.logical_bytes or 0) >= LARGE_BYTES
    ]
    if fresh is not None and not any(record.layer_id in fresh for record in records):
        return report
    from worldfork.content.share import CannotShare

    try:
        _expect_sharing(store, records)
        for (_, size_bytes), places in _large_files(store, records, report).items():
            if fresh is None or any(layer_id in fresh for layer_id, _ in places):
                pairs = [(places[0], place) for place in places[1:]]
                _share(store, pairs, size_bytes, fresh, report)
    except CannotShare as error:
        report.unsupported = str(error)
        _say_once(store, report.unsupported)
    return report


def _expect_sharing(store: Store, records: list[LayerRecord]) -> None:
    """Ask the file system before anything is read."""
    from worldfork.content.share import expect_sharing

    for record in records:
        try:
            with open(manifest_path(store, record.layer_id), "rb") as file:
                expect_sharing(file.fileno())
        except OSError:
            continue  # it was collected meanwhile, and another one may tell
        return


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
    from worldfork.content.share import share_bytes

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
