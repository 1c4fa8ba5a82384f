"""What a caller says of a snapshot to be, and the record that becomes of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from worldfork.core.clock import SystemClock
from worldfork.core.ids import new_id
from worldfork.records.sandbox import SandboxFacts
from worldfork.records.snapshot import SnapshotRecord


@dataclass(frozen=True)
class Wanted:
    """What a caller says of the snapshot to be."""

    label: str | None = None
    level: str = "local"
    """A `SnapshotLevel`."""


def record_of(facts: SandboxFacts, layers: tuple[str, ...], wanted: Wanted) -> SnapshotRecord:
    """Return the record of a snapshot that is being taken of a sandbox.

    Args:
        facts: of the sandbox.
        layers: what the snapshot stands on, top first.
        wanted: what the caller says of it.
    """
    return SnapshotRecord(
        snapshot_id=new_id("sn"),
        parent_id=facts.checkpoint_id or facts.snapshot_id,
        sandbox_id=facts.sandbox_id,
        created_s=SystemClock().now_s(),
        kind="filesystem",
        state="ready",
        form=facts.form,
        base=facts.base.to_json(),
        layers=layers,
        facts={
            "env": facts.env,
            "user": facts.user,
            "working_dir": facts.working_dir,
            "limits": asdict(facts.limits),
            **({"ids": facts.ids} if facts.ids else {}),
            **({"driver": facts.driver} if facts.driver != "namespace" else {}),
        },
        label=wanted.label,
        made_by="checkpoint",
        level=wanted.level,
    )
