from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rollout.acting import GRADE, Acting, Box, Start, Starts, Verifier, a_task
from tests.unit.rollout.grouping import States, boxes, by_index, deleting, kinds, roll

from worldfork.core.errors import ConfigError, LaunchFailed, PolicyError, VerifierError
from worldfork.records.episode import Episode, FailureKind
from worldfork.reward.advantages import grpo
from worldfork.reward.verifier import Case, Grade
from worldfork.rollout import group, synchronous
from worldfork.rollout.faults import FaultRules
from worldfork.rollout.group import Group, run_group, run_rollouts, stream_rollouts
from worldfork.rollout.journal import Journal, read_journal
from worldfork.rollout.stopping import StopRule
from worldfork.rollout.stored import StoredRun

__all__ = ["deleting"]

pytestmark = pytest.mark.usefixtures("deleting")


def test_episodes_come_by_index_whatever_order_they_end_in() -> None:
    order: list[int] = []

    async def wait(sandbox: Any, turn: Any) -> None:
        await asyncio.sleep(0.01 * (4 - turn.index))

    rewards = (0.1, 0.2, 0.3, 0.4)
    episodes = roll(
        Acting(wait), concurrency=4, verifier=by_index(*rewards), on_episode=lambda each: order.append(each.index)
    )
    assert [each.reward for each in episodes] == list(rewards)
    assert order == [3, 2, 1, 0]
    assert len({each.group_id for each in episodes}) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"n": 0}, {"concurrency": 0}, {"concurrency": 5000}, {"seeds": "same"}, {"keep": "last"}, {"deadline_s": 0.0},
        {"tasks": [a_task(), a_task()]}, {"policy": 5}, {"score": lambda case: 1.0},
    ],
)  # fmt: skip
def test_bad_arguments_start_nothing(options: dict[str, Any]) -> None:
    start = boxes()
    with pytest.raises(ConfigError):
        roll(**{"starts": Starts(start), **options})
    assert start.begun == 0


def test_no_tasks_no_episodes() -> None:
    assert asyncio.run(run_rollouts([], Acting())) == []


def test_a_group_compares_its_episodes() -> None:
    async def fail_third(sandbox: Any, turn: Any) -> None:
        if turn.index == 2:
            raise PolicyError("no model")

    found = asyncio.run(
        run_group(a_task(), Acting(fail_third), 4, starts=Starts(boxes()), verifier=by_index(0.0, 1.0, 1.0, 0.5))
    )
    assert isinstance(found, Group)
    assert found.rewards == [0.0, 1.0, None, 0.5]
    assert found.valid == [True, True, False, True]
    assert found.advantages == [-0.5, 0.5, None, 0.0]
    assert found.advantages_by(grpo)[3] == 0.0
    assert found.best is not None
    assert found.best.index == 1


def test_seeds() -> None:
    def seeds(**options: Any) -> list[int | None]:
        return [each.seed for each in roll(Acting(PolicyError("ends at once")), **options)]

    class Seeded(Start):
        def fork(self, index: int = 0, *, seed: int | None = None, **_: Any) -> Any:
            self.make = lambda index: _with_seed(Box(), seed)
            return super().fork(index, seed=seed)

    def given(**options: Any) -> list[int | None]:
        return seeds(starts=Starts(Seeded()), concurrency=1, **options)

    derived, common = given(), given(seeds="common")
    assert given() == derived
    assert len(set(derived)) == 4
    assert len(set(common)) == 1
    assert given(seed=5) == given(seed=5) != derived
    assert given(seeds="common", seed=5) != common
    assert given(seeds="independent") != given(seeds="independent")


def _with_seed(box: Box, seed: int | None) -> Box:
    box.seed = seed or 0  # type: ignore[misc]
    return box


def test_one_that_breaks_does_not_touch_its_siblings() -> None:
    async def first_breaks(sandbox: Any, turn: Any) -> None:
        if turn.index == 0:
            raise RuntimeError("defect")

    episodes = roll(Acting(first_breaks), n=8, concurrency=8)
    assert kinds(episodes) == ["RuntimeError"] + [None] * 7
    assert episodes[0].failure is not None
    assert episodes[0].failure.message == "defect"


