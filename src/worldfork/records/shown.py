"""What a sandbox shows read-only besides its own disk, as it was found when the sandbox was started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shown:
    """One read-only mount of a sandbox."""

    target: str
    """Absolute path inside."""
    source: str
    """`snapshot:ID` with the path in it, or `directory:PATH`."""
    fingerprint: str
    """Of a snapshot its id, of a directory a digest of names, sizes and times: other than before when that changed."""
    path: str = ""
    """The directory on this machine; within a snapshot the absolute path in it, empty for its root."""
    layers: tuple[str, ...] = ()
    """Of a snapshot: ids, top first."""
    below: str = ""
    """Of a snapshot on a base of its own: that directory, below its layers."""

    @property
    def is_snapshot(self) -> bool:
        """Whether layers are shown, not a directory of this machine."""
        return bool(self.layers)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Shown:
        """Read plain data."""
        return cls(**{**data, "layers": tuple(data.get("layers", ()))})
