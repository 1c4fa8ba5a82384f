"""The verb regrade: a stored run, graded again."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from worldfork import Sandbox
from worldfork.cli.boundary import OK, PARTIAL, verb
from worldfork.cli.printing import note, print_json, print_line, print_table, progress
from worldfork.cli.sandboxes import AsJson
from worldfork.cli.task_files import RepositoriesFile, Repository, read_tasks
from worldfork.core.errors import ConfigError
from worldfork.rollout.regrading import REGRADED, Regraded
from worldfork.rollout.regrading import regrade as grade_again
from worldfork.rollout.stored import StoredRun


@verb
def regrade(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    verifier: Annotated[
        str | None, typer.Option(help="pytest, split, ... or its JSON object; default: each task's own.")
    ] = None,
    tasks: Annotated[Path | None, typer.Option(help="The run's tasks, where it does not hold them.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Gradings at a time; default: processors.")] = None,
    world: Annotated[str | None, typer.Option(help="Snapshot that the tasks were laid over.")] = None,
    repositories: RepositoriesFile = None,
    repository: Repository = None,
    as_json: AsJson = False,
) -> int:
    """Grade a run again from what its policies left, without running them."""
    stored = StoredRun(run, None if tasks is None else read_tasks(tasks, None, repositories, repository))
    state = None if world is None else Sandbox.get_snapshot(world)
    with progress("grading again", total=len(stored.episodes), quiet=as_json) as steps:
        results = asyncio.run(
            grade_again(
                stored,
                verifier=read_verifier(verifier),
                world=state,
                concurrency=concurrency,
                on_episode=lambda each: steps.advance(each.after.task_id),
            )
        )
    if as_json:
        print_json([each.after.to_json() for each in results])
    else:
        _print(results, len(stored.episodes), run)
    nothing = bool(stored.episodes) and not results
    return PARTIAL if nothing or any(not each.after.valid for each in results) else OK


def read_verifier(text: str | None) -> Mapping[str, Any] | None:
    """Return what a command line says of a verifier: a kind, or a whole JSON object.

    Raises:
        ConfigError: it is neither.
    """
    if text is None:
        return None
    if not text.lstrip().startswith("{"):
        return {"kind": text.strip()}
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--verifier is no JSON: {error}", remedy='write {"kind": "pytest"}, or pytest') from None
    return dict(data)


def _print(results: Sequence[Regraded], stored: int, run: Path) -> None:
    rows = [
        (each.before.task_id, each.before.index, _shown(each.before.reward), _shown(each.after.reward))
        for each in results
        if each.changed
    ]
    if rows:
        print_table(("task", "rollout", "before", "now"), rows)
    both = [each for each in results if each.before.reward is not None and each.after.reward is not None]
    before = [each.before.reward for each in both if each.before.reward is not None]
    now = [each.after.reward for each in both if each.after.reward is not None]
    scored = sum(each.after.valid for each in results)
    means = f"mean reward {_mean(before)} before, {_mean(now)} now" if both else "none has a reward both before and now"
    print_line(f"{scored} of {stored} episodes have a reward now; of {len(both)}: {means}, {len(rows)} changed")
    if len(results) < stored:
        note(f"worldfork: {stored - len(results)} left out: what they left, or the final state, was not kept")
    if results:
        print_line(f"kept below {run / REGRADED}")
    for each in results:
        if each.after.failure is not None:
            kind, message = each.after.failure.kind.value, each.after.failure.message
            note(f"worldfork: {each.before.task_id} rollout {each.before.index} failed ({kind}): {message}")


def _shown(reward: float | None) -> str | None:
    return None if reward is None else f"{reward:.3f}"


def _mean(rewards: Sequence[float]) -> str:
    return f"{statistics.fmean(rewards):.4f}" if rewards else "none"
