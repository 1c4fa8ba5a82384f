"""What comes of a rollout: which one it was, its episode, and what that names."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, replace

from worldfork.core.errors import VerifierError, WorldforkError
from worldfork.records.edits import Edits
from worldfork.records.episode import Episode, Failure, FailureKind
from worldfork.records.task import Task
from worldfork.records.trajectory import Trajectory
from worldfork.reward.patching import diff_of
from worldfork.reward.verifier import Grade, Start, Verifier, checked_reward
from worldfork.rollout.run_directory import trajectory_bytes

_MOST_NOTES = 10
_NOTE_CHARACTERS = 300


@dataclass(frozen=True)
class Which:
    """Which attempt at which rollout."""

    task: Task
    policy_id: str
    index: int
    """The place within the group, from 0; the fork's index."""
    seed: int | None = None
    """None: what follows from task and index alone."""
    attempt: int = 1
    faults: tuple[str, ...] = ()
    group_id: str = ""
    rollout_id: str = ""
    """Of one that was opened."""

    def failed(self, failure: Failure, started_s: float) -> Episode:
        """Return its episode where nothing else is to be told of it.

        Args:
            failure: why it has no reward.
            started_s: seconds since the Unix epoch.
        """
        return Episode(
            task_id=self.task.task_id,
            task_hash=self.task.task_hash,
            policy_id=self.policy_id,
            index=self.index,
            reward=None,
            failure=failure,
            started_s=started_s,
            seed=self.seed,
            attempt=self.attempt,
            faults=self.faults,
            group_id=self.group_id,
            rollout_id=self.rollout_id,
        )


@dataclass(frozen=True)
class Outcome:
    """An episode, and what it names."""

    episode: Episode
    blobs: tuple[bytes, ...] = ()
    """What `edits`, `diff` and `trajectory` of the episode are the digests of."""
    acted: bool = False
    """Whether the policy's turn is over and what it left is known: then it need not act again."""


@dataclass(frozen=True)
class Pieces:
    """What an episode names by digest."""

    edits: bytes | None = None
    diff: bytes | None = None
    trajectory: bytes | None = None

    @property
    def all(self) -> tuple[bytes, ...]:
        """Those that are there."""
        return tuple(piece for piece in (self.edits, self.diff, self.trajectory) if piece is not None)


def graded(episode: Episode, grade: Grade, edits: Edits | None) -> Episode:
    """Return a scored episode with what a verifier said.

    Args:
        episode: which rollout.
        grade: of it.
        edits: what was graded; None where nothing could be read.
    """
    notes = [*(edits.notes if edits is not None else ()), *grade.notes]
    return replace(
        episode,
        reward=grade.reward,
        failure=None,
        parts=dict(grade.parts),
        expected=grade.expected,
        passed=grade.passed,
        failed=grade.failed,
        untouched=grade.untouched,
        grade_end=grade.end,
        grading_sandbox_id=grade.sandbox_id,
        trust=grade.trust,
        judged_by=grade.judged_by,
        notes=tuple(each[:_NOTE_CHARACTERS] for each in notes[:_MOST_NOTES]),
    )


def checked_grade(grade: Grade, verifier: Verifier) -> Grade:
    """Return a grade with a reward that is one.

    Raises:
        VerifierError: it is no grade, or a reward in it is none.
    """
    if not isinstance(grade, Grade):
        raise VerifierError(f"{verifier.verifier_id} gave {type(grade).__name__} as a grade", kind=FailureKind.GRADING)
    parts = {str(name): checked_reward(part, f"the part {name!r}") for name, part in grade.parts.items()}
    return replace(grade, reward=checked_reward(grade.reward, verifier.verifier_id), parts=parts)


def pieces_of(edits: Edits | None, start: Start, trajectory: Trajectory) -> Pieces:
    """Put into bytes what a rollout left and did. Blocking; may take seconds.

    Args:
        edits: what its policy left of the editable files; None where nothing could be read.
        start: what it was before.
        trajectory: what it did.
    """
    diff = None
    if edits is not None and not edits.empty:
        # It is for people alone: an episode without it is whole.
        with contextlib.suppress(WorldforkError, OSError):
            diff = diff_of(start.originals, edits)
    return Pieces(None if edits is None else edits.to_bytes(), diff, _recorded(trajectory))


def _recorded(trajectory: Trajectory) -> bytes | None:
    if not trajectory.steps and not trajectory.facts and not trajectory.truncated:
        return None
    try:
        return trajectory_bytes(trajectory)
    except (TypeError, ValueError, RecursionError):
        # What a policy's program told of itself must not cost it its reward.
        return trajectory_bytes(Trajectory(truncated=True))


def digest_of(blob: bytes | None) -> str | None:
    """Return what an episode names a piece by."""
    return None if blob is None else hashlib.sha256(blob).hexdigest()
