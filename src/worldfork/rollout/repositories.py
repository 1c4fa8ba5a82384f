"""Repository-level tasks: rows that name a package and two versions of it; all code comes from the registry.

The world is the source distribution of the base version, the hidden tests are those of the fixed version, and the
reference is the files that it changed.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from worldfork.core.errors import ConfigError
from worldfork.records.checked import check_path, checked_strings, checked_text, checked_variables
from worldfork.records.origin import Origin, TreeSource, WorldSource
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.places import TASK_DIRECTORY

LIMITS = TaskLimits(grade_cpu_s=300, grade_wall_s=900, memory_mb=2048, disk_mb=2048, rebuild_wall_s=600)
"""What a row that says nothing of limits may use: the slowest of them take some ten seconds of CPU."""

_FIELDS = ("task_id", "package", "base_version", "fix_version", "prompt")


def is_repository_row(row: Mapping[str, Any]) -> bool:
    """Tell whether a line of JSON is such a task."""
    return {"package", "base_version", "fix_version"} <= set(row)


def repository_task(row: Mapping[str, Any], limits: TaskLimits = LIMITS) -> Task:
    """Return the task of a row.

    Fields: `task_id`, `package`, `base_version`, `fix_version`, `prompt`, `editable` (here `*` crosses `/`),
    `changed_files`, `test_roots`, `test_files`, `test_args`; and where needed `dependencies`, `pythonpath` (relative),
    `env`, `rebuild` (one line or null), `fail_to_pass`, `pass_to_pass`, `stale_visible_tests` (named in the prompt,
    since they contradict what is asked for), `base_sha256`, `fix_sha256`. Others are for people. With `pythonpath` the
    world also gets the programs that the package's metadata there declares.

    Raises:
        ConfigError: a field is missing or malformed; `field` names it.
    """
    missing = sorted({*_FIELDS, "editable", "changed_files", "test_roots"} - set(row))
    if missing:
        raise ConfigError(f"field {missing[0]!r} is missing", field=missing[0])
    said = {name: checked_text(name, row[name]) for name in _FIELDS}
    lists = {name: _strings(row, name) for name in _LISTS}
    for name in ("test_roots", "changed_files", "pythonpath"):
        for path in lists[name]:
            if (name, path) != ("pythonpath", "."):
                check_path(name, path)
    package = said["package"]
    base = Origin(package=package, version=said["base_version"], sha256=row.get("base_sha256", ""))
    fix = Origin(package=package, version=said["fix_version"], sha256=row.get("fix_sha256", ""))
    return Task(
        task_id=said["task_id"],
        prompt=_prompt(said["prompt"], lists["stale_visible_tests"]),
        world=WorldSource(base, lists["dependencies"], _making_programs(lists["pythonpath"])),
        editable=tuple(_crossing(each) for each in lists["editable"]),
        tests_from=TreeSource(fix, lists["test_roots"]),
        test_roots=lists["test_roots"],
        test_args=(*lists["test_args"], *lists["test_files"]),
        solution_from=TreeSource(fix, lists["changed_files"]),
        rebuild=tuple(shlex.split(checked_text("rebuild", row.get("rebuild") or ""))),
        env=_variables(row, lists["pythonpath"]),
        fail_to_pass=lists["fail_to_pass"],
        pass_to_pass=lists["pass_to_pass"],
        score="fail_to_pass",
        limits=limits,
    )


_LISTS = (
    "dependencies",
    "pythonpath",
    "editable",
    "changed_files",
    "test_roots",
    "test_files",
    "test_args",
    "fail_to_pass",
    "pass_to_pass",
    "stale_visible_tests",
)


def _strings(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return checked_strings(name, row.get(name) or ())


def _crossing(pattern: str) -> str:
    """Return a pattern whose last `*` may stand for directories too, as one where only `**` does."""
    above, _, name = pattern.rpartition("/")
    return f"{above}/**/{name}".lstrip("/") if "*" in name and not above.endswith("**") else pattern


_PROGRAMS = """\
import importlib.metadata, os, sys, sysconfig
top = sysconfig.get_path("scripts")
for found in importlib.metadata.distributions(path=sys.argv[1:]):
    for point in found.entry_points:
        path = os.path.join(top, os.path.basename(point.name))
        if point.group != "console_scripts" or os.path.lexists(path):
            continue
        module, _, call = point.value.partition("[")[0].strip().partition(":")
        os.makedirs(top, exist_ok=True)
        with open(path, "x") as file:
            file.write(f"#!{sys.executable}\\nimport sys\\nfrom {module} import {call.split('.')[0]}\\n")
            file.write(f"sys.exit({call}())\\n")
        os.chmod(path, 0o755)
"""
"""Makes the programs that a source distribution's own metadata declares, as an installer would; none that is there is
replaced. They run the code in the task's directory, so that an edit of it counts."""


def _making_programs(paths: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return (("python", "-c", _PROGRAMS, *_inside(paths)),) if paths else ()


def _inside(paths: Sequence[str]) -> list[str]:
    return [TASK_DIRECTORY if each == "." else f"{TASK_DIRECTORY}/{each}" for each in paths]


def _variables(row: Mapping[str, Any], paths: Sequence[str]) -> dict[str, str]:
    found = checked_variables("env", row.get("env") or {})
    return {**found, "PYTHONPATH": ":".join(_inside(paths))} if paths else found


def _prompt(prompt: str, stale: Sequence[str]) -> str:
    if not stale:
        return prompt
    listed = "\n".join(f"- {each}" for each in stale)
    return f"{prompt}\n\nThese tests of the repository contradict what is asked for; do not go by them:\n{listed}\n"
