"""Rows as of SWE-bench: an issue, the commit before its fix, the fix and its tests as patches, the ids that it turns.

Repositories are local: a row names one as `owner/name`, and the caller says where it lies. Nothing is fetched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from worldfork.core.errors import ConfigError
from worldfork.records.checked import checked_strings, checked_text
from worldfork.records.globs import NO_CLUTTER, is_editable
from worldfork.records.origin import Origin, WorldSource
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.arguments import CONFIGURATIONS

LIMITS = TaskLimits(
    grade_cpu_s=1800, grade_wall_s=3600, memory_mb=4096, disk_mb=4096, carry_files=1024, carry_bytes=64 << 20
)
"""What a task of these may use where the caller says nothing."""

EDITABLE = (
    "**",
    *NO_CLUTTER,
    *(f"!{name}" for name in CONFIGURATIONS),
    "!**/test/**",
    "!**/tests/**",
    "!**/testing/**",
    "!**/test_*.py",
    "!**/*_test.py",
    "!**/tests.py",
    "!**/conftest.py",
)
"""What a policy may change, and every other file that the fix touches: all of the repository but its tests, what lies
beside them for their use, and what configures pytest. Those are graded as the commit has them: whoever could edit a
test that is to stay passed would need no solution."""


@dataclass(frozen=True)
class LocalRepository:
    """Where a repository lies on this machine, and what makes a world of it."""

    path: str
    dependencies: tuple[str, ...] = ()
    """What pip installs into the world."""
    commands: tuple[tuple[str, ...], ...] = ()
    """How it is made importable, such as `("python", "-m", "pip", "install", "-e", ".")`."""


Repositories = Mapping[str, str | os.PathLike[str] | LocalRepository]
"""`owner/name` -> where it lies."""

_FIELDS = ("instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement")


def is_swebench_row(row: Mapping[str, Any]) -> bool:
    """Tell whether a line of JSON is such a row."""
    return {"instance_id", "repo", "base_commit"} <= set(row)


def swebench_task(
    row: Mapping[str, Any],
    repositories: Repositories,
    *,
    dependencies: Sequence[str] = (),
    commands: Sequence[Sequence[str]] = (),
    limits: TaskLimits = LIMITS,
) -> Task:
    """Return the task of a row.

    The ids must be pytest's (`path::name`), since pytest runs the tests: the files that the ids name, else those of
    the test patch.

    Args:
        row: `repo`, `instance_id`, `base_commit`, `patch`, `test_patch`, `problem_statement`, `FAIL_TO_PASS` and
            `PASS_TO_PASS` (lists, or lists spelled as JSON); others are for people.
        repositories: `owner/name` -> a repository on this machine that has the commit.
        dependencies, commands: as of `LocalRepository`, and before its own.
        limits: of the task.

    Raises:
        ConfigError: a field is missing or malformed, or nobody said where the repository lies; `field` names it.
    """
    from worldfork.content.patches import parse_patch

    missing = sorted({*_FIELDS, "FAIL_TO_PASS"} - set(row))
    if missing:
        raise ConfigError(f"field {missing[0]!r} is missing", field=missing[0])
    said = {name: checked_text(name, row[name]) for name in _FIELDS}
    if said["repo"] not in repositories:
        raise ConfigError(
            f"nobody says where {said['repo']} lies",
            remedy=f"say --repository {said['repo']}=PATH, or from Python repositories={{{said['repo']!r}: PATH}}",
            field="repo",
        )
    found = repositories[said["repo"]]
    local = found if isinstance(found, LocalRepository) else LocalRepository(os.fspath(found))
    where = Path(local.path).absolute()
    fail, keep = _ids(row, "FAIL_TO_PASS"), _ids(row, "PASS_TO_PASS")
    patched = parse_patch(said["test_patch"]).paths
    tests = _test_files(fail + keep, patched)
    return Task(
        task_id=said["instance_id"],
        prompt=said["problem_statement"],
        world=WorldSource(
            Origin(git=f"{where}@{said['base_commit']}"),
            (*dependencies, *local.dependencies),
            (*(tuple(command) for command in commands), *local.commands),
        ),
        editable=_editable(parse_patch(said["patch"]).paths, {*tests, *patched}),
        test_patch=said["test_patch"],
        test_args=tests,
        solution_patch=said["patch"],
        fail_to_pass=fail,
        pass_to_pass=keep,
        score="fail_to_pass",
        limits=limits,
    )


def _editable(fixed: Sequence[str], tests: Collection[str]) -> tuple[str, ...]:
    both = sorted(set(fixed) & set(tests))
    if both:
        raise ConfigError(f"patch changes {both[0]!r}, which is one of the tests", field="patch")
    others = [path for path in fixed if not is_editable(path, EDITABLE)]
    return (*EDITABLE, *others, *(f"!{path}" for path in sorted(tests) if is_editable(path, [*EDITABLE, *others])))


def _ids(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = row.get(name) or ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name} is no list: {error}", field=name) from None
    ids = checked_strings(name, value)
    odd = next((each for each in ids if "::" not in each), None)
    if odd is not None:
        raise ConfigError(
            f"{name} holds {odd[:200]!r}, which is no id of pytest's",
            remedy="such a task needs a Task of its own, with a test_command and a reader",
            field=name,
        )
    return ids


def _test_files(ids: Sequence[str], patched: Sequence[str]) -> tuple[str, ...]:
    named = dict.fromkeys(each.partition("::")[0] for each in ids)
    if named:
        return tuple(named)
    names = ((path, PurePosixPath(path).name) for path in patched)
    return tuple(path for path, name in names if name.endswith(".py") and name.startswith("test"))
