"""The verbs of tasks: whether they are fit to be trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from worldfork import Sandbox
from worldfork.cli.boundary import FAILED, OK, PARTIAL, verb
from worldfork.cli.leaks import leaks
from worldfork.cli.printing import print_json, print_line, print_table, progress
from worldfork.cli.regrade import read_verifier
from worldfork.cli.sandboxes import AsJson
from worldfork.cli.task_files import RepositoriesFile, Repository, read_tasks
from worldfork.records.task import Task
from worldfork.rollout.checking import Checker, TaskCheck
from worldfork.rollout.judges import home_calibrations
from worldfork.rollout.starts import StartingStates

tasks = typer.Typer(no_args_is_help=True, help="Look whether tasks are fit to be trained on.")


@tasks.command()
@verb
def check(
    tasks: Annotated[Path, typer.Argument(metavar="TASKS", help="Tasks, in any form that `worldfork rollout` takes.")],
    times: Annotated[int, typer.Option("-k", "--times", min=1, max=1000, help="How often each is graded.")] = 3,
    task: Annotated[list[str] | None, typer.Option(help="Only the task of this id; may be repeated.")] = None,
    verifier: Annotated[str | None, typer.Option(help="In the place of what the tasks name: a kind, or JSON.")] = None,
    world: Annotated[str | None, typer.Option(help="Snapshot that lies below tasks which name no world.")] = None,
    repositories: RepositoriesFile = None,
    repository: Repository = None,
    as_json: AsJson = False,
) -> int:
    """Grade the reference and the untouched state of each task, and refuse tasks that teach nothing."""
    chosen = read_tasks(tasks, task, repositories, repository)
    spec = read_verifier(verifier)
    checks = asyncio.run(_check(chosen, times, world, spec, quiet=as_json))
    if as_json:
        print_json([found.to_json() for found in checks])
    else:
        _print(checks)
    fit = sum(found.fit for found in checks)
    return OK if fit == len(checks) else PARTIAL if fit else FAILED


tasks.command("leaks")(leaks)


async def _check(
    chosen: list[Task], times: int, world: str | None, spec: Mapping[str, Any] | None, *, quiet: bool
) -> list[TaskCheck]:
    states = await StartingStates.open(None if world is None else Sandbox.get_snapshot(world))
    checker = Checker(states.get, home_calibrations(), None if spec is None else dict(spec))
    with progress("checking", total=len(chosen), quiet=quiet) as steps:
        return await checker.check_all(chosen, times, lambda found: steps.advance(found.task_id))


def _verifier(found: TaskCheck) -> str:
    """Return the kind of verifier that grades a task; behind the one that chose it, if one did."""
    kind = found.verifier_id.partition(":")[0]
    if kind != "auto" or found.split is None:
        return kind
    return f"auto: {'split' if found.split else 'pytest'}"


def _print(checks: list[TaskCheck]) -> None:
    rows = [
        (
            found.task_id,
            "fit" if found.fit else "refused",
            _verifier(found),
            f"{min(found.reference):.2f}" if found.reference else None,
            f"{max(found.nop):.2f}" if found.nop else None,
            f"{len(found.nop_passes)}/{len(found.expected)}",
            len(found.flaky),
            None if found.cpu_s is None else f"{found.cpu_s:.2f}",
        )
        for found in checks
    ]
    print_table(("task", "verdict", "verifier", "reference", "nop", "nop passes", "flaky", "CPU s"), rows)
    for found in checks:
        if found.why:
            print_line(f"{found.task_id}: {found.why}")
        if found.split_why:
            by = (
                "pytest, in one process with the code under test" if found.verifier_id.startswith("auto:") else "nobody"
            )
            print_line(f"{found.task_id}: judged by {by}, since it cannot be split: {found.split_why}")
        for limit, taken_s in found.tight.items():
            print_line(f"{found.task_id}: its reference takes {taken_s:g} s, more than a third of {limit}: raise it")
        if found.unmet:
            print_line(f"{found.task_id}: {len(found.unmet)} pass_to_pass do not pass here, such as {found.unmet[0]}")
    print_line(f"\n{len(checks)} tasks: {sum(found.fit for found in checks)} are fit")
