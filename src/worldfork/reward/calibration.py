"""What a task's tests look like when all is right: the ids to expect, found out once and kept."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from worldfork.core.ids import content_id

CALIBRATION_FORMAT = 2
"""Raised whenever the same tests might be judged differently; older results are then found out again."""

_RETRY_S = 0.05


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
    """Ids that the task declares as `pass_to_pass` and that do not pass both without and with the reference."""
    flaky: tuple[str, ...] = ()
    """Ids that were left out because they did not end the same way each time; they count for nothing."""

    def without(self, ids: Iterable[str]) -> Calibration:
        """Return it with some ids left out as flaky, and unchanged where none would be left that count."""
        flaky = frozenset(ids) & frozenset(self.expected)
        expected, untouched = (
            tuple(each for each in names if each not in flaky) for names in (self.expected, self.untouched)
        )
        if not expected:
            return self
        return replace(self, expected=expected, untouched=untouched, flaky=tuple(sorted({*self.flaky, *flaky})))


class CalibrationStore:
    """A directory of calibrations, one small file each; safe to share between processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._kept: dict[str, Calibration] = {}
        # Guards the making of one calibration within this process; the file lock does so between processes.
        self._turns: dict[str, asyncio.Lock] = {}

    async def get_or_make(
        self, task_hash: str, snapshot_id: str, make: Callable[[], Awaitable[Calibration]]
    ) -> Calibration:
        """Return the calibration of this task and starting state; call `make` if nobody has yet.

        One caller makes it while all others, in this and other processes, wait. What `make` raises passes to
        its caller, and the next one tries again.
        """
        key = _key(task_hash, snapshot_id)
        if key in self._kept:
            return self._kept[key]
        async with self._turns.setdefault(key, asyncio.Lock()):
            if key not in self._kept:
                async with self._file_turn(key):
                    self._kept[key] = self._read(key) or await self._make(key, make)
        self._turns.pop(key, None)
        return self._kept[key]

    async def leave_out(self, task_hash: str, snapshot_id: str, ids: Iterable[str]) -> None:
        """Let ids that were found to be flaky count for nothing from now on, if there is such a calibration.

        Who has it read already, in another process, goes on with what it read.
        """
        key = _key(task_hash, snapshot_id)
        async with self._file_turn(key):
            known = self._read(key)
            if known is not None:
                self._kept[key] = self._write(key, known.without(ids))

    async def _make(self, key: str, make: Callable[[], Awaitable[Calibration]]) -> Calibration:
        return self._write(key, await make())

    def _write(self, key: str, made: Calibration) -> Calibration:
        whole = self.directory / f"{key}.json"
        part = whole.with_suffix(".part")
        part.write_text(json.dumps(asdict(made)), encoding="utf-8")
        part.replace(whole)
        return made

    def _read(self, key: str) -> Calibration | None:
        try:
            data = json.loads((self.directory / f"{key}.json").read_text(encoding="utf-8"))
            for name in ("expected", "untouched", "reference_failed", "unmet", "flaky"):
                data[name] = tuple(data.get(name, ()) if name == "flaky" else data[name])
            return Calibration(**data)
        except (OSError, ValueError, KeyError, TypeError):
            # Absent, or cut short by a crash: it can be found out again.
            return None

    @contextlib.asynccontextmanager
    async def _file_turn(self, key: str) -> AsyncIterator[None]:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.directory / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Asked again and again instead of waited for in a thread: enough waiting threads would leave none
            # for the holder to finish with.
            while not _try_lock(lock):
                await asyncio.sleep(_RETRY_S)
            yield
        finally:
            os.close(lock)


def _key(task_hash: str, snapshot_id: str) -> str:
    return content_id(b"calibration", str(CALIBRATION_FORMAT).encode(), task_hash.encode(), snapshot_id.encode())


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
