"""Starting states: for each task one snapshot, made once per home, that all its rollouts and gradings fork from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Self

from worldfork.core.errors import SandboxError
from worldfork.core.ids import content_id
from worldfork.core.recent import Recent
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.fitting import check_base, check_ids
from worldfork.lineage.mounts import check_mounts
from worldfork.lineage.place import Place, place
from worldfork.lineage.snapshots import SnapshotInfo
from worldfork.lineage.starting import StartOptions, start
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.episode import FailureKind
from worldfork.records.origin import Origin
from worldfork.records.snapshot import SnapshotRecord
from worldfork.records.task import Task
from worldfork.reward.places import TASK_DIRECTORY, inside_task
from worldfork.rollout.answers import check_tests, gather_solution, gather_tests, patched
from worldfork.rollout.contents import content_of
from worldfork.rollout.leftovers import end_label, let_go
from worldfork.rollout.reading import Originals, find_editable, read_paths
from worldfork.worlds.recipe import build_world, ground_of
from worldfork.worlds.world import async_world

_FORMAT = "2"
"""Part of every state's key; another one when what is made of the same task changes."""

KEPT_BYTES = 128 << 20
"""Of starting states that no rollout holds; what was read longest ago is read again when it is asked for."""

_EACH_BYTES = 150
"""What a path or a content takes beside its characters."""


class StartingState:
    """One task's starting state: what `reward.verifier.Start` asks for. Made by `StartingStates`."""

    def __init__(
        self, here: Place, record: SnapshotRecord, task: Task, tests: Mapping[str, bytes], solution: Edits
    ) -> None:
        self.here = here
        self._record = record
        self._task = task
        self.tests = tests
        """Every hidden test file: path of the task -> content."""
        self.solution = solution
        """The reference, as the edits of a policy that knows it; empty where the task has none."""
        self.originals: Mapping[str, bytes] = {}
        """The editable files as they are in the starting state."""
        self._content: str | None = None
        self._reading = threading.Lock()

    @property
    def snapshot_id(self) -> str:
        """The snapshot."""
        return self._record.snapshot_id

    def content(self, *, quick: bool = False) -> str | None:
        """Return the digest of what it holds, as of `contents.content_of`. Blocking."""
        with self._reading:
            if self._content is None:
                self._content = content_of(self.here.store, self.snapshot_id, quick=quick)
            return self._content

    @property
    def size_bytes(self) -> int:
        """Of what is kept in memory: tests, reference, and the paths of editable files."""
        files = (*self.tests.values(), *(file.content for file in self.solution.files.values()))
        paths = (*self.tests, *self.originals)
        return sum(map(len, files)) + sum(map(len, paths)) + _EACH_BYTES * (len(files) + len(paths))

    @contextlib.asynccontextmanager
    async def fork(
        self, index: int = 0, *, seed: int | None = None, grading: bool = False, snapshot_id: str | None = None
    ) -> AsyncIterator[AsyncSandbox]:
        """Start one sandbox as `open` does; it ends with the block."""
        async with await self.open(index, seed=seed, grading=grading, snapshot_id=snapshot_id) as sandbox:
            yield sandbox

    @contextlib.asynccontextmanager
    async def stilled(self, sandbox: AsyncSandbox) -> AsyncIterator[str]:
        """End a fork with every process in it; give the id of what it left on its disk, which goes with the block.

        Raises:
            SandboxDied: it did not live to be stopped. OutOfSpace: it was ended for its disk, or the host is full.
            SandboxError, StoreError, ForkError: it could not be stopped.
        """
        stop_s = self._task.limits.stop_wall_s
        try:
            end = await sandbox.checkpoint(timeout=stop_s, stop=True, level="volatile", label=end_label())
        except TimeoutError:
            raise SandboxError(
                f"ending a sandbox took more than {stop_s:g} s",
                remedy="run fewer rollouts at once, or raise the task's stop_wall_s",
                kind=FailureKind.LIMIT,
            ) from None
        try:
            yield end.snapshot_id
        finally:
            await asyncio.shield(let_go([end.snapshot_id]))

    async def open(
        self,
        index: int = 0,
        *,
        seed: int | None = None,
        grading: bool = False,
        snapshot_id: str | None = None,
        ttl_s: float | None = None,
        detached: bool = False,
    ) -> AsyncSandbox:
        """Start one sandbox, without network and within the task's limits; the caller ends it.

        Args:
            index: WORLDFORK_FORK_INDEX inside.
            seed: WORLDFORK_SEED inside; by default it follows from task and index alone.
            grading: for a verifier: mounts that are not declared for grading are absent.
            snapshot_id: another state to start from, such as the end of a rollout, with the same limits.
            ttl_s: it ends by itself after so many seconds.
            detached: it outlives this process.

        Raises:
            NotFound: there is no such snapshot. SandboxError: it could not be started.
        """
        task = self._task
        if seed is None:
            seed = int(content_id(task.task_hash.encode(), str(index).encode())[:15], 16)
        record = self._record
        if snapshot_id is not None and snapshot_id != record.snapshot_id:
            record = await self.here.work(lambda: self.here.store.snapshot(snapshot_id))
        options = StartOptions(
            driver=self.here.settings.driver,
            limits=_limits(task),
            mounts=check_mounts([mount for mount in task.mounts if mount.at_grading or not grading]),
            timeout_s=ttl_s,
            detached=detached,
        )
        return AsyncSandbox(await start(self.here, record, options, index=index, seed=seed), owned=True)


