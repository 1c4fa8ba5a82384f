"""The verb tasks leaks: whether worlds hold the answers to their tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from worldfork import Sandbox
from worldfork.cli.boundary import FAILED, OK, PARTIAL, verb
from worldfork.cli.printing import print_json, print_line, print_table, progress
from worldfork.cli.sandboxes import AsJson
from worldfork.cli.task_files import RepositoriesFile, Repository, read_tasks
from worldfork.lineage.place import place
from worldfork.records.task import Task
from worldfork.rollout.leaks.scanning import LeakReport, find_leaks, to_json
from worldfork.rollout.starts import StartingStates


@verb
def leaks(
    tasks: Annotated[Path, typer.Argument(metavar="TASKS", help="Tasks, in any form that `worldfork rollout` takes.")],
    task: Annotated[list[str] | None, typer.Option(help="Only the task of this id; may be repeated.")] = None,
    world: Annotated[str | None, typer.Option(help="Snapshot that lies below tasks which name no world.")] = None,
    repositories: RepositoriesFile = None,
    repository: Repository = None,
    as_json: AsJson = False,
) -> int:
    """Look for references and hidden tests in the worlds that policies start from."""
    chosen = read_tasks(tasks, task, repositories, repository)
    reports = asyncio.run(_look(chosen, world, as_json))
    if as_json:
        print_json([to_json(report) for report in reports])
    else:
        _print(reports)
    if any(report.certain for report in reports):
        return FAILED
    return OK if all(report.complete for report in reports) else PARTIAL


async def _look(chosen: list[Task], world: str | None, quiet: bool) -> list[LeakReport]:
    states = await StartingStates.open(None if world is None else Sandbox.get_snapshot(world))
    reports = []
    with progress("looking", total=len(chosen), quiet=quiet) as steps:
        for task in chosen:
            reports.append(await find_leaks(place(), task, await states.get(task)))
            steps.advance(task.task_id)
    return reports


def _print(reports: list[LeakReport]) -> None:
    rows = [
        (report.task_id, "yes" if leak.certain else "perhaps", leak.kind, leak.path, leak.why)
        for report in reports
        for leak in report.leaks
    ]
    if rows:
        print_table(("task", "leak", "kind", "path", "why"), rows)
    certain = sum(bool(report.certain) for report in reports)
    partly = sum(not report.complete for report in reports)
    print_line(
        f"{len(reports)} tasks: {certain} with a certain leak, "
        f"{sum(bool(report.leaks) for report in reports) - certain} with something to look at"
        + (f"; {partly} worlds were too large to be looked through" if partly else "")
    )
