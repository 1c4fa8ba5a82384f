"""Whether a task's tests can be run with the candidate in another fork: proven with its reference, and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worldfork.core.errors import ConfigError
from worldfork.records.globs import is_editable
from worldfork.records.task import Task
from worldfork.reward.commanded import pytest_arguments
from worldfork.reward.findings import KEPT_BYTES, Findings, tuples
from worldfork.reward.needs import Need
from worldfork.reward.split.plan import module_plan
from worldfork.reward.verifier import Start, contents_of

PROOF_FORMAT = 3
"""Raised whenever the same tests might be judged differently; older proofs are then found anew."""

MAX_WHY_CHARACTERS = 500

_MAX_MODULES = 2000


@dataclass(frozen=True)
class Proof:
    """What became of one task's reference, from one starting state."""

    capable: bool
    """The same ids pass as in one process, twice."""
    why: str = ""
    """Why not; empty where it is capable."""
    shapes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Where objects of the reference's classes stood. A candidate's stand nowhere else."""
    modules: Mapping[str, Any] = field(default_factory=dict)
    """The modules under test, as `module_plan` describes them."""
    absent: tuple[str, ...] = ()
    """Other files that a policy may change; the tests' fork has none of them."""
    cpu_s: float = 0.0
    """CPU seconds of the reference's tests, both sides."""
    wall_s: float = 0.0
    """Wall time of them less what others took of it; 0 where nobody knows."""
    tried: bool = False
    """Whether the tests were run at all; nothing else can end otherwise another time."""

    @property
    def need(self) -> Need:
        """What the reference needs of the limits."""
        return Need(self.cpu_s, self.wall_s)

    @property
    def plain(self) -> bool:
        """Whether plain values alone cross."""
        return not self.shapes


class ProofStore(Findings[Proof]):
    """A directory of proofs."""

    def __init__(self, directory: Path, most_bytes: int = KEPT_BYTES) -> None:
        super().__init__(directory, "split proof", PROOF_FORMAT, _parsed, most_bytes)


def learn_modules(task: Task, start: Start) -> Proof:
    """Read the modules under test as the reference has them; the result is to be proven. Takes disk.

    Raises:
        ConfigError: this task's tests cannot be split; the message says why.
    """
    if pytest_arguments(task) is None:
        raise ConfigError("its tests are not run by pytest under the verifier's own eyes", field="test_command")
    if task.rebuild:
        raise ConfigError("it is rebuilt after a change, so its modules are not read from their texts", field="rebuild")
    solution = start.solution
    paths = sorted({*start.originals, *solution.files} - set(solution.removed))
    editable = [path for path in paths if is_editable(path, task.editable)]
    modules = [path for path in editable if path.endswith(".py")]
    if not modules:
        raise ConfigError("no Python module of it is editable", field="editable")
    if len(modules) > _MAX_MODULES:
        raise ConfigError(f"more than {_MAX_MODULES} modules of it are editable", field="editable")
    original = contents_of(start.originals, [path for path in modules if path not in solution.files])
    contents = {**original, **{path: file.content for path, file in solution.files.items()}}
    try:
        texts = {path: contents[path].decode("utf-8") for path in modules}
    except UnicodeDecodeError:
        raise ConfigError("a module of it is not written in UTF-8", field="solution") from None
    return Proof(False, modules=module_plan(texts), absent=tuple(path for path in editable if path not in texts))


def _parsed(data: dict[str, Any]) -> Proof:
    shapes = {place: tuple(names) for place, names in data["shapes"].items()}
    return Proof(**{**tuples(data, "absent"), "shapes": shapes})
