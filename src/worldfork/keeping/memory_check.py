"""The memory of snapshots against what it was when it was brought to disk."""

from __future__ import annotations

import os
from pathlib import Path

from worldfork.core.errors import NotFound, StoreError
from worldfork.keeping.findings import SNAPSHOT, CheckReport, Finding
from worldfork.store.memory import DIGESTS, file_digest
from worldfork.store.store import Store

MEMORY = "memory"
"""How findings name a snapshot's memory directory; a file in it is `memory/NAME`."""


def check_memories(store: Store, report: CheckReport, read_data: bool) -> None:
    """Compare the memory of each snapshot that has any, and add what differs to the report.

    One that is deleted meanwhile is no fault. What has not been brought to disk yet has only to be there.

    Raises:
        StoreError: the metadata failed.
    """
    with store.database.read() as db:
        rows = db.execute(
            'SELECT snapshot_id, state FROM snapshots WHERE instr(record, \'"kind":"memory"\') > 0 ORDER BY number'
        ).fetchall()
    for snapshot_id, state in rows:
        mine = CheckReport()
        _check(store, mine, snapshot_id, read_data, lasting=state == "durable")
        if not mine.sound and _is_gone(store, snapshot_id):
            continue
        report.memories += 1
        report.absorb(mine)


def _check(store: Store, mine: CheckReport, snapshot_id: str, read_data: bool, *, lasting: bool) -> None:
    def add(path: str, expected: object, found: object) -> None:
        mine.add(Finding(SNAPSHOT, snapshot_id, path, str(expected), str(found)))

    try:
        digests = store.memory_digests(snapshot_id)
    except NotFound:
        add(MEMORY, "a directory", "nothing")
        return
    except StoreError as error:
        add(MEMORY, "the digests of its files", error.message)
        return
    if digests is None and lasting:
        add(f"{MEMORY}/{DIGESTS}", "a file", "nothing")
    for name, (size_bytes, digest) in (digests or {}).items():
        path = store.memory_path(snapshot_id) / name
        found_bytes = _size(path)
        if found_bytes is None:
            add(f"{MEMORY}/{name}", f"{size_bytes} bytes", "nothing")
        elif found_bytes != size_bytes:
            add(f"{MEMORY}/{name}", f"{size_bytes} bytes", f"{found_bytes} bytes")
        elif read_data:
            mine.entries += 1
            try:
                found = file_digest(path)[1]
            except OSError as error:
                found = error.strerror or str(error)
            mine.read_bytes += _read_bytes(path)
            if found != digest:
                add(f"{MEMORY}/{name}", digest, found)
        else:
            mine.entries += 1


def _size(path: Path) -> int | None:
    try:
        return os.lstat(path).st_size
    except OSError:
        return None


def _read_bytes(path: Path) -> int:
    """Return what had to be read of a file: holes cost nothing."""
    try:
        info = os.lstat(path)
    except OSError:
        return 0
    return min(info.st_size, info.st_blocks * 512)


def _is_gone(store: Store, snapshot_id: str) -> bool:
    try:
        store.snapshot(snapshot_id)
    except NotFound:
        return True
    return False
