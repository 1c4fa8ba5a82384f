"""What was found out about tasks, and is kept: a directory of small files, safe to share between processes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from worldfork.core.ids import content_id
from worldfork.core.recent import Recent

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Found = TypeVar("Found", bound="DataclassInstance")

KEPT_BYTES = 32 << 20
"""Of findings in memory, as long as their files are; what was used longest ago is read again."""

_RETRY_S = 0.05


class Findings(Generic[Found]):
    """One record for each task and starting state, made once."""

    def __init__(
        self, directory: Path, kind: str, version: int, read: Callable[[dict[str, Any]], Found], most_bytes: int
    ) -> None:
        """Take a directory.

        Args:
            directory: of the files; made when it is needed.
            kind: what is found out; other kinds may lie in the same directory.
            version: records of another one are found out anew.
            read: makes a record of the JSON of its fields; what it raises for others is ValueError, TypeError,
                KeyError or AttributeError.
            most_bytes: of them that are held in memory.
        """
        self.directory = directory
        self._kind = (kind.encode(), str(version).encode())
        self._parse = read
        self._held: Recent[Found] = Recent(most_bytes)
        # Guards the making of one record within this process; the file lock does so between processes.
        self._turns: dict[str, asyncio.Lock] = {}

    async def get_or_make(
        self,
        task_hash: str,
        snapshot_id: str,
        make: Callable[[], Awaitable[Found]],
        again: Callable[[Found], bool] = lambda _: False,
    ) -> Found:
        """Return what was found out of this task and starting state; call `make` if nobody has yet.

        One caller makes it while all others, in this and other processes, wait. What `make` raises passes to its
        caller, and the next one tries again.

        Args:
            task_hash, snapshot_id: of what.
            make: finds it out.
            again: tells which record is to be found out anew.
        """
        key = self._key(task_hash, snapshot_id)
        held = self._held.get(key)
        if held is not None and not again(held):
            return held
        async with self._turn(key):
            held = self._held.get(key)
            # What is held may have been found out anew by another process.
            known = held if held is not None and not again(held) else self._read(key)
            return known if known is not None and not again(known) else self._write(key, await make())

    async def change(self, task_hash: str, snapshot_id: str, change: Callable[[Found], Found]) -> None:
        """Change a record, if there is one. Who has it read already, in another process, goes on with what it read."""
        key = self._key(task_hash, snapshot_id)
        async with self._turn(key):
            known = self._read(key)
            if known is not None:
                self._write(key, change(known))

    def _key(self, task_hash: str, snapshot_id: str) -> str:
        return content_id(*self._kind, task_hash.encode(), snapshot_id.encode())

    def _write(self, key: str, made: Found) -> Found:
        text = json.dumps(asdict(made))
        whole = self.directory / f"{key}.json"
        part = whole.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(whole)
        self._held.put(key, made, len(text))
        return made

    def _read(self, key: str) -> Found | None:
        try:
            text = (self.directory / f"{key}.json").read_text(encoding="utf-8")
            found = self._parse(json.loads(text))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # Absent, or cut short by a crash: it can be found out again.
            return None
        self._held.put(key, found, len(text))
        return found

    @contextlib.asynccontextmanager
    async def _turn(self, key: str) -> AsyncIterator[None]:
        async with self._turns.setdefault(key, asyncio.Lock()):
            try:
                async with self._file_turn(key):
                    yield
            finally:
                # Whoever waits has it already; who comes later waits for the file.
                self._turns.pop(key, None)

    @contextlib.asynccontextmanager
    async def _file_turn(self, key: str) -> AsyncIterator[None]:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.directory / f"{key}.lock"
        # Asked again and again instead of waited for in a thread: enough waiting threads would leave none for the
        # holder to finish with.
        while (lock := _try_lock(path)) is None:
            await asyncio.sleep(_RETRY_S)
        try:
            yield
        finally:
            # Whoever waits for this very file finds that it is gone, and begins with a new one.
            path.unlink(missing_ok=True)
            os.close(lock)


def tuples(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return fields with those of these names as the tuples that they were before they were JSON."""
    return {**data, **{name: tuple(data[name]) for name in names}}


def _try_lock(path: Path) -> int | None:
    """Return the lock; None where somebody else has it, or has just removed it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(file)
    return None