def test_a_fault_of_ours_is_tried_again_and_counted() -> None:
    failures = iter([LaunchFailed("no"), LaunchFailed("no")])

    def make(index: int) -> Box:
        error = next(failures, None)
        if error is not None:
            raise error
        return Box()

    start = Start(make)
    episodes = roll(n=2, concurrency=1, starts=Starts(start))
    assert [(each.attempt, each.faults, each.reward) for each in episodes] == [
        (3, ("fork", "fork"), 0.5),
        (1, (), 0.5),
    ]
    assert (start.begun, start.ended) == (2, 2)


def test_a_grading_that_breaks_is_tried_again_without_another_turn() -> None:
    verifier, start = Verifier(), boxes()
    seen: list[str] = []

    def give(case: Case) -> Grade:
        seen.append(case.key)
        if len(seen) == 1:
            raise VerifierError("late", kind=FailureKind.OVERLOAD)
        return GRADE

    verifier.give = give
    episode = roll(n=1, verifier=verifier, starts=Starts(start))[0]
    assert (episode.reward, episode.attempt, episode.faults) == (0.5, 1, ("overload",))
    # To an outside verifier it is the same act of grading.
    assert len(seen) == 2
    assert len(set(seen)) == 1
    assert start.begun == 1


def test_a_grading_that_stays_broken_costs_one_turn() -> None:
    start, verifier = boxes(), Verifier(VerifierError("late", kind=FailureKind.OVERLOAD))
    episode = roll(n=1, verifier=verifier, starts=Starts(start))[0]
    assert kinds([episode]) == ["verifier"]
    assert episode.edits is not None
    assert (len(verifier.cases), start.begun) == (3, 1)


def test_what_would_only_happen_again_is_not_tried_again() -> None:
    starts = Starts(VerifierError("broken", kind=FailureKind.BUILD))
    episodes = roll(n=6, concurrency=1, starts=starts)
    assert kinds(episodes) == ["verifier"] * 3 + ["repeated_fault"] * 3
    assert {each.attempt for each in episodes} == {1}


def test_an_outage_opens_the_breaker() -> None:
    start = Start(_never)
    tasks = [a_task(task_id=f"played/{number}") for number in range(20)]
    rules = FaultRules(pause_s=0.0, breaker=7)
    episodes = roll(n=2, tasks=tasks, concurrency=1, starts=Starts(start), rules=rules)
    assert kinds(episodes).count("too_many_faults") == len(episodes) - 3
    assert all(each.reward is None for each in episodes)


def _never(index: int) -> Box:
    raise LaunchFailed("out of order")


