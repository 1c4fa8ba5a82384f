"""A host that is short of memory and ends a child of the tests: that is nobody's wrong answer."""

from __future__ import annotations

import asyncio

import pytest
from tests.e2e.test_rollouts import WRONG, _world, task

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.death import LimitHits
from worldfork.records.episode import Episode, FailureKind
from worldfork.records.task import Task
from worldfork.rollout.attempt import Attempt
from worldfork.rollout.faults import FaultRules
from worldfork.rollout.group import run_group
from worldfork.rollout.policies import CandidatesPolicy, NopPolicy

pytestmark = pytest.mark.timeout(300)


def graded(of: Task, policy: object) -> Episode:
    async def run() -> Episode:
        return (await run_group(of, policy, 1, world=await _world(), rules=FaultRules(retries={}))).episodes[0]

    return asyncio.run(run())


@pytest.mark.parametrize("verifier", ["pytest", "split"])
@pytest.mark.parametrize(
    ("hits", "kind"), [(LimitHits(host_memory=1), FailureKind.MEMORY), (LimitHits(memory=1), None)]
)
def test_wrong_code_is_scored_unless_the_host_ended_a_child_of_it(
    monkeypatch: pytest.MonkeyPatch, verifier: str, hits: LimitHits, kind: FailureKind | None
) -> None:
    of = task(task_id=f"host-memory/{verifier}", verifier={"kind": verifier})
    assert graded(of, NopPolicy()).failure is None

    async def told(sandbox: AsyncSandbox) -> LimitHits:
        return hits

    async def not_the_policys(attempt: Attempt, sandbox: AsyncSandbox) -> bool:
        return False

    monkeypatch.setattr(AsyncSandbox, "limit_hits", told)
    monkeypatch.setattr(Attempt, "_lost_memory", not_the_policys)
    episode = graded(of, CandidatesPolicy({"one": {"answer.py": WRONG}}))
    if kind is None:
        assert episode.reward is not None
        assert episode.reward < 1.0
    else:
        assert episode.failure is not None, episode.reward
        assert episode.failure.kind is kind
