"""What a check of the store has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MOST_PER_SUBJECT = 20
"""Findings that are kept of one layer, snapshot or other subject; all are counted."""
MOST_SUBJECTS = 1000
"""Subjects of which findings are kept; those of all are counted."""
DATABASE, LAYER, SNAPSHOT, NAME, HOLDER = "database", "layer", "snapshot", "name", "holder"
"""Kinds of subjects."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it was stored."""

    kind: str
    """What is damaged: "layer", "snapshot", "name", "holder" or "database"."""
    subject: str
    """Its id, its name, or the file of the database."""
    path: str
    """Of a layer: where in it, with a leading slash; "manifest" and "fs" are the two things that a layer's own
    directory holds. Of others: which of their facts. May be empty."""
    expected: str
    found: str

    def __str__(self) -> str:
        where = f" {self.path}:" if self.path else ""
        return f"{self.kind} {self.subject}:{where} expected {self.expected}, found {self.found}"


@dataclass
class CheckReport:
    """What a check has looked at and found."""

    read_data: bool = False
    """Whether the content of files was read too."""
    snapshots: int = 0
    names: int = 0
    holders: int = 0
    layers: int = 0
    """Layers that are ready or durable."""
    sealed: int = 0
    """Of these, how many have a digest and were compared with it, path by path."""
    unsealed: int = 0
    """Of these, how many have none yet, so that only their being there can be said."""
    moving: int = 0
    """Layers that are being made or removed. They are in nobody's hands yet, or no longer."""
    gone: int = 0
    """Layers that were removed while the check ran."""
    memories: int = 0
    """Snapshots that have memory, whose files were compared with what they were when they were brought to disk."""
    entries: int = 0
    """Paths that were compared."""
    read_bytes: int = 0
    """Content that was read."""
    findings: list[Finding] = field(default_factory=list)
    """At most `MOST_PER_SUBJECT` of one subject."""
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    """Kind and id of every damaged subject, and how many findings it has, kept or not."""
    notes: list[str] = field(default_factory=list)
    """What lies about and is no fault, such as what dead processes left; a sweep removes it."""

    def add(self, finding: Finding) -> None:
        """Count a finding, and keep it if there are not too many of its kind."""
        key = (finding.kind, finding.subject)
        count = self.counts[key] = self.counts.get(key, 0) + 1
        if count <= MOST_PER_SUBJECT and len(self.counts) <= MOST_SUBJECTS:
            self.findings.append(finding)

    def absorb(self, part: CheckReport) -> None:
        """Add what was seen of one layer."""
        for name in ("layers", "sealed", "unsealed", "entries", "read_bytes"):
            setattr(self, name, getattr(self, name) + getattr(part, name))
        for finding in part.findings:
            self.add(finding)
        for key, count in part.counts.items():
            self.counts[key] = self.counts.get(key, 0) + max(0, count - MOST_PER_SUBJECT)

    @property
    def sound(self) -> bool:
        """True where nothing is damaged."""
        return not self.counts

    @property
    def total(self) -> int:
        """How many findings there are, kept or not."""
        return sum(self.counts.values())

    @property
    def damaged_layers(self) -> list[str]:
        """Ids of the layers with findings."""
        return [subject for kind, subject in self.counts if kind == LAYER]

    def to_json(self) -> dict[str, Any]:
        """Return it in plain values."""
        return {
            "sound": self.sound,
            "read_data": self.read_data,
            "snapshots": self.snapshots,
            "names": self.names,
            "holders": self.holders,
            "layers": self.layers,
            "sealed": self.sealed,
            "unsealed": self.unsealed,
            "moving": self.moving,
            "gone": self.gone,
            "memories": self.memories,
            "entries": self.entries,
            "read_bytes": self.read_bytes,
            "findings_total": self.total,
            "findings": [
                {
                    "kind": one.kind,
                    "subject": one.subject,
                    "layer_id": one.subject if one.kind == LAYER else None,
                    "path": one.path,
                    "expected": one.expected,
                    "found": one.found,
                }
                for one in self.findings
            ],
            "notes": self.notes,
        }
