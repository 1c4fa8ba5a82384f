"""What one rollout of a task, and one grading of it, may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from worldfork.core.errors import ConfigError


@dataclass(frozen=True)
class TaskLimits:
    """What one rollout of a task, and one grading of it, may use. Each stage has a budget of its own."""

    policy_wall_s: float = 600.0
    """Wall time for the policy's turn. What it left by then is graded."""
    grade_cpu_s: float = 60.0
    """CPU seconds of each process of one grading."""
    grade_wall_s: float = 300.0
    """Wall time of one grading; the backstop for code that sleeps."""
    memory_mb: int = 1024
    """Memory of each sandbox, MiB."""
    disk_mb: int = 1024
    """What each sandbox may write, MiB."""
    pids: int = 256
    """Processes and threads in each sandbox."""
    carry_files: int = 256
    """How many files may be carried from the policy's sandbox to the verifier."""
    carry_bytes: int = 16 << 20
    """Their size in bytes, together."""
    start_wall_s: float = 120.0
    """Wall time for starting a sandbox from the starting state."""
    command_wall_s: float = 600.0
    """Wall time of one command of the policy, where the command itself sets no limit."""
    rebuild_wall_s: float = 300.0
    """Wall time of the rebuild step of one grading."""
    stop_wall_s: float = 60.0
    """Wall time for ending a sandbox and for carrying out what is in it."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            number = isinstance(value, int) or (isinstance(value, float) and each.type == "float")
            if isinstance(value, bool) or not number or not 0 < value < float("inf"):
                raise ConfigError(f"limit {each.name} is {value!r}, not a number above 0", field=f"limits.{each.name}")
            if each.type == "float":
                # 60 and 60.0 are the same limit and must hash alike.
                object.__setattr__(self, each.name, float(value))

    def to_json(self) -> dict[str, float]:
        """Return the limits of format 1, and of the later ones those that are not the default."""
        first = {each.name: getattr(self, each.name) for each in fields(self)[:FIRST_FORMAT_LIMITS]}
        later = {
            each.name: getattr(self, each.name)
            for each in fields(self)[FIRST_FORMAT_LIMITS:]
            if getattr(self, each.name) != each.default
        }
        return first | later

    @classmethod
    def from_json(cls, data: object) -> TaskLimits:
        """Read limits; what is not given keeps its default.

        Raises:
            ConfigError: an unknown limit or a bad value; `field` names it.
        """
        if not isinstance(data, Mapping):
            raise ConfigError("limits is not an object", field="limits")
        unknown = sorted(set(data) - {each.name for each in fields(cls)})
        if unknown:
            raise ConfigError(f"there is no limit {unknown[0]!r}", field=f"limits.{unknown[0]}")
        return cls(**data)


FIRST_FORMAT_LIMITS = 8
"""How many limits tasks of format 1 have; the hash of such a task must stay what it was."""
