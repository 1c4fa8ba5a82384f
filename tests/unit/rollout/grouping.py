"""Groups of played rollouts, and a store that notes what becomes of their final states."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rollout.acting import Acting, Box, Left, Start, Starts, Verifier, a_task

from worldfork.core.errors import StoreError
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.episode import Episode
from worldfork.records.task import Task
from worldfork.reward.verifier import Grade
from worldfork.rollout import attempt, crew, group, kept
from worldfork.rollout.faults import FaultRules
from worldfork.rollout.group import run_rollouts

QUICK = FaultRules(pause_s=0.0)


class States:
    """The store, as far as final states go, and what was in the journal when each of them went."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.settled: dict[str, str | None] = {}
        self.taken_over: list[str] = []
        self.not_lasting: set[str] = set()
        self.watch: Callable[[str, str], None] = lambda what, snapshot_id: None

    async def let_go(self, snapshot_ids: Sequence[str]) -> None:
        for snapshot_id in snapshot_ids:
            self.watch("delete", snapshot_id)
            self.gone.append(snapshot_id)

    async def settle(self, states: Mapping[str, str | None]) -> None:
        for snapshot_id in states:
            self.watch("settle", snapshot_id)
        self.settled.update(states)

    async def take_over(self, snapshot_ids: Iterable[str], book: Path | None) -> None:
        self.taken_over += snapshot_ids

    async def wait_lasting(self, snapshot_id: str) -> None:
        self.watch("lasting", snapshot_id)
        if snapshot_id in self.not_lasting:
            raise StoreError("the disk broke")


@pytest.fixture
def deleting(monkeypatch: pytest.MonkeyPatch) -> States:
    """No rollout of these tests has a real sandbox, and none asks for a home."""

    async def carry_out(sandbox: Any, task: Any, **_: Any) -> Left:
        return Left(Edits({"a.py": EditedFile(sandbox.sandbox_id.encode())}), f"sn-{sandbox.sandbox_id}")

    async def sweep_once(here: Any) -> None:
        return None

    found = States()
    monkeypatch.setattr(attempt, "carry_out", carry_out)
    monkeypatch.setattr(attempt, "end_label", lambda book: "end")
    monkeypatch.setattr(group, "sweep_once", sweep_once)
    monkeypatch.setattr(group, "place", lambda: None)
    monkeypatch.setattr(crew, "let_go", found.let_go)
    for name in ("let_go", "settle", "take_over", "wait_lasting"):
        monkeypatch.setattr(kept, name, getattr(found, name))
    return found


def boxes() -> Start:
    return Start(lambda index: Box(f"sb-{index}"))


def by_index(*rewards: float) -> Verifier:
    """Gives rollout i the i-th reward."""
    return Verifier(give=lambda case: Grade(rewards[case.index]))


def roll(policy: Any = None, n: int = 4, *, tasks: list[Task] | None = None, **options: Any) -> list[Episode]:
    settings: dict[str, Any] = {"starts": Starts(boxes()), "verifier": Verifier(), "rules": QUICK, **options}
    return asyncio.run(run_rollouts(tasks or [a_task()], policy or Acting(), n=n, **settings))


def kinds(episodes: list[Episode]) -> list[str | None]:
    return [each.failure.code if each.failure else None for each in episodes]
