"""What a task's tests look like when all is right: the ids to expect, found out once and kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worldfork.reward.findings import KEPT_BYTES, Findings, tuples
from worldfork.reward.needs import Need

CALIBRATION_FORMAT = 3
"""Raised whenever the same tests might be judged differently; older results are then found out again."""


@dataclass(frozen=True)
class Calibration:
    """The expected tests of one task from one starting state."""

    task_hash: str
    snapshot_id: str
    """The starting state: another one may have another Python or pytest, and other ids."""
    expected: tuple[str, ...]
    """Ids that pass with the reference, sorted; never empty."""
    untouched: tuple[str, ...]
    """Those of them that pass without any change."""
    reference_failed: tuple[str, ...]
    """Ids that ran with the reference and did not pass; they count for nothing."""
    cpu_s: float
    """CPU seconds of the reference's tests."""
    unmet: tuple[str, ...] = ()
    """Ids that the task declares as `pass_to_pass` and that do not pass with the reference."""
    flaky: tuple[str, ...] = ()
    """Ids that were left out because they did not end the same way each time; they count for nothing."""
    unloaded: tuple[str, ...] = ()
    """Expected ids of files of which no test ran without a change, since they could not be loaded."""
    wall_s: float = 0.0
    """Wall time of the reference's tests less what others took of it; 0 where nobody knows, as of the next."""
    rebuild_s: float = 0.0
    """The same of its rebuild step."""
    rebuild_cpu_s: float = 0.0
    """CPU seconds of that."""

    @property
    def need(self) -> Need:
        """What the reference needs of the limits."""
        return Need(self.cpu_s, self.wall_s, self.rebuild_s, self.rebuild_cpu_s)

    def without(self, ids: Iterable[str]) -> Calibration:
        """Return it with some ids left out as flaky, and unchanged where none would be left that count."""
        flaky = frozenset(ids) & frozenset(self.expected)
        expected, untouched = (
            tuple(each for each in names if each not in flaky) for names in (self.expected, self.untouched)
        )
        if not expected:
            return self
        return replace(self, expected=expected, untouched=untouched, flaky=tuple(sorted({*self.flaky, *flaky})))


class CalibrationStore(Findings[Calibration]):
    """A directory of calibrations."""

    def __init__(self, directory: Path, most_bytes: int = KEPT_BYTES) -> None:
        super().__init__(directory, "calibration", CALIBRATION_FORMAT, _parsed, most_bytes)

    async def leave_out(self, task_hash: str, snapshot_id: str, ids: Iterable[str]) -> None:
        """Let ids that were found to be flaky count for nothing from now on, if there is such a calibration."""
        flaky = frozenset(ids)
        await self.change(task_hash, snapshot_id, lambda known: known.without(flaky))


def _parsed(data: dict[str, Any]) -> Calibration:
    names = ("expected", "untouched", "reference_failed", "unmet", "flaky", "unloaded")
    return Calibration(**tuples({"flaky": (), "unloaded": (), **data}, *names))
