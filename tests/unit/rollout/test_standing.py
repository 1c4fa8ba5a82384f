"""Runs that are gone on with and graded again: from which starting states."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rollout.acting import Acting, Box, Start, a_task
from tests.unit.rollout.grouping import by_index, deleting, roll

from worldfork.core.errors import ConfigError, FormatUnsupported, NotFound
from worldfork.records.episode import Episode, FailureKind
from worldfork.records.task import Task
from worldfork.rollout import regrading
from worldfork.rollout.regrading import regrade
from worldfork.rollout.stored import StoredRun

__all__ = ["deleting"]

pytestmark = pytest.mark.usefixtures("deleting")


class Held(Start):
    """A starting state that tells what it holds."""

    def __init__(self, snapshot_id: str, holds: str | None = None) -> None:
        super().__init__(lambda index: Box(f"sb-{index}"))
        self.snapshot_id = snapshot_id  # type: ignore[misc]
        self.holds = holds

    def content(self, *, quick: bool = False) -> str | None:
        return self.holds


class Home:
    """The states that are there, and what the task has by now."""

    def __init__(self, now: Held | Exception, *there: Held, why: type[Exception] = NotFound) -> None:
        self.now = now
        self.there = {each.snapshot_id: each for each in (*there, *([now] if isinstance(now, Held) else []))}
        self.why = why
        self.asked = 0

    async def get(self, task: Task) -> Any:
        self.asked += 1
        if isinstance(self.now, Exception):
            raise self.now
        return self.now

    async def at(self, snapshot_id: str, task: Task) -> Any:
        if snapshot_id not in self.there:
            raise self.why(snapshot_id)
        return self.there[snapshot_id]


def stood_on(episodes: list[Episode]) -> list[str | None]:
    return [each.snapshot_id for each in episodes]


def test_a_run_goes_on_from_where_it_began(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = Held("sn-old", "one"), Held("sn-new", "two")
    roll(n=1, run=tmp_path, starts=Home(old))
    with caplog.at_level(logging.WARNING, "worldfork"):
        episodes = roll(n=3, run=tmp_path, starts=Home(new, old))
    assert stood_on(episodes) == ["sn-old"] * 3
    assert new.begun == 0
    assert "sn-new" in caplog.text


def test_a_run_goes_on_from_where_it_began_though_nothing_could_be_made_now(tmp_path: Path) -> None:
    old = Held("sn-old")
    roll(n=1, run=tmp_path, starts=Home(old))
    assert stood_on(roll(n=2, run=tmp_path, starts=Home(ConfigError("no such branch"), old))) == ["sn-old"] * 2


@pytest.mark.parametrize(("before", "now"), [("one", "two"), (None, "one"), ("one", None), (None, None)])
@pytest.mark.parametrize("why", [NotFound, FormatUnsupported])
def test_a_run_whose_start_is_gone_goes_on_from_no_other(
    before: str | None, now: str | None, why: type[Exception], tmp_path: Path
) -> None:
    roll(n=1, run=tmp_path, starts=Home(Held("sn-old", before)))
    stored, new = (tmp_path / "episodes.jsonl").read_bytes(), Held("sn-new", now)
    with pytest.raises(ConfigError) as caught:
        roll(n=2, run=tmp_path, starts=Home(new, why=why))
    for named in (a_task().task_id, "sn-old", "sn-new"):
        assert named in str(caught.value)
    assert "--run" in str(caught.value.remedy)
    assert new.begun == 0
    assert (tmp_path / "episodes.jsonl").read_bytes() == stored


def test_a_run_whose_start_was_built_again_goes_on(tmp_path: Path) -> None:
    roll(n=1, run=tmp_path, starts=Home(Held("sn-old", "one")))
    assert stood_on(roll(n=2, run=tmp_path, starts=Home(Held("sn-new", "one")))) == ["sn-old", "sn-new"]
    # It stands on both by now, and on neither of them next.
    assert stood_on(roll(n=3, run=tmp_path, starts=Home(Held("sn-third", "one"))))[2] == "sn-third"
    with pytest.raises(ConfigError):
        roll(n=4, run=tmp_path, starts=Home(Held("sn-fourth", "two")))


def test_other_policies_and_longer_groups_stand_on_it_too(tmp_path: Path) -> None:
    roll(n=4, run=tmp_path, starts=Home(Held("sn-old")))
    with pytest.raises(ConfigError):
        roll(Acting(policy_id="other"), n=1, run=tmp_path, starts=Home(Held("sn-new")))


def test_a_finished_run_needs_no_start(tmp_path: Path) -> None:
    first = roll(n=2, run=tmp_path, starts=Home(Held("sn-old")))
    home = Home(Held("sn-new"))
    assert roll(n=2, run=tmp_path, starts=home) == first
    assert home.asked == 0


def test_where_no_start_can_be_had_each_rollout_tells_why(tmp_path: Path) -> None:
    roll(n=1, run=tmp_path, starts=Home(Held("sn-old")))
    episodes = roll(n=2, run=tmp_path, starts=Home(ConfigError("no such branch")))
    assert episodes[0].reward == 0.5
    assert episodes[1].failure is not None
    assert (episodes[1].failure.kind, episodes[1].failure.message) == (FailureKind.START, "no such branch")


def again(run: Path, home: Home, monkeypatch: pytest.MonkeyPatch, reward: float = 0.25) -> list[Episode]:
    class Opened:
        @staticmethod
        async def open(world: object) -> Home:
            return home

    monkeypatch.setattr(regrading, "StartingStates", Opened)
    verifier = by_index(reward, reward)
    verifier.verifier_id = f"again-{reward}"
    return [each.after for each in asyncio.run(regrade(StoredRun(run), verifier=verifier))]


@pytest.mark.parametrize(
    ("home", "stands_on"),
    [
        (Home(Held("sn-new", "two"), Held("sn-old", "one")), "sn-old"),
        (Home(ConfigError("no such branch"), Held("sn-old", "one")), "sn-old"),
        (Home(Held("sn-new", "one")), "sn-new"),
    ],
)
def test_what_was_left_is_graded_by_the_start_that_it_stood_on(
    home: Home, stands_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll(n=2, run=tmp_path, starts=Home(Held("sn-old", "one")))
    episodes = again(tmp_path, home, monkeypatch)
    assert [(each.reward, each.snapshot_id) for each in episodes] == [(0.25, stands_on)] * 2


@pytest.mark.parametrize(("before", "now"), [("one", "two"), (None, "one"), ("one", None), (None, None)])
def test_where_that_is_gone_there_is_no_reward(
    before: str | None, now: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll(n=2, run=tmp_path, starts=Home(Held("sn-old", before)))
    for episode in again(tmp_path, Home(Held("sn-new", now)), monkeypatch):
        assert episode.failure is not None
        assert (episode.failure.kind, episode.failure.code) == (FailureKind.START, "not_found")
        assert "sn-old" in episode.failure.message
    # A failure is not for ever: the state may be brought back.
    found = again(tmp_path, Home(Held("sn-new", now), Held("sn-old", before)), monkeypatch)
    assert [each.reward for each in found] == [0.25, 0.25]
