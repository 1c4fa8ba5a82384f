"""The verb report: a run as one page, and in short on the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from worldfork.cli.boundary import OK, verb
from worldfork.cli.printing import note, print_json, print_line, print_table
from worldfork.cli.sandboxes import AsJson
from worldfork.rollout.report import RunFigures, figures_of, write_report
from worldfork.rollout.report.figures import STAGES, GroupFigures, Interval
from worldfork.rollout.report.text import number, seconds
from worldfork.rollout.stored import StoredRun

PAGE = "report.html"
ROWS = 20


@verb
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The page; default: report.html in RUN.")] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="Print the short form alone.")] = False,
    as_json: AsJson = False,
) -> int:
    """Write a run's report as one HTML file, and print the short form."""
    stored = StoredRun(run)
    target = out or stored.directory / PAGE
    figures = figures_of(stored) if no_page else write_report(stored, target)
    if as_json:
        print_json(_shape(figures))
    else:
        print_short(figures)
    if not no_page:
        note(f"\nworldfork: the page is {target}.")
    return OK


def print_short(figures: RunFigures) -> None:
    """Print the groups from the lowest mean reward, failures by kind, and where the time went."""
    ordered = sorted(
        figures.groups, key=lambda each: (each.mean if each.mean is not None else -1.0, each.group.task_id)
    )
    print_table(
        ("task", "rollouts", "mean", "with 1", "95 %", "failed", "median time"),
        [_row(each) for each in ordered[:ROWS]],
        empty="The run holds no episodes.",
    )
    if len(ordered) > ROWS:
        print_line(f"... and {len(ordered) - ROWS} groups with higher means")
    mean = "no reward" if figures.mean is None else f"mean reward {_around(figures.mean, 3)}"
    print_line(
        f"\n{figures.ran_n} rollouts of {figures.tasks_n} tasks in {seconds(figures.wall_s)}: {mean}, "
        f"{figures.solved_n} tasks solved, {figures.full_n} rollouts with 1, {figures.failed_n} failed"
    )
    if figures.stopped_n:
        why = ", ".join(f"{code} {count}" for code, count in figures.stops)
        print_line(f"not run to their end: {figures.stopped_n} more ({why})")
    if figures.pass_at:
        print_line("pass@k: " + ", ".join(f"{k}: {chance:.3f}" for k, chance in figures.pass_at))
    if figures.judges:
        print_line("judged by: " + ", ".join(f"{kind} {count}" for kind, count in figures.judges))
    if figures.failures:
        print_line("failures: " + ", ".join(f"{kind} {count}" for kind, count, _ in figures.failures))
    total = sum(figures.stages.values())
    if total > 0:
        parts = [f"{name.replace('_', '-')} {figures.stages[name] / total:.0%}" for name in STAGES]
        idle = (
            "" if figures.idle_share is None else f"; no policy thinking for {figures.idle_share:.0%} of the wall time"
        )
        print_line(f"time: {', '.join(parts)}{idle}")


def _row(figures: GroupFigures) -> Sequence[object]:
    rate = figures.rate
    return (
        figures.group.task_id,
        figures.ran_n,
        number(figures.mean),
        figures.full_n,
        None if rate is None else f"{rate.low:.2f} to {rate.high:.2f}",
        figures.failed_n,
        seconds(figures.median_s),
    )


def _around(interval: Interval, digits: int) -> str:
    return f"{interval.value:.{digits}f} ({interval.low:.{digits}f} to {interval.high:.{digits}f})"


def _shape(figures: RunFigures) -> dict[str, Any]:
    whole = {
        each.name: getattr(figures, each.name)
        for each in dataclasses.fields(figures)
        if each.name not in ("groups", "failures", "over_time", "mean", "rate")
    }
    return {
        **whole,
        "mean": None if figures.mean is None else dataclasses.asdict(figures.mean),
        "rate": None if figures.rate is None else dataclasses.asdict(figures.rate),
        "failures": {kind: count for kind, count, _ in figures.failures},
        "groups": [
            {
                "task_id": each.group.task_id,
                "policy_id": each.group.policy_id,
                "rewards": each.group.rewards,
                "mean": each.mean,
                "full_n": each.full_n,
                "failed_n": each.failed_n,
                "median_s": each.median_s,
                "stages": dict(each.stages),
            }
            for each in figures.groups
        ],
    }
