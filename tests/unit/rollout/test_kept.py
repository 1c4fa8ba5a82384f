from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rollout.acting import GRADE, Acting, Box, Start, Starts, Verifier, a_task
from tests.unit.rollout.grouping import States, boxes, by_index, deleting, kinds, roll

from worldfork.records.task_limits import TaskLimits
from worldfork.reward.verifier import Case, Grade
from worldfork.rollout.group import run_rollouts
from worldfork.rollout.journal import read_journal
from worldfork.rollout.stopping import StopRule
from worldfork.rollout.stored import StoredRun

__all__ = ["deleting"]

pytestmark = pytest.mark.usefixtures("deleting")


@pytest.mark.parametrize("order", [(0.0, 0.02, 0.04), (0.04, 0.02, 0.0)])
def test_the_best_final_state_of_a_group_is_kept(order: tuple[float, ...], tmp_path: Path, deleting: States) -> None:
    async def wait(sandbox: Any, turn: Any) -> None:
        await asyncio.sleep(order[turn.index])

    episodes = roll(Acting(wait), n=3, concurrency=3, verifier=by_index(0.5, 1.0, 1.0), keep="best", run=tmp_path)
    assert [each.final_snapshot_id for each in episodes] == [None, "sn-sb-1", None]
    assert sorted(deleting.gone) == ["sn-sb-0", "sn-sb-2"]
    assert sorted(StoredRun(tmp_path).episodes, key=lambda each: each.index) == episodes


def test_all_final_states_are_kept_where_that_is_asked(deleting: States) -> None:
    assert [each.final_snapshot_id for each in roll(n=2, keep="all")] == ["sn-sb-0", "sn-sb-1"]
    assert deleting.gone == []
    assert sorted(deleting.settled) == ["sn-sb-0", "sn-sb-1"]


@pytest.mark.parametrize("keep", ["best", "all"])
def test_a_state_that_the_journal_names_is_there_whenever_the_process_dies(
    keep: str, tmp_path: Path, deleting: States
) -> None:
    named: list[tuple[str, str, bool]] = []

    def watch(what: str, snapshot_id: str) -> None:
        names = {each.final_snapshot_id for each in read_journal(tmp_path / "episodes.jsonl")}
        named.append((what, snapshot_id, snapshot_id in names))

    deleting.watch = watch
    rewards = by_index(0.2, 0.5, 0.1, 1.0, 1.0, 0.3)

    async def last_are_first(sandbox: Any, turn: Any) -> None:
        await asyncio.sleep(0.05 + 0.04 * turn.index if turn.index < 4 else 0)

    options: dict[str, Any] = {"keep": keep, "run": tmp_path, "stop": StopRule(successes=1)}
    roll(Acting(last_are_first), n=6, concurrency=6, verifier=rewards, **options)
    # On disk before it is named; named no more before it is deleted; settled only while it is named.
    assert {(what, known) for what, _, known in named} == {("lasting", False), ("delete", False), ("settle", True)}
    left = {each.final_snapshot_id for each in StoredRun(tmp_path).episodes} - {None}
    assert left == set(deleting.settled) == ({"sn-sb-3"} if keep == "best" else {f"sn-sb-{n}" for n in range(4)})
    assert left.isdisjoint(deleting.gone)


def test_the_best_is_chosen_among_those_that_count(tmp_path: Path, deleting: States) -> None:
    async def last_is_first(sandbox: Any, turn: Any) -> None:
        await asyncio.sleep((0.1, 0.2, 0.0)[turn.index])

    # The best one ends first, and lies behind the cut that the second makes.
    episodes = roll(
        Acting(last_is_first),
        n=3,
        concurrency=3,
        verifier=by_index(0.1, 0.5, 1.0),
        keep="best",
        run=tmp_path,
        stop=StopRule(target_reward=0.5),
    )
    assert kinds(episodes) == [None, None, "enough"]
    assert [each.final_snapshot_id for each in episodes] == [None, "sn-sb-1", None]
    assert sorted(deleting.gone) == ["sn-sb-0", "sn-sb-2"]
    assert sorted(StoredRun(tmp_path).episodes, key=lambda each: each.index) == episodes


def test_a_state_that_does_not_reach_the_disk_is_not_named(tmp_path: Path, deleting: States) -> None:
    deleting.not_lasting = {"sn-sb-0"}
    episodes = roll(n=2, keep="all", run=tmp_path)
    assert [(each.reward, each.final_snapshot_id) for each in episodes] == [(0.5, None), (0.5, "sn-sb-1")]
    assert deleting.gone == ["sn-sb-0"]


def test_of_what_a_killed_process_kept_the_best_stays(tmp_path: Path, deleting: States) -> None:
    roll(n=3, keep="all", verifier=by_index(0.1, 1.0, 0.5), run=tmp_path)
    episodes = roll(n=4, keep="best", verifier=by_index(0.1, 1.0, 0.5, 0.2), run=tmp_path)
    assert deleting.taken_over == ["sn-sb-0", "sn-sb-1", "sn-sb-2"]
    assert sorted(deleting.gone) == ["sn-sb-0", "sn-sb-2", "sn-sb-3"]
    assert [each.final_snapshot_id for each in episodes] == [None, "sn-sb-1", None, None]
    assert sorted(StoredRun(tmp_path).episodes, key=lambda each: each.index) == episodes


@pytest.mark.parametrize("told", [True, False])
def test_without_a_journal_states_stay_only_where_somebody_knows_of_them(told: bool, deleting: States) -> None:
    ended = asyncio.Event()

    async def wait(sandbox: Any, turn: Any) -> None:
        await asyncio.sleep(60 if turn.index else 0)

    async def grade(case: Case) -> Grade:
        ended.set()
        return GRADE

    async def cancel() -> None:
        options: dict[str, Any] = {"on_episode": lambda _: ended.set()} if told else {}
        verifier = Verifier()
        if not told:
            verifier.grade = grade  # type: ignore[method-assign]
        rolling = asyncio.ensure_future(
            run_rollouts(
                [a_task()], Acting(wait), n=2, starts=Starts(boxes()), verifier=verifier, keep="all", **options
            )
        )
        await ended.wait()
        await asyncio.sleep(0.05)
        rolling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rolling

    asyncio.run(cancel())
    assert (list(deleting.settled), deleting.gone) == ((["sn-sb-0"], []) if told else ([], ["sn-sb-0"]))


def test_what_is_slow_to_go_is_waited_for_at_the_end_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Start):
        @contextlib.asynccontextmanager
        async def fork(self, index: int = 0, **options: Any) -> AsyncIterator[Any]:
            async with super().fork(index, **options) as box:
                yield box
                await asyncio.sleep(0.3 if index == 0 else 0)
                gone.append(index)

    start, order, gone = Slow(lambda index: Box(f"sb-{index}")), list[tuple[int, int]](), list[int]()
    episodes = roll(
        n=2,
        tasks=[a_task(limits=TaskLimits(stop_wall_s=0.05))],
        concurrency=1,
        starts=Starts(start),
        on_episode=lambda each: order.append((each.index, len(gone))),
    )
    assert [each.reward for each in episodes] == [0.5, 0.5]
    # The first is told before its sandbox is gone; when the run is over, all are.
    assert order[0] == (0, 0)
    assert gone == [1, 0]
    assert "clearing away sb-0" in caplog.text
