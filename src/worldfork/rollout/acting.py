"""The policy's turn: how long it may take, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from worldfork.core.errors import SandboxDied, WorldforkError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import Failure, FailureKind
from worldfork.records.task import Task
from worldfork.rollout.bounds import TurnOver, bounded
from worldfork.rollout.faults import blame
from worldfork.rollout.recording import RecordedSandbox
from worldfork.rollout.turn import Agent, Turn


@dataclass(frozen=True)
class TurnEnd:
    """How a policy's turn ended."""

    policy_end: str = "finished"
    """`finished`, `timed_out`, or the code of what befell its sandbox."""
    failure: Failure | None = None
    """Where it ended by a fault of ours, or its program on the host broke."""


async def take_turn(policy: Agent, sandbox: AsyncSandbox, task: Task, turn: Turn) -> TurnEnd:
    """Let a policy act for as long as its task lets it; what it does is recorded.

    A program that meets the state of its own sandbox in an error has ended its turn by what it did there. Any other
    error is one of the program on the host.
    """
    try:
        await bounded(policy.agent(RecordedSandbox(sandbox, turn.recorder), task, turn), task.limits.policy_wall_s)
    except TurnOver:
        return TurnEnd("timed_out")
    except Exception as error:
        failure = await blame(sandbox, error, FailureKind.POLICY)
        own = error.code if isinstance(error, WorldforkError) else SandboxDied.code
        return TurnEnd(own if failure is None else failure.code, failure)
    return TurnEnd()
