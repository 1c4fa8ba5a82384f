"""A trajectory: the ordered steps that a rollout recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from worldfork.core.errors import ConfigError

MAX_OUTPUT_CHARACTERS = 64_000
"""What is kept of one step's output; its middle is left out of a longer one."""


POLICY, HARNESS = "policy", "harness"


@dataclass(frozen=True)
class Step:
    """One action of a policy and what came of it."""

    kind: str
    """`command`, `write`, `message` (what a policy said without acting) or `note`."""
    action: str
    """The command line, the path written to, or the message."""
    output: str = ""
    """What was seen of it: standard output and errors, at most `MAX_OUTPUT_CHARACTERS`."""
    exit_code: int | None = None
    reason: str = ""
    """How a command ended, a reason of commands."""
    began_s: float = 0.0
    """Since the rollout's start, as is `ended_s`."""
    ended_s: float = 0.0
    cpu_s: float | None = None
    prompt_tokens: int | None = None
    """Where the policy says so, as are the next two."""
    completion_tokens: int | None = None
    log_probability: float | None = None
    """Sum over the step's completion tokens, natural logarithm."""
    message: str = ""
    """What the policy said with this action."""
    actor: str = POLICY
    """Whose doing it was: the policy's, or of what runs it, `HARNESS`: it is no answer to learn from."""

    def __post_init__(self) -> None:
        for name in _TEXTS:
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} of a step is no text", field=name)
        for name, instead in _NUMBERS.items():
            object.__setattr__(self, name, _number(name, getattr(self, name), instead))

    def to_json(self) -> dict[str, Any]:
        """Return what is not the default."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Step:
        """Read a step; fields that this version does not know are left out.

        Raises:
            ConfigError: it is no step.
        """
        try:
            return cls(**{each.name: data[each.name] for each in fields(cls) if each.name in data})
        except TypeError as error:
            raise ConfigError(f"not a step of a trajectory: {error}", field="steps") from None


_TEXTS = ("kind", "action", "output", "reason", "message", "actor")
_NUMBERS: dict[str, float | None] = {
    "exit_code": None, "began_s": 0.0, "ended_s": 0.0, "cpu_s": None, "prompt_tokens": None, "completion_tokens": None,
    "log_probability": None,
}  # fmt: skip
"""What takes the place of a number that is none."""
_WHOLE = ("exit_code", "prompt_tokens", "completion_tokens")


def _number(name: str, value: Any, instead: float | None) -> float | int | None:
    """Return a number of whatever library as Python's own; what is not finite is not known.

    Raises:
        ConfigError: it is no number.
    """
    if value is None:
        return instead
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text")
        number = float(value)
        if not math.isfinite(number):
            return instead
        return int(value) if name in _WHOLE else number
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} of a step is no number: {error}", field=name) from None


@dataclass(frozen=True)
class Trajectory:
    """What one policy did in one rollout, in order."""

    steps: tuple[Step, ...] = ()
    truncated: bool = False
    """Whether steps are missing at the end because there were too many, or too long ones."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What a policy or a trainer wants to be kept with it, such as the model's name. Plain JSON values."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "steps": [step.to_json() for step in self.steps], "facts": dict(self.facts)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trajectory:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: it is no trajectory.
        """
        try:
            steps = tuple(Step.from_json(step) for step in data["steps"])
            return cls(steps, bool(data.get("truncated", False)), dict(data.get("facts", {})))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"not a trajectory: {error}", field="steps") from None
