"""What a policy is: it takes a whole turn in one sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.task import Task
from worldfork.rollout.recording import Recorder


class Turn(Protocol):
    """One policy's turn in one rollout."""

    @property
    def index(self) -> int:
        """The place within the group, from 0."""
        ...

    @property
    def seed(self) -> int:
        """WORLDFORK_SEED inside."""
        ...

    @property
    def recorder(self) -> Recorder:
        """Where the steps of the rollout go; those of the sandbox's own calls go there by themselves."""
        ...

    def note(self, text: str) -> None:
        """Record a line for people."""
        ...


class Policy(Protocol):
    """Acts on one task in one sandbox."""

    @property
    def policy_id(self) -> str:
        """Names the policy and everything that decides what it does; episodes and resumed runs go by it."""
        ...

    async def agent(self, sandbox: AsyncSandbox, task: Task, turn: Turn) -> None:
        """Take the whole turn: what is in the task's directory when this returns is graded.

        Args:
            sandbox: a fork of the task's starting state, this rollout's own.
            task: the task; its solution and hidden tests are not for policies.
            turn: which rollout it is, and where its steps are recorded.

        Raises:
            PolicyError: the policy itself broke, such as a model that does not answer; the rollout has no reward.
        """
        ...

    async def act(self, sandbox: AsyncSandbox, task: Task, index: int) -> None:
        """Take the turn of rollout `index` outside of a rollout; nothing is recorded."""
        ...


@dataclass
class _PlainTurn:
    index: int
    seed: int
    recorder: Recorder

    def note(self, text: str) -> None:
        self.recorder.note(text)


class TakesTurns:
    """A policy whose turn can be taken by itself, outside of a rollout that gives it one."""

    async def act(self, sandbox: AsyncSandbox, task: Task, index: int) -> None:
        """Take the turn of rollout `index`; nothing is recorded."""
        await self.agent(sandbox, task, _PlainTurn(index, index, Recorder()))

    async def agent(self, sandbox: AsyncSandbox, task: Task, turn: Turn) -> None:
        """Take the whole turn; see `Policy.agent`."""
        raise NotImplementedError
