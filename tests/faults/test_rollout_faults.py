"""Faults at every stage of rollouts, in groups of 8: not one is scored, siblings complete, nothing is left."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.faults.rolling import Acting, Forked, a_task, solve, states

from worldfork.core.errors import LaunchFailed, OutOfSpace, PathError, PolicyError, StoreError, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import Episode, FailureKind
from worldfork.reward.verifier import Case
from worldfork.rollout import attempt
from worldfork.rollout.faults import FaultRules
from worldfork.rollout.group import run_rollouts
from worldfork.store import faultpoints

pytestmark = pytest.mark.filterwarnings("ignore:no cgroup of this host:RuntimeWarning")

GROUP = 8
ONCE = FaultRules(retries={}, same_in_task=1000, breaker=1000)
AGAIN = FaultRules(pause_s=0.01, breaker=1000)

ERRORS: dict[str, Callable[[], Exception]] = {
    "launch": lambda: LaunchFailed("no"),
    "full": lambda: OSError(errno.ENOSPC, "no space left"),
    "reserve": lambda: OutOfSpace("the host is full", scope="host"),
    "io": lambda: PathError("broken", path="/x", errno=errno.EIO),
    "files": lambda: OSError(errno.EMFILE, "too many open files"),
    "store": lambda: StoreError("locked up"),
    "memory": MemoryError,
    "defect": lambda: KeyError("defect"),
    "policy": lambda: PolicyError("no model"),
    "verifier": lambda: VerifierError("odd", kind=FailureKind.GRADING),
}


def kill_init(sandbox: AsyncSandbox) -> None:
    """Kill a sandbox as the host's administrator would: its first process, from outside."""
    pid = sandbox._live._pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


class Plan:
    """Which rollout of a group meets which fault at which stage; each once."""

    def __init__(self, faults: dict[int, tuple[str, str]]) -> None:
        self.faults = dict(faults)
        self.met: set[int] = set()

    def due(self, index: int, stage: str) -> str | None:
        planned, what = self.faults.get(index, ("", ""))
        if planned != stage or index in self.met:
            return None
        self.met.add(index)
        return what

    def meet(self, index: int, stage: str, sandbox: AsyncSandbox | None) -> None:
        what = self.due(index, stage)
        if what == "kill" and sandbox is not None:
            kill_init(sandbox)
        elif what is not None:
            raise ERRORS[what]()


@pytest.fixture
def carrying(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Plan]]:
    """Lets the plan of the moment into the carrying, and into the start of forks."""
    current: dict[str, Plan] = {}
    carry_out = attempt.carry_out

    async def with_faults(sandbox: AsyncSandbox, *rest: Any, **options: Any) -> Any:
        current["plan"].meet(sandbox.fork_index, "carry", sandbox)
        return await carry_out(sandbox, *rest, **options)

    monkeypatch.setattr(attempt, "carry_out", with_faults)
    yield current
    faultpoints.install(None)


async def roll(starts: Any, plan: Plan, rules: FaultRules) -> list[Episode]:
    async def act(sandbox: AsyncSandbox, turn: Any) -> None:
        await solve(sandbox, turn)
        plan.meet(turn.index, "policy", sandbox)

    async def meddle(case: Case, sandbox: AsyncSandbox) -> None:
        plan.meet(case.index, "grade", sandbox)

    class Starts:
        async def get(self, task: Any) -> Any:
            return Forking(await starts.get(task), plan)

    return await run_rollouts(
        [a_task()], Acting(act), n=GROUP, concurrency=4, starts=Starts(), verifier=Forked(meddle), rules=rules
    )


