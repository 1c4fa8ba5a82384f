"""Whether a task's tests can be run with the candidate in another fork: proven with its reference, and kept."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from worldfork.core.errors import ConfigError
from worldfork.core.ids import content_id
from worldfork.records.globs import is_editable
from worldfork.records.task import Task
from worldfork.reward.commanded import pytest_arguments
from worldfork.reward.split.plan import module_plan
from worldfork.reward.verifier import Start

PROOF_FORMAT = 2
"""Raised whenever the same tests might be judged differently; older proofs are then found anew."""

MAX_WHY_CHARACTERS = 500

_RETRY_S = 0.05
_MAX_MODULES = 2000


@dataclass(frozen=True)
class Proof:
    """What became of one task's reference, from one starting state."""

    capable: bool
    """The same ids pass as in one process, twice."""
    why: str = ""
    """Why not; empty where it is capable."""
    shapes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Where objects of the reference's classes stood. A candidate's stand nowhere else."""
    modules: Mapping[str, Any] = field(default_factory=dict)
    """The modules under test, as `module_plan` describes them."""
    absent: tuple[str, ...] = ()
    """Other files that a policy may change; the tests' fork has none of them."""
    cpu_s: float = 0.0
    """CPU seconds of the reference's tests, both sides."""
    tried: bool = False
    """Whether the tests were run at all; nothing else can end otherwise another time."""

    @property
    def plain(self) -> bool:
        """Whether plain values alone cross."""
        return not self.shapes


class ProofStore:
    """A directory of proofs, one small file each; safe to share between processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._kept: dict[str, Proof] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def get_or_make(self, task_hash: str, snapshot_id: str, make: Callable[[], Awaitable[Proof]]) -> Proof:
        """Return the proof for this task and starting state; call `make` if nobody has yet, once."""
        key = content_id(b"split proof", str(PROOF_FORMAT).encode(), task_hash.encode(), snapshot_id.encode())
        if key in self._kept:
            return self._kept[key]
        async with self._turns.setdefault(key, asyncio.Lock()):
            if key not in self._kept:
                async with self._file_turn(key):
                    self._kept[key] = self._read(key) or await self._make(key, make)
        self._turns.pop(key, None)
        return self._kept[key]

    async def _make(self, key: str, make: Callable[[], Awaitable[Proof]]) -> Proof:
        made = await make()
        part = self.directory / f"{key}.part"
        part.write_text(json.dumps(asdict(made)), encoding="utf-8")
        part.replace(self.directory / f"{key}.json")
        return made

    def _read(self, key: str) -> Proof | None:
        try:
            data = json.loads((self.directory / f"{key}.json").read_text(encoding="utf-8"))
            data["shapes"] = {place: tuple(names) for place, names in data["shapes"].items()}
            data["absent"] = tuple(data["absent"])
            return Proof(**data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # Absent, or cut short by a crash: it can be found anew.
            return None

    @contextlib.asynccontextmanager
    async def _file_turn(self, key: str) -> AsyncIterator[None]:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.directory / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _try_lock(lock):
                await asyncio.sleep(_RETRY_S)
            yield
        finally:
            os.close(lock)


def learn_modules(task: Task, start: Start) -> Proof:
    """Read the modules under test as the reference has them; the result is to be proven. Takes disk.

    Raises:
        ConfigError: this task's tests cannot be split; the message says why.
    """
    if pytest_arguments(task) is None:
        raise ConfigError("its tests are not run by pytest under the verifier's own eyes", field="test_command")
    if task.rebuild:
        raise ConfigError("it is rebuilt after a change, so its modules are not read from their texts", field="rebuild")
    solution = start.solution
    paths = sorted({*start.originals, *solution.files} - set(solution.removed))
    editable = [path for path in paths if is_editable(path, task.editable)]
    modules = [path for path in editable if path.endswith(".py")]
    if not modules:
        raise ConfigError("no Python module of it is editable", field="editable")
    if len(modules) > _MAX_MODULES:
        raise ConfigError(f"more than {_MAX_MODULES} modules of it are editable", field="editable")
    try:
        texts = {
            path: (solution.files[path].content if path in solution.files else start.originals[path]).decode("utf-8")
            for path in modules
        }
    except UnicodeDecodeError:
        raise ConfigError("a module of it is not written in UTF-8", field="solution") from None
    return Proof(False, modules=module_plan(texts), absent=tuple(path for path in editable if path not in texts))


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
