"""The JSON shapes of the command line. Programs read them: keys are added, never renamed or dropped."""

from __future__ import annotations

import datetime
from typing import Any

from worldfork import SandboxInfo, SnapshotInfo


def sandbox_shape(info: SandboxInfo) -> dict[str, Any]:
    """Return the facts of a live sandbox."""
    return {
        "sandbox_id": info.sandbox_id,
        "name": info.name,
        "status": str(getattr(info.status, "value", info.status)),
        "snapshot_id": info.snapshot_id,
        "created_s": _seconds(info.created_at),
    }


def snapshot_shape(info: SnapshotInfo) -> dict[str, Any]:
    """Return the facts of a snapshot."""
    return {
        "snapshot_id": info.snapshot_id,
        "sandbox_id": info.sandbox_id,
        "status": str(getattr(info.status, "value", info.status)),
        "label": info.label,
        "size_bytes": info.size_bytes,
        "created_s": _seconds(info.created_at),
    }


def _seconds(moment: datetime.datetime | float | None) -> float | None:
    return moment.timestamp() if isinstance(moment, datetime.datetime) else moment


def when(moment_s: float | None) -> str:
    """Return a moment (seconds since the epoch) as local date and time."""
    if moment_s is None:
        return "-"
    return datetime.datetime.fromtimestamp(moment_s).strftime("%Y-%m-%d %H:%M:%S")
