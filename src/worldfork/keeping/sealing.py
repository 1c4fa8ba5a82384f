"""Sealing: what a layer holds is written down, and from then on it can be checked, compared and shared by it.

Never on the way of a fork or a checkpoint: whoever seals waits for the disk, and nobody waits for whoever seals.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from worldfork.content.layer import walk
from worldfork.content.manifest import Sealed, write_manifest
from worldfork.core.errors import Corrupt, NotFound, StoreError, WorldforkError
from worldfork.records.snapshot import LayerRecord
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.store import Store
from worldfork.store.syscalls import sync_directory

SETTLED = ("ready", "durable")
"""States of layers that are complete and stay."""


@dataclass
class SealReport:
    """What `seal_all` has done."""

    sealed: list[str] = field(default_factory=list)
    """Ids of the layers that have a digest now and had none."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Layers that could not be sealed, and why; the next time tries again."""


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
        with typed(f"the manifest of {layer_id} cannot be looked at"):
            is_there = place.exists()
        if known.digest is not None and is_there:
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
                sync_directory(place.parent)
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
        if record.digest is not None or record.state not in SETTLED:
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