class StartingStates:
    """The starting states of this home; safe for many callers at once."""

    def __init__(self, here: Place, world: SnapshotInfo | None = None) -> None:
        self._here = here
        self._world = world
        self._made: Recent[StartingState] = Recent(KEPT_BYTES)
        # Guards the making of one state within this process; `async_world` does so between processes.
        self._turns: dict[str, asyncio.Lock] = {}

    @classmethod
    async def open(cls, world: SnapshotInfo | None = None) -> Self:
        """Return the states of this home.

        Args:
            world: what tasks stand on that name no origin of their own; by default a world with pytest and
                pytest-timeout, which is built when the first of them is asked for.
        """
        return cls(await asyncio.get_running_loop().run_in_executor(None, place), world)

    @property
    def world_id(self) -> str | None:
        """The snapshot that tasks stand on which name no origin of their own; None where the default world is."""
        return None if self._world is None else self._world.snapshot_id

    async def get(self, task: Task) -> StartingState:
        """Return the task's starting state, made now if this home does not have it.

        Equal states are made once, whatever else their tasks say: world, files, patch, rebuild step, variables and
        limits decide.

        Raises:
            ConfigError: the task names what is not there, a patch of it does not apply, or tests that judge it are
                editable.
            NotFound, StoreError: a snapshot that it names cannot be read.
            SandboxError: its world could not be built; or its rebuild step fails, then `kind` is `build`.
        """
        key = task.task_hash
        async with self._turns.setdefault(key, asyncio.Lock()):
            try:
                state = self._made.get(key)
                if state is None:
                    state = await self._make(task)
                    self._made.put(key, state, state.size_bytes)
            finally:
                # Whoever waits has it already, and who comes later finds the state.
                self._turns.pop(key, None)
        return state

    async def _make(self, task: Task) -> StartingState:
        here = self._here
        world = await self._world_of(task)

        async def build(sandbox: AsyncSandbox) -> None:
            await _lay_down(here, sandbox, task, world.snapshot_id)
            await _rebuild(sandbox, task)

        made = await async_world(
            _key(task, world.snapshot_id), build, snapshot_id=world.snapshot_id, env=dict(task.env), **_limits(task)
        )
        return await self.at(made.snapshot_id, task)

    async def at(self, snapshot_id: str, task: Task) -> StartingState:
        """Return the state that a task had when it was made, whatever its world would be by now.

        Raises:
            NotFound: it is gone. FormatUnsupported: it does not fit this machine any more. StoreError, ConfigError: as
            of `get`.
        """
        here = self._here
        record = await here.work(lambda: _fitting(here, snapshot_id))
        grounds = [await ground_of(each.origin) for each in (task.tests_from, task.solution_from) if each is not None]
        # What a directory or a branch means may change, so the task's hash alone does not tell what is read.
        known_by = (task.task_hash, snapshot_id, *(each and each.snapshot_id for each in grounds))
        state = _STATES.get(known_by)
        if state is None or state.here is not here:
            state = await _read(here, record, task)
            _STATES.put(known_by, state, state.size_bytes)
        return state

    async def _world_of(self, task: Task) -> SnapshotInfo:
        if self._world is None or not task.world.origin.empty:
            return await build_world(task.world)
        if task.world.empty:
            return self._world
        return await build_world(replace(task.world, origin=Origin(snapshot=self._world.snapshot_id)))


