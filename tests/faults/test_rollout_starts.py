"""Runs that are gone on with and graded again after their starting states went, or became other ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.faults.rolling import Acting, Forked, a_task, solve

from worldfork.core.errors import ConfigError
from worldfork.core.recent import Recent
from worldfork.keeping.sealing import seal_all
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.place import place
from worldfork.lineage.snapshots import SnapshotInfo
from worldfork.records.episode import Episode, FailureKind
from worldfork.rollout import contents
from worldfork.rollout.group import run_group
from worldfork.rollout.regrading import regrade
from worldfork.rollout.stored import StoredRun
from worldfork.worlds.world import async_world

pytestmark = [
    pytest.mark.filterwarnings("ignore:no cgroup of this host:RuntimeWarning"),
    pytest.mark.usefixtures("fresh_home"),
]


async def a_world(holds: str = "one", key: str = "tests-standing") -> SnapshotInfo:
    async def build(sandbox: AsyncSandbox) -> None:
        await sandbox.make_directory("/workspace/__pycache__")
        await sandbox.write_file("/workspace/held.txt", holds)
        # As compiled Python, which is another one after each build.
        await sandbox.sh("cat /proc/sys/kernel/random/uuid > __pycache__/held.pyc", check=True)

    return await async_world(key, build=build, network="none")


async def rolled(run: Path, n: int, world: SnapshotInfo) -> list[Episode]:
    found = await run_group(a_task(), Acting(solve), n, run=run, world=world, verifier=Forked())
    return list(found.episodes)


async def graded_again(run: Path, world: SnapshotInfo) -> list[Episode]:
    class Again(Forked):
        verifier_id = "again"

    return [each.after for each in await regrade(StoredRun(run), verifier=Again(), world=world)]


async def forget(*snapshot_ids: str | None) -> None:
    for snapshot_id in snapshot_ids:
        await AsyncSandbox.delete_snapshot(str(snapshot_id))


def in_one_loop(act: Any) -> None:
    asyncio.run(act())


def test_what_was_built_again_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        world = await a_world()
        (first,) = await rolled(tmp_path, 1, world)
        # A state is the same whether its layers are sealed or read anew.
        store = place().store
        assert seal_all(store).sealed
        monkeypatch.setattr(contents, "_LAYERS", Recent(1))
        assert contents.content_of(store, str(first.snapshot_id)) == first.start_content
        await forget(first.snapshot_id, world.snapshot_id)
        world = await a_world()
        before, second = await rolled(tmp_path, 2, world)
        assert (before, second.reward) == (first, 1.0)
        assert second.snapshot_id != first.snapshot_id
        assert second.start_content == first.start_content is not None
        assert [each.reward for each in await graded_again(tmp_path, world)] == [1.0, 1.0]

    in_one_loop(act)


def test_no_rollout_waits_for_a_large_layer_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a start holds is told once upkeep has sealed it."""

    async def act() -> None:
        monkeypatch.setattr(contents, "_QUICK_ENTRIES", 0)
        monkeypatch.setattr(contents, "_LAYERS", Recent(1 << 20))
        world = await a_world("three", "tests-standing-large")
        (first,) = await rolled(tmp_path, 1, world)
        assert first.start_content is None
        store = place().store
        assert contents.content_of(store, str(first.snapshot_id)) is not None
        monkeypatch.setattr(contents, "_LAYERS", Recent(1 << 20))
        seal_all(store)
        second = (await rolled(tmp_path, 2, world))[1]
        assert second.start_content == contents.content_of(store, str(first.snapshot_id))

    in_one_loop(act)


def test_another_start_is_not_mixed_in(tmp_path: Path) -> None:
    async def act() -> None:
        world = await a_world()
        (first,) = await rolled(tmp_path, 1, world)
        other = await a_world("two", "tests-standing-other")
        second = (await rolled(tmp_path, 2, other))[1]
        assert second.snapshot_id == first.snapshot_id
        await forget(first.snapshot_id, world.snapshot_id)
        with pytest.raises(ConfigError, match=f"{first.snapshot_id}.*does not hold the same"):
            await rolled(tmp_path, 3, other)
        failures = [each.failure for each in await graded_again(tmp_path, other)]
        assert [each.kind if each else None for each in failures] == [FailureKind.START] * 2
        assert len(StoredRun(tmp_path).episodes) == 2

    in_one_loop(act)
