"""Who calls a run, from which thread, and what that may do meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rollout.acting import Acting, Starts, Verifier, a_task
from tests.unit.rollout.grouping import States, boxes, by_index, deleting, roll

from worldfork.core.errors import ConfigError
from worldfork.lineage.door import through
from worldfork.records.episode import Episode, FailureKind
from worldfork.rollout import synchronous
from worldfork.rollout.group import stream_rollouts
from worldfork.rollout.journal import Journal
from worldfork.rollout.report import figures_of
from worldfork.rollout.stopping import StopRule
from worldfork.rollout.stored import StoredRun

__all__ = ["deleting"]

pytestmark = pytest.mark.usefixtures("deleting")

PLENTY_S = 30.0


def options() -> dict[str, Any]:
    return {"starts": Starts(boxes()), "verifier": Verifier(), "n": 3}


def bounded(work: Any) -> list[Any]:
    """Return what a function returns or raises; fails where it hangs."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(PLENTY_S)
    assert not caller.is_alive()
    return [*found, caller]


def test_what_is_told_to_a_synchronous_caller_is_told_in_its_thread_and_may_make_calls_itself() -> None:
    told: list[tuple[threading.Thread, int]] = []

    def tell(episode: Episode) -> None:
        told.append((threading.current_thread(), through(asyncio.sleep, 0, episode.index)))

    episodes, caller = bounded(lambda: synchronous.run_rollouts([a_task()], Acting(), on_episode=tell, **options()))
    assert [each.index for each in episodes] == [0, 1, 2]
    assert sorted(index for _, index in told) == [0, 1, 2]
    assert {thread for thread, _ in told} == {caller}


def test_what_a_synchronous_caller_raises_ends_its_run() -> None:
    def tell(episode: Episode) -> None:
        raise RuntimeError("enough")

    error, _ = bounded(lambda: synchronous.run_group(a_task(), Acting(), on_episode=tell, **options()))
    assert isinstance(error, RuntimeError)


def test_an_asynchronous_policy_that_calls_synchronously_is_told_so() -> None:
    async def call(sandbox: Any, turn: Any) -> None:
        through(asyncio.sleep, 0)

    episodes, _ = bounded(lambda: synchronous.run_rollouts([a_task()], Acting(call), **options()))
    for episode in episodes:
        assert episode.failure.kind is FailureKind.POLICY
        assert episode.failure.code == ConfigError.code
        assert "would wait for itself" in episode.failure.message


def test_a_stream_that_is_cancelled_twice_leaves_nothing_running(deleting: States) -> None:
    start, acting, leaving = boxes(), asyncio.Event(), asyncio.Event()

    async def wait(sandbox: Any, turn: Any) -> None:
        acting.set()
        try:
            await asyncio.sleep(60)
        finally:
            leaving.set()
            await asyncio.sleep(0.1)

    async def look() -> None:
        stream = stream_rollouts([a_task()], Acting(wait), starts=Starts(start), verifier=Verifier())
        reading = asyncio.ensure_future(anext(stream))  # type: ignore[arg-type]
        await acting.wait()
        reading.cancel()
        await leaving.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert start.ended == start.begun == 1

    asyncio.run(look())


def test_a_run_that_goes_on_reads_no_more_than_what_was_added_and_holds_up_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer adds to one run in call after call."""
    read, threads, from_json, opening = list[int](), list[threading.Thread](), Episode.from_json, Journal.open

    def count(data: Mapping[str, Any]) -> Episode:
        read.append(data["index"])
        return from_json(data)

    def look(*arguments: Any, **options: Any) -> Journal:
        threads.append(threading.current_thread())
        return opening(*arguments, **options)

    roll(n=6, run=tmp_path)
    monkeypatch.setattr(Episode, "from_json", count)
    monkeypatch.setattr(Journal, "open", look)
    for number in range(3):
        assert len(roll(n=1, tasks=[a_task(task_id=f"played/{number}")], run=tmp_path)) == 1
    assert read == []
    assert len(roll(n=4, run=tmp_path)) == 4
    assert read == [0, 1, 2, 3]
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("slow", [(0, 1), (2, 3), ()])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_what_a_report_tells_does_not_depend_on_speed(tmp_path: Path, concurrency: int, slow: tuple[int, ...]) -> None:
    async def wait(sandbox: Any, turn: Any) -> None:
        await asyncio.sleep(0.1 if turn.index in slow else 0.0)

    rewards, told = by_index(0.0, 1.0, 1.0, 1.0, 0.0, 0.0), list[Episode]()
    rule = StopRule(successes=1)
    roll(Acting(wait), 6, verifier=rewards, run=tmp_path, stop=rule, concurrency=concurrency, on_episode=told.append)
    stored = StoredRun(tmp_path)
    found = figures_of(stored)
    assert [each.reward for each in stored.groups[0].episodes] == [0.0, 1.0, None, None, None, None]
    assert (found.episodes_n, found.stops, found.pass_at) == (6, (("enough", 4),), ())
    assert {each.index for each in told} == set(range(6))


def test_what_a_run_refuses_is_in_it(tmp_path: Path) -> None:
    async def wait(sandbox: Any, turn: Any) -> None:
        await asyncio.sleep(60)

    written: list[int] = []

    def tell(episode: Episode) -> None:
        written.append((tmp_path / "episodes.jsonl").read_bytes().count(b"\n") - 1)

    roll(Acting(wait), 700, run=tmp_path, concurrency=2, deadline_s=0.2, on_episode=tell)
    assert figures_of(StoredRun(tmp_path)).stops == (("deadline", 700),)
    # Each is on disk before it is told, and what is told together is written together.
    assert [place for place, count in enumerate(written) if count <= place] == []
    assert len(set(written)) < 10
