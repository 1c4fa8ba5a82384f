"""What the rollouts of one run are to be, and how they are to be run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from worldfork.core.clock import Clock
from worldfork.records.episode import Episode
from worldfork.records.task import Task
from worldfork.reward.verifier import Start, Verifier
from worldfork.rollout.faults import Faults
from worldfork.rollout.journal import Journal
from worldfork.rollout.run_directory import RunDirectory
from worldfork.rollout.stopping import StopRule
from worldfork.rollout.turn import Agent


class Starts(Protocol):
    """Where starting states come from."""

    async def get(self, task: Task) -> Start:
        """Return a task's."""
        ...

    async def at(self, snapshot_id: str, task: Task) -> Start:
        """Return the one that a task had when it was made.

        Raises:
            NotFound: it is gone. FormatUnsupported: it does not fit this machine any more.
        """
        ...


@dataclass(frozen=True)
class Job:
    """One rollout that is to be run."""

    task: Task
    index: int
    seed: int


@dataclass(frozen=True)
class Orders:
    """How the rollouts of a run are to be run."""

    policy: Agent
    starts: Starts
    verifier_of: Callable[[Task], Verifier]
    clock: Clock
    faults: Faults
    gradings: int
    """How many are graded at a time."""
    stop: StopRule | None = None
    keep: str | None = None
    """`best`, `all` or None: whose final state is kept."""
    deadline_s: float | None = None
    """Wall time for the whole run."""
    journal: Journal | None = None
    run: RunDirectory | None = None
    on_episode: Callable[[Episode], None] | None = None
