"""What every verifier is given and gives back. Each judges a final state out of the policy's reach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from worldfork.core.errors import VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.records.trajectory import Trajectory

FRESH = "fresh"
FINAL = "final"


class Start(Protocol):
    """The starting state of a task: where fresh forks come from."""

    @property
    def snapshot_id(self) -> str:
        """The snapshot."""
        ...

    @property
    def tests(self) -> Mapping[str, bytes]:
        """Every hidden test file: path of the task -> content. Read on the host; in no sandbox of a policy."""
        ...

    @property
    def solution(self) -> Edits:
        """The reference, as the edits of a policy that knows it."""
        ...

    @property
    def originals(self) -> Mapping[str, bytes]:
        """The editable files as they are in the starting state."""
        ...

    def fork(
        self, index: int = 0, *, seed: int | None = None, grading: bool = False, snapshot_id: str | None = None
    ) -> AbstractAsyncContextManager[AsyncSandbox]:
        """Start one sandbox from it, without network and within the task's limits; it ends with the block.

        Args:
            index: WORLDFORK_FORK_INDEX inside.
            seed: WORLDFORK_SEED inside; by default it follows from task and index alone.
            grading: for a verifier: mounts that are not declared for grading are absent.
            snapshot_id: another state to start from, such as the end of a rollout, with the same limits.
        """
        ...

    def stilled(self, sandbox: AsyncSandbox) -> AbstractAsyncContextManager[str]:
        """End a fork from outside, with every process in it; give the id of what it left on its disk.

        That state is for starting other forks from, and goes with the block.
        """
        ...


@dataclass(frozen=True)
class Case:
    """One final state to be judged."""

    task: Task
    start: Start
    edits: Edits
    """What the policy left of the editable files."""
    fork_id: str = ""
    """The sandbox in which the policy acted."""
    index: int = 0
    attempt: int = 1
    end_snapshot_id: str | None = None
    """The whole state at the end of the policy's turn, everything in it stopped. Only where the verifier asked for it
    by `needs_end`; None too where the policy's sandbox did not live to give one."""
    trajectory: Trajectory | None = None

    @property
    def key(self) -> str:
        """The same for the same act of grading, for whoever must not do it twice: task, fork and attempt."""
        return f"{self.task.task_hash}:{self.fork_id}:{self.attempt}"


@dataclass(frozen=True)
class Grade:
    """What a final state is worth."""

    reward: float
    """In [0, 1]."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named rewards that could be used instead, each in [0, 1]."""
    expected: tuple[str, ...] = ()
    """Ids of the tests that count, sorted, as are the next three."""
    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    """Expected ids that ran and did not pass."""
    untouched: tuple[str, ...] = ()
    """Expected ids that pass without any change to the starting state."""
    end: str | None = None
    """How the tests' process ended, a reason of commands, or what stood in its way."""
    cpu_s: float | None = None
    sandbox_id: str | None = None
    """Where it was graded."""
    trust: str = FRESH
    calibrate_s: float = 0.0
    """Wall time to learn the expected ids."""
    grade_s: float = 0.0
    """Wall time of the rest."""
    notes: tuple[str, ...] = ()
    """For people: what kept the reward down, at most a few lines."""
    judged_by: str = ""
    """The id of the verifier that judged, where whoever was asked chose among several."""


class Verifier(Protocol):
    """Grades final states; one for a whole run, safe for many cases at once."""

    @property
    def verifier_id(self) -> str:
        """Its kind, with a digest of everything that decides how it grades."""
        ...

    @property
    def trust(self) -> str:
        """`fresh` or `final`."""
        ...

    @property
    def needs_end(self) -> bool:
        """Whether a case must bring the whole final state."""
        ...

    async def grade(self, case: Case) -> Grade:
        """Say what a final state is worth.

        Raises:
            VerifierError: it could not be judged; `kind` is a `FailureKind`.
            SandboxError, StoreError, ForkError: a fork could not be made or written to.
        """
        ...

    async def grade_nothing(self, case: Case) -> Grade:
        """Say what the end of a policy is worth that left nothing to be looked at: its own doing, so reward 0.

        Raises:
            As `grade`.
        """
        ...


def gradings_of(verifier: Verifier) -> int:
    """Return how many gradings a verifier does for one case, one after the other: its `gradings`, else 1."""
    count = getattr(verifier, "gradings", 1)
    return count if isinstance(count, int) and count > 0 else 1


@runtime_checkable
class _ReadsMany(Protocol):
    def read(self, paths: Sequence[str]) -> list[bytes]: ...


def contents_of(originals: Mapping[str, bytes], paths: Sequence[str]) -> dict[str, bytes]:
    """Return some of a starting state's editable files: path -> content. Takes disk.

    They are read together where the mapping can do that; each reading opens the starting state anew.
    """
    if isinstance(originals, _ReadsMany):
        return dict(zip(paths, originals.read(paths), strict=True))
    return {path: originals[path] for path in paths}


def checked_reward(value: Any, what: str) -> float:
    """Return a reward that came from outside as a float.

    Raises:
        VerifierError: it is no number, not finite or not in [0, 1]; nothing is clipped.
    """
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not 0 <= number <= 1:
        raise VerifierError(
            f"{what} gave the reward {str(value)[:80]}, which is no number in [0, 1]",
            remedy="divide it by its largest possible value",
            kind=FailureKind.GRADING,
        )
    return number
