"""An episode: the stored result of one rollout, scored or failed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from worldfork.core.errors import ConfigError, FormatUnsupported

EPISODE_FORMAT = 1
"""Version of the JSON form."""


class FailureKind(str, Enum):
    """Why a rollout has no reward. Each is a fault of ours, never of what the policy's own processes did."""

    START = "start"
    """The task's starting state could not be made."""
    FORK = "fork"
    """A sandbox could not be forked from it."""
    POLICY = "policy"
    """The program that drives the policy broke on the host."""
    CARRY = "carry"
    """What the policy left could not be read."""
    CALIBRATION = "calibration"
    """The reference did not show which tests to expect."""
    GRADING = "grading"
    """The verifier broke."""
    OVERLOAD = "overload"
    """A wall-clock limit struck while the machine kept the tests waiting for a CPU."""
    SPACE = "space"
    """The host ran out of disk."""
    MEMORY = "memory"
    """The host ran out of memory: its own killer took a sandbox that was within its limits."""
    LOST = "lost"
    """A sandbox ended and nothing inside it did that: its PID 1 was killed from outside, or its owner died."""
    BUILD = "build"
    """The task's rebuild step broke on the starting state or with the reference."""
    LIMIT = "limit"
    """A budget of ours ran out: for a start, for a stop, for the whole episode."""
    STOPPED = "stopped"
    """Not begun, or given up, because the run was over: cancelled, its deadline, a stop rule, too many faults."""
    INTERNAL = "internal"
    """A defect of Worldfork."""


@dataclass(frozen=True)
class Failure:
    """What stopped a rollout from being scored."""

    kind: FailureKind
    code: str
    """The `code` of the error, or the name of a foreign exception."""
    message: str


@dataclass(frozen=True)
class Timings:
    """Where the time of a rollout went, seconds of wall time; None where a stage was not reached."""

    fork_s: float | None = None
    policy_s: float | None = None
    carry_s: float | None = None
    """Ending the policy's processes and copying out the editable files."""
    calibrate_s: float | None = None
    """Waiting for the expected ids: near 0 once they are known."""
    grade_s: float | None = None
    """The verifier's own fork, the tests and its end."""
    total_s: float = 0.0
    grade_cpu_s: float | None = None
    """CPU seconds of the tests."""
    commands_s: float | None = None
    """Within `policy_s`: wall time in which at least one command of the policy ran."""
    stop_s: float | None = None
    """Clearing away the policy's sandbox."""


@dataclass(frozen=True)
class Episode:
    """One rollout's result; its `key` says which rollout it was."""

    task_id: str
    task_hash: str
    policy_id: str
    index: int
    """Place within the group; the fork's index."""
    reward: float | None
    """In [0, 1]; None exactly where `failure` is set."""
    failure: Failure | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named rewards that could be used instead."""
    expected: tuple[str, ...] = ()
    """Ids of the tests that count, sorted."""
    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    """Ids that ran and did not pass; expected ids in neither tuple did not run."""
    untouched: tuple[str, ...] = ()
    """Expected ids that pass without any change to the starting state."""
    policy_end: str = "finished"
    """How the policy's turn ended: `finished`, `timed_out`, or the code of what befell its sandbox."""
    grade_end: str | None = None
    """How the tests' process ended, a reason of commands such as `exited` or `timed_out`."""
    notes: tuple[str, ...] = ()
    """For people: what kept the reward down, and what of the policy's files was not carried. A few lines, part of them
    a policy's own words."""
    started_s: float = 0.0
    """Seconds since the Unix epoch."""
    timings: Timings = field(default_factory=Timings)
    snapshot_id: str | None = None
    """The starting state that the group shares."""
    start_content: str | None = None
    """Digest of what that holds, times aside: the same of one that was built again; None where nobody could tell."""
    sandbox_id: str | None = None
    """Where the policy acted."""
    grading_sandbox_id: str | None = None
    trust: str = "fresh"
    """`fresh`: graded in a fork of the starting state. `final`: in, or by the look of, a frozen fork of the end."""
    verifier_id: str = ""
    """What graded it, with everything that decides how."""
    judged_by: str = ""
    """Which verifier that was for this task, where `verifier_id` chooses among several; empty where nothing was left
    to be judged."""
    seed: int | None = None
    """WORLDFORK_SEED inside, and the policy's seed."""
    attempt: int = 1
    """From 1: how often this rollout was tried, faults of ours before it included."""
    faults: tuple[str, ...] = ()
    """Kinds of the failures of the attempts before."""
    edits: str | None = None
    """Digest of what the policy left of the editable files; the run's directory holds it."""
    diff: str | None = None
    """Digest of the same as a unified diff."""
    trajectory: str | None = None
    """Digest of what it did."""
    final_snapshot_id: str | None = None
    """The state at the end of the policy's turn, where the run keeps it."""
    group_id: str = ""
    """Which group of the run it belongs to."""
    rollout_id: str = ""
    """Of a rollout that was opened: its id, since many of one task may have the same index; empty of a group's."""

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.failure is not None):
            raise ConfigError("an episode has either a reward or a failure", field="reward")
        if self.reward is not None and not (math.isfinite(self.reward) and 0 <= self.reward <= 1):
            raise ConfigError(f"reward {self.reward!r} is not in [0, 1]", field="reward")

    @property
    def valid(self) -> bool:
        """Whether it counts: False exactly where a fault of ours left it without a reward."""
        return self.reward is not None

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Which rollout this is: task hash, policy id, index, and the id of one that was opened."""
        return self.task_hash, self.policy_id, self.index, self.rollout_id

    def to_json(self) -> dict[str, Any]:
        """Return the episode as plain JSON values, with the format's version."""
        data: dict[str, Any] = {"format": EPISODE_FORMAT}
        for each in fields(self):
            value = getattr(self, each.name)
            data[each.name] = list(value) if isinstance(value, tuple) else value
        data["parts"] = dict(self.parts)
        data["timings"] = {each.name: getattr(self.timings, each.name) for each in fields(Timings)}
        if self.failure is not None:
            data["failure"] = {
                "kind": self.failure.kind.value,
                "code": self.failure.code,
                "message": self.failure.message,
            }
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Episode:
        """Read an episode; fields that this version does not know are left out.

        Raises:
            FormatUnsupported: written by a newer version.
            ConfigError: it is not an episode.
        """
        version = data.get("format")
        if not isinstance(version, int) or version < 1:
            raise ConfigError(f"episode format {version!r} is not a version", field="format")
        if version > EPISODE_FORMAT:
            raise FormatUnsupported(f"episode format {version} is newer than {EPISODE_FORMAT}", version=version)
        values = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        try:
            for name in ("expected", "passed", "failed", "untouched", "faults", "notes"):
                values[name] = tuple(values.get(name, ()))
            values["timings"] = Timings(**values.get("timings", {}))
            broken = values.get("failure")
            if broken is not None:
                values["failure"] = Failure(FailureKind(broken["kind"]), broken["code"], broken["message"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not an episode: {error}", field="") from error


def ranked(episodes: Iterable[Episode]) -> list[Episode]:
    """Return episodes best first: by reward, of equal ones the first by index; those without one come last."""
    return sorted(episodes, key=lambda each: (each.reward is None, -(each.reward or 0.0), each.index))