_STATES: Recent[StartingState] = Recent(KEPT_BYTES)
"""For callers that open one rollout at a time, each with its own `StartingStates`."""


async def _read(here: Place, record: SnapshotRecord, task: Task) -> StartingState:
    tests = await gather_tests(here, task, record.snapshot_id)
    solution = await gather_solution(here, task, record.snapshot_id)
    paths = await here.work(lambda: find_editable(here.store, record.snapshot_id, task.editable))
    check_tests(task, paths, tests)
    state = StartingState(here, record, task, tests, solution)
    state.originals = Originals(here.store, record.snapshot_id, paths)
    return state


def _fitting(here: Place, snapshot_id: str) -> SnapshotRecord:
    record = here.store.snapshot(snapshot_id)
    check_base(record, allow_changed=False)
    check_ids(record, here.driver.ids)
    return record


def _limits(task: Task) -> dict[str, int]:
    limits = task.limits
    return {"memory_mb": limits.memory_mb, "disk_mb": limits.disk_mb, "pids": limits.pids}


def _key(task: Task, world_id: str) -> str:
    parts = [_FORMAT, world_id, dict(task.files), task.patch, task.rebuild, dict(task.env), _limits(task)]
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return f"start-{content_id(text.encode('ascii'))[:32]}"


async def _lay_down(here: Place, sandbox: AsyncSandbox, task: Task, world_id: str) -> None:
    """Lay the task's files over its world, and apply its patch to both."""
    await sandbox.make_directory(TASK_DIRECTORY)
    for path, text in task.files.items():
        await sandbox.write_file(inside_task(path), text)
    if not task.patch:
        return
    over: dict[str, EditedFile | None] = {path: EditedFile(text.encode()) for path, text in task.files.items()}
    changed = await here.work(
        lambda: patched(task.patch, lambda paths: read_paths(here.store, world_id, paths), over, "patch")
    )
    for path, file in changed.items():
        if file is None:
            await sandbox.delete_file(inside_task(path))
    for path, file in changed.items():
        if file is not None:
            await sandbox.write_file(inside_task(path), file.content, mode=0o755 if file.executable else 0o644)


async def _rebuild(sandbox: AsyncSandbox, task: Task) -> None:
    if not task.rebuild:
        return
    program, *args = task.rebuild
    result = await sandbox.run(program, args, working_dir=TASK_DIRECTORY, timeout=task.limits.rebuild_wall_s)
    if not result.ok:
        words = (result.stderr.strip() or result.stdout.strip())[-1000:]
        raise SandboxError(
            f"the rebuild step of {task.task_id} ended as {result.reason.value} with {result.exit_code} on the "
            f"starting state: {words or 'no output'}",
            remedy="the world needs what its rebuild step uses, and rebuild_wall_s must be enough",
            kind=FailureKind.BUILD,
            output=words,
        )