def test_a_stop_rule_cuts_by_index_and_settles_the_rest() -> None:
    start = boxes()

    async def wait(sandbox: Any, turn: Any) -> None:
        await asyncio.sleep(60 if turn.index > 2 else 0.01 * (3 - turn.index))

    episodes = roll(
        Acting(wait),
        n=6,
        concurrency=6,
        starts=Starts(start),
        verifier=by_index(0.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        stop=StopRule(successes=1),
    )
    assert kinds(episodes) == [None, None, "enough", "enough", "enough", "enough"]
    assert [each.reward for each in episodes] == [0.0, 1.0, None, None, None, None]
    assert start.begun == start.ended == 6


def test_what_ended_behind_the_cut_counts_nowhere(tmp_path: Path, deleting: States) -> None:
    async def last_is_first(sandbox: Any, turn: Any) -> None:
        await asyncio.sleep(0.05 if turn.index < 2 else 0)

    rewards = by_index(0.0, 1.0, 1.0)
    episodes = roll(
        Acting(last_is_first),
        n=3,
        concurrency=3,
        verifier=rewards,
        stop=StopRule(successes=1),
        run=tmp_path,
        keep="all",
    )
    assert kinds(episodes) == [None, None, "enough"]
    assert sorted(StoredRun(tmp_path).episodes, key=lambda each: each.index) == episodes
    assert deleting.gone == ["sn-sb-2"]


def test_a_deadline_ends_what_still_runs() -> None:
    start = boxes()

    async def wait(sandbox: Any, turn: Any) -> None:
        await asyncio.sleep(60 if turn.index else 0)

    episodes = roll(Acting(wait), n=5, concurrency=2, starts=Starts(start), deadline_s=0.2)
    assert kinds(episodes) == [None, "deadline", "deadline", "deadline", "deadline"]
    assert start.begun == start.ended == 3


def test_cancellation_settles_all_and_keeps_what_ended(tmp_path: Path) -> None:
    start = boxes()
    ended = asyncio.Event()

    async def wait(sandbox: Any, turn: Any) -> None:
        await asyncio.sleep(60 if turn.index else 0)

    async def cancel() -> None:
        with Journal.open(tmp_path / "episodes.jsonl") as journal:
            rolling = asyncio.ensure_future(
                run_rollouts(
                    [a_task()],
                    Acting(wait),
                    n=4,
                    concurrency=4,
                    starts=Starts(start),
                    verifier=Verifier(),
                    journal=journal,
                    on_episode=lambda _: ended.set(),
                )
            )
            await ended.wait()
            rolling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await rolling

    asyncio.run(cancel())
    assert start.begun == start.ended == 4
    assert [each.index for each in read_journal(tmp_path / "episodes.jsonl")] == [0]


def test_a_stream_yields_as_they_end_and_may_be_left() -> None:
    start = boxes()

    async def wait(sandbox: Any, turn: Any) -> None:
        await asyncio.sleep((0.05, 0.0, 60, 60)[turn.index])

    async def look() -> list[int]:
        seen: list[int] = []
        stream = stream_rollouts(
            [a_task()], Acting(wait), n=4, concurrency=4, starts=Starts(start), verifier=Verifier()
        )
        async for episode in stream:
            seen.append(episode.index)
            if len(seen) == 2:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return seen

    assert asyncio.run(look()) == [1, 0]
    assert start.begun == start.ended == 4


def test_a_whole_stream_ends() -> None:
    async def look() -> list[int]:
        stream = stream_rollouts([a_task()], Acting(), n=3, starts=Starts(boxes()), verifier=Verifier())
        return [episode.index async for episode in stream]

    assert sorted(asyncio.run(look())) == [0, 1, 2]


def test_what_a_stream_meets_passes() -> None:
    async def look() -> None:
        async for _ in stream_rollouts([a_task()], Acting(), n=0):
            pass

    with pytest.raises(ConfigError):
        asyncio.run(look())


def test_no_more_are_graded_at_a_time_than_there_are_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "cpus", lambda: 2)
    at_once, most = 0, 0

    class Slow(Verifier):
        async def grade(self, case: Case) -> Grade:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.01)
            at_once -= 1
            return GRADE

    roll(n=8, concurrency=8, verifier=Slow())
    assert most == 2


def test_concurrency_follows_processors_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "cpus", lambda: 8)
    for available_mb, width in ((64_000, 8), (3_500, 3), (10, 1)):
        monkeypatch.setattr(group, "_available_bytes", lambda size=available_mb: size << 20)
        assert group._natural_width([a_task()]) == width


def test_a_run_is_gone_on_with(tmp_path: Path) -> None:
    start = boxes()
    broken = True

    async def second_breaks(sandbox: Any, turn: Any) -> None:
        if turn.index == 1 and broken:
            raise PolicyError("no model")

    rolls: Callable[[], list[Episode]] = lambda: roll(  # noqa: E731
        Acting(second_breaks), n=3, starts=Starts(start), run=tmp_path
    )
    first = rolls()
    assert kinds(first) == [None, "policy", None]
    broken = False
    second = rolls()
    assert kinds(second) == [None, None, None]
    assert [second[0], second[2]] == [first[0], first[2]]
    assert start.begun == 4
    assert rolls() == second
    stored = StoredRun(tmp_path)
    assert len(stored.episodes) == 3
    for episode in stored.episodes:
        edits = stored.edits(episode)
        assert edits is not None
        assert edits.files["a.py"].content == f"sb-{episode.index}".encode()