class Forking:
    """A starting state of which the policies' forks may fail."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        self._inner = inner
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fork(self, index: int = 0, **options: Any) -> Any:
        if not options.get("grading"):
            self._plan.meet(index, "fork", None)
        return self._inner.fork(index, **options)


def plans(count: int, seed: int) -> Iterator[Plan]:
    """Yield plans in which up to four of a group's rollouts meet a fault; all pairs of stage and kind come up."""
    stages = {
        "fork": ["launch", "full", "reserve", "files", "store", "memory", "defect"],
        "policy": ["policy", "defect", "memory", "kill", "full", "reserve"],
        "carry": ["kill", "io", "store", "full", "reserve", "defect"],
        "grade": ["kill", "verifier", "launch", "full", "reserve", "io", "defect", "memory"],
    }
    pairs = [(stage, what) for stage, kinds in stages.items() for what in kinds]
    chance = random.Random(seed)
    for number in range(count):
        drawn = [pairs[(4 * number + offset) % len(pairs)] for offset in range(4)]
        yield Plan(dict(zip(chance.sample(range(GROUP), 4), drawn, strict=True)))


def test_no_fault_is_scored_and_siblings_complete(carrying: dict[str, Plan]) -> None:
    async def all_plans() -> int:
        starts, met = await states(), 0
        for plan in plans(40, seed=1):
            carrying["plan"] = plan
            episodes = await roll(starts, plan, ONCE)
            met += len(plan.met)
            for episode in episodes:
                told = (plan.faults.get(episode.index), episode.failure)
                assert episode.reward == (None if episode.index in plan.met else 1.0), told
        return met

    assert asyncio.run(all_plans()) == 160


def test_what_may_be_tried_again_ends_with_its_reward(carrying: dict[str, Plan]) -> None:
    never = {"policy", "defect"}

    async def all_plans() -> None:
        starts = await states()
        for plan in plans(14, seed=2):
            carrying["plan"] = plan
            for episode in await roll(starts, plan, AGAIN):
                stage, what = plan.faults.get(episode.index, ("", ""))
                if stage == "policy" and what in never:
                    assert episode.failure is not None
                    assert episode.failure.kind is FailureKind.POLICY
                else:
                    assert episode.reward == 1.0, (stage, what, episode.failure)
                    assert episode.attempt == (2 if stage in ("fork", "policy", "carry") else 1)
                    assert len(episode.faults) == (1 if stage else 0)

    asyncio.run(all_plans())


def test_trouble_with_clearing_away_spoils_no_reward(carrying: dict[str, Plan]) -> None:
    def broken(name: str) -> None:
        if name == "rollout:clear":
            raise OSError(errno.EIO, "broken")

    async def one() -> list[Episode]:
        starts = await states()
        faultpoints.install(broken)
        plan = carrying["plan"] = Plan({})
        return await roll(starts, plan, ONCE)

    assert [each.reward for each in asyncio.run(one())] == [1.0] * GROUP


def test_a_start_that_hangs_meets_its_budget() -> None:
    class Hanging:
        snapshot_id = "sn-hanging"

        def fork(self, *_: Any, **__: Any) -> Any:
            return self

        async def __aenter__(self) -> Any:
            await asyncio.sleep(600)

        async def __aexit__(self, *_: object) -> None: ...

    class Starts:
        async def get(self, task: Any) -> Any:
            return Hanging()

    rolling = run_rollouts([a_task(start_wall_s=0.2)], Acting(solve), starts=Starts(), verifier=Forked(), rules=ONCE)
    failure = asyncio.run(rolling)[0].failure
    assert failure is not None
    assert (failure.kind, failure.message) == (FailureKind.LIMIT, "a start took more than 0.2 s")


def test_cancelled_at_any_moment_nothing_is_left() -> None:
    async def cancel_after(starts: Any, wait_s: float) -> None:
        rolling = asyncio.ensure_future(
            run_rollouts([a_task()], Acting(solve), n=4, concurrency=4, starts=starts, verifier=Forked())
        )
        await asyncio.wait({rolling}, timeout=wait_s)
        rolling.cancel()
        await asyncio.wait({rolling})
        assert await AsyncSandbox.list() == []

    async def many() -> None:
        starts = await states()
        before = len(await AsyncSandbox.list_all_snapshots())
        for number in range(20):
            await cancel_after(starts, 0.02 * number)
            assert len(await AsyncSandbox.list_all_snapshots()) <= before + 1  # the starting state itself

    asyncio.run(many())
