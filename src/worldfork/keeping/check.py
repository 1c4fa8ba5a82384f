"""A check of the whole store. It changes nothing, and everybody else goes on meanwhile.

What is being made, removed or collected while it runs is no fault: the metadata is looked at in one moment, and each
layer under a lease, so that what is missing then is missing for good.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from worldfork.core.errors import Corrupt, NotFound, OutOfSpace, StoreError
from worldfork.keeping.findings import LAYER, CheckReport, Finding
from worldfork.keeping.layer_check import check_layer
from worldfork.keeping.memory_check import check_memories
from worldfork.keeping.metadata import LayerRow, check_metadata, some
from worldfork.store.failures import typed
from worldfork.store.store import Store

__all__ = ["CheckReport", "Finding", "check"]

_ATTEMPTS = 3
_SETTLED = ("ready", "durable")


def check(store: Store, read_data: bool = False, *, step: Callable[[str], None] | None = None) -> CheckReport:
    """Compare what the store says with what is there. Safe beside everybody; one finding never stops the rest.

    Args:
        store: an open store.
        read_data: read the content of all files too; otherwise their attributes and sizes are compared.
        step: called with each layer's id before it is looked at.
    Raises:
        StoreError: the metadata or the directories of the store cannot be read at all.
    """
    report = CheckReport(read_data=read_data)
    known = check_metadata(store, report)
    torn = []
    for layer_id, row in known.layers.items():
        if row.state not in _SETTLED:
            report.moving += 1
        elif row.state == "ready" and row.boot_id != store.boot_id and layer_id not in known.used:
            torn.append(layer_id)
            report.moving += 1
        else:
            if step is not None:
                step(layer_id)
            _settled(store, report, layer_id, row, read_data)
    check_memories(store, report, read_data)
    if torn:
        report.notes.append(f"layers/: {len(torn)} of before the machine went down, unused: {some(torn)}")
    _strays(store, report)
    return report


def _settled(store: Store, report: CheckReport, layer_id: str, row: LayerRow, read_data: bool) -> None:
    if row.digest is None and os.path.isdir(store.layer_path(layer_id)):
        report.layers += 1
        report.unsealed += 1
        return
    for _ in range(_ATTEMPTS):
        mine = CheckReport()
        try:
            _under_a_lease(store, mine, layer_id, read_data)
        except NotFound:
            report.gone += 1
            return
        except OutOfSpace:
            _without_a_lease(store, report, layer_id, read_data)
            return
        except Corrupt as error:
            report.add(Finding(LAYER, layer_id, "", "a lease on it", str(error)))
            return
        except StoreError:
            continue  # the lease was lost: this process stood still, and the layer may have been removed meanwhile
        report.absorb(mine)
        return
    report.notes.append(f"layer {layer_id} was not looked at: its lease was lost {_ATTEMPTS} times")


def _under_a_lease(store: Store, mine: CheckReport, layer_id: str, read_data: bool) -> None:
    with store.reading(layers=[layer_id], purpose="check"):
        check_layer(store, mine, layer_id, read_data)


def _without_a_lease(store: Store, report: CheckReport, layer_id: str, read_data: bool) -> None:
    """A lease has to be written; on a full disk what was found counts if the layer is still there afterwards."""
    mine = CheckReport()
    try:
        check_layer(store, mine, layer_id, read_data)
        if store.layer(layer_id).state not in _SETTLED:
            raise NotFound(f"{layer_id} is being removed")
    except NotFound:
        report.gone += 1
    else:
        report.absorb(mine)


def _strays(store: Store, report: CheckReport) -> None:
    """Note what no row knows of. In this order: a layer's row is there before its directory is."""
    home = store.home
    with typed("the directories of the store cannot be listed"):
        layers, trash = os.listdir(home.layers), os.listdir(home.trash)
        boots = [name for name in os.listdir(home.tmp.parent) if name != store.boot_id]
    with store.database.read() as db:
        known = {row[0] for row in db.execute("SELECT layer_id FROM layers")}
    strays = [path.name for path in store.stray_memories()]
    for place, names in (
        ("memory", strays),
        ("layers", sorted(set(layers) - known)),
        ("trash", sorted(trash)),
        ("tmp", sorted(boots)),
    ):
        if names:
            report.notes.append(f"{place}/: {len(names)} that nothing uses any more: {some(names)}")