def test_a_resumed_group_is_cut_where_the_first_would_have_been(tmp_path: Path) -> None:
    rewards = by_index(0.0, 1.0, 1.0, 1.0)
    roll(n=2, verifier=rewards, run=tmp_path)
    start = boxes()
    episodes = roll(n=4, verifier=rewards, run=tmp_path, starts=Starts(start), stop=StopRule(successes=1))
    assert kinds(episodes) == [None, None, "enough", "enough"]
    assert start.begun == 0


@pytest.mark.parametrize("keep", [None, "best", "all"])
def test_what_a_killed_call_finished_behind_the_cut_counts_nowhere(
    keep: str | None, tmp_path: Path, deleting: States
) -> None:
    rewards = by_index(0.0, 1.0, 1.0, 1.0)
    # As where the process was killed before it brought its books into order.
    roll(n=4, verifier=rewards, run=tmp_path, keep="all")
    again = roll(n=4, verifier=rewards, run=tmp_path, keep=keep, stop=StopRule(successes=1))
    assert kinds(again) == [None, None, "enough", "enough"]
    assert sorted(StoredRun(tmp_path).episodes, key=lambda each: each.index) == again
    # They were taken over first: killed once more, they go with the next rollout of the home.
    assert {"sn-sb-2", "sn-sb-3"} <= set(deleting.taken_over)
    assert sorted(deleting.gone) == [*(["sn-sb-0"] if keep == "best" else []), "sn-sb-2", "sn-sb-3"]


def test_a_cut_that_only_a_second_call_shows_takes_back_what_the_first_finished(
    tmp_path: Path, deleting: States
) -> None:
    broken = True

    async def first_breaks(sandbox: Any, turn: Any) -> None:
        if turn.index == 0 and broken:
            raise PolicyError("no model")

    rolls: Callable[..., list[Episode]] = lambda **options: roll(  # noqa: E731
        Acting(first_breaks), n=3, verifier=by_index(1.0, 0.0, 0.0), run=tmp_path, keep="all", **options
    )
    rolls()
    broken = False
    again = rolls(stop=StopRule(successes=1))
    assert kinds(again) == [None, "enough", "enough"]
    assert sorted(StoredRun(tmp_path).episodes, key=lambda each: each.index) == again
    assert sorted(deleting.gone) == ["sn-sb-1", "sn-sb-2"]


def test_a_run_is_not_gone_on_with_by_another_verifier(tmp_path: Path) -> None:
    roll(n=1, run=tmp_path)
    other = Verifier()
    other.verifier_id = "other"
    with pytest.raises(ConfigError, match="graded by played, not by other"):
        roll(n=2, run=tmp_path, verifier=other)


def test_nothing_is_told_that_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Journal, episodes: Any) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(Journal, "append", full)
    told: list[Episode] = []
    with pytest.raises(OSError, match="no space left"):
        roll(n=8, concurrency=8, run=tmp_path, on_episode=told.append)
    assert told == []


def test_a_journal_that_cannot_be_written_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Journal, episodes: Any) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(OSError, match="no space left"):
        roll(n=8, concurrency=1, run=tmp_path)


def test_synchronous_callers_have_the_same() -> None:
    options: dict[str, Any] = {"starts": Starts(boxes()), "verifier": Verifier(), "n": 2}
    assert [each.reward for each in synchronous.run_rollouts([a_task()], Acting(), **options)] == [0.5, 0.5]
    assert sorted(each.index for each in synchronous.stream_rollouts([a_task()], Acting(), **options)) == [0, 1]
    assert synchronous.run_group(a_task(), Acting(), options.pop("n"), **options).rewards == [0.5, 0.5]
