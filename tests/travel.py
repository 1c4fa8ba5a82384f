"""Snapshots that travel between stores in tests."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from pathlib import Path

from tests.archives import make_tree
from tests.stores import record_of

from worldfork.content.layer import walk
from worldfork.content.manifest import digest_of
from worldfork.exchange.departure import export_snapshot
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store.store import Store

FORM = "trusted" if os.geteuid() == 0 else "user"
HOST = {"kind": "host", "fingerprint": "this machine", "binds": [["/usr", "/usr"]]}


def add_tree(
    store: Store, name: str, *, below: Sequence[str] = (), base: dict[str, object] | None = None, large: bool = False
) -> SnapshotRecord:
    """Publish a snapshot with one new layer that holds some of everything, and a file of this name."""
    draft = store.begin_layer(form=FORM)
    make_tree(draft.path, large=large)
    (draft.path / "name").write_text(name)
    os.utime(draft.path / "name", ns=(1, 2))
    os.utime(draft.path, ns=(1, 2))
    record = dataclasses.replace(
        record_of((draft.layer_id, *below), form=FORM), base=dict(base or HOST), label=name, size_bytes=77
    )
    store.publish(record, [draft.layer_id])
    return record


def exported(store: Store, snapshot_id: str) -> bytes:
    """The archive of a snapshot."""
    out = io.BytesIO()
    export_snapshot(store, snapshot_id, out)
    return out.getvalue()


def digests(store: Store, layers: Sequence[str]) -> list[str]:
    """What the layers hold, as it is on disk now."""
    return [digest_of(walk(store.layer_path(layer_id), FORM)).digest for layer_id in layers]


def traces(store: Store) -> list[str]:
    """What an arrival that failed would leave: layers, rows, leases, files in the making."""
    left = [f"layer {path.name}" for path in store.home.layers.iterdir()]
    left += [f"row {layer.layer_id}" for layer in store.layers_known()]
    left += [f"holder {holder.holder_id}" for holder in store.holders()]
    left += [f"snapshot {record.snapshot_id}" for record in store.snapshots()]
    left += [f"trash {path.name}" for path in store.home.trash.iterdir()]
    return left + [f"tmp {path.name}" for path in Path(store.home.tmp).iterdir()]
