"""Starting states: for each task one snapshot, made once per home, that all its rollouts and gradings fork from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Self

from worldfork.core.errors import SandboxError
from worldfork.core.ids import content_id
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.place import Place, place
from worldfork.lineage.snapshots import SnapshotInfo
from worldfork.lineage.starting import StartOptions, start
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.globs import is_editable
from worldfork.records.snapshot import SnapshotRecord
from worldfork.records.task import Task
from worldfork.reward.places import TASK_DIRECTORY, inside_task
from worldfork.worlds.world import async_world

WORLD_KEY = "pytest-tasks-v1"
"""The world of tasks that bring none: the machine's own userland with pytest and pytest-timeout."""

_INSTALL_S = 600.0


class StartingState:
    """One task's starting state."""

    def __init__(self, here: Place, record: SnapshotRecord, task: Task) -> None:
        self._here = here
        self._record = record
        self._task = task

    @property
    def snapshot_id(self) -> str:
        """The snapshot."""
        return self._record.snapshot_id

    @property
    def tests(self) -> Mapping[str, bytes]:
        """The hidden tests."""
        return {path: text.encode("utf-8") for path, text in self._task.hidden_tests.items()}

    @property
    def solution(self) -> Edits:
        """The reference, as edits."""
        return Edits({path: EditedFile(text.encode("utf-8")) for path, text in self._task.solution.items()})

    @property
    def originals(self) -> Mapping[str, bytes]:
        """The editable files as they are in the starting state."""
        task = self._task
        return {path: text.encode("utf-8") for path, text in task.files.items() if is_editable(path, task.editable)}

    @contextlib.asynccontextmanager
    async def fork(
        self, index: int = 0, *, seed: int | None = None, grading: bool = False, snapshot_id: str | None = None
    ) -> AsyncIterator[AsyncSandbox]:
        """Start one sandbox from it, without network and within the task's limits; it ends with the block.

        Args:
            index: WORLDFORK_FORK_INDEX inside.
            seed: WORLDFORK_SEED inside; by default it follows from task and index alone.
            grading: for a verifier.
            snapshot_id: another state to start from.
        """
        if seed is None:
            seed = int(content_id(self._task.task_hash.encode(), str(index).encode())[:15], 16)
        record = self._record
        if snapshot_id is not None:
            record = await self._here.work(lambda: self._here.store.snapshot(snapshot_id))
        live = await start(self._here, record, StartOptions(), index=index, seed=seed)
        async with AsyncSandbox(live, owned=True) as sandbox:
            yield sandbox


class StartingStates:
    """The starting states over one world; safe for many callers at once."""

    def __init__(self, here: Place, world: SnapshotInfo) -> None:
        self._here = here
        self._world = world
        self._made: dict[str, StartingState] = {}
        # Guards the making of one state within this process; `async_world` does so between processes.
        self._turns: dict[str, asyncio.Lock] = {}

    @classmethod
    async def open(cls, world: SnapshotInfo | None = None) -> Self:
        """Take a world, or build the one of `WORLD_KEY` if this home does not have it yet.

        Raises:
            SandboxError: it could not be built; the package registry must be in reach once.
        """
        return cls(place(), world or await async_world(WORLD_KEY, build=_install))

    async def get(self, task: Task) -> StartingState:
        """Return the task's starting state: the world with the task's files."""
        key = task.task_hash
        async with self._turns.setdefault(key, asyncio.Lock()):
            if key not in self._made:
                self._made[key] = await self._make(task)
        return self._made[key]

    async def _make(self, task: Task) -> StartingState:
        async def lay_down(sandbox: AsyncSandbox) -> None:
            await sandbox.make_directory(TASK_DIRECTORY)
            for path, text in task.files.items():
                await sandbox.write_file(inside_task(path), text)

        limits = task.limits
        made = await async_world(
            f"task-{task.task_hash[:32]}-{self._world.snapshot_id}",
            build=lay_down,
            snapshot_id=self._world.snapshot_id,
            memory_mb=limits.memory_mb,
            disk_mb=limits.disk_mb,
            pids=limits.pids,
        )
        record = await self._here.work(lambda: self._here.store.snapshot(made.snapshot_id))
        return StartingState(self._here, record, task)


async def _install(sandbox: AsyncSandbox) -> None:
    result = await sandbox.run(
        "python",
        ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "pytest", "pytest-timeout"],
        timeout=_INSTALL_S,
    )
    if not result.ok:
        raise SandboxError(
            f"pytest could not be installed into the world of tasks: {result.stderr.strip()[-500:]}",
            remedy="the package registry must be in reach once; or pass a world that has pytest and pytest-timeout",
        )
