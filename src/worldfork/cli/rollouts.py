"""The verb rollout: tasks, a policy, graded groups."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from worldfork import Sandbox
from worldfork.cli.boundary import OK, PARTIAL, verb
from worldfork.cli.printing import note, print_json, print_line, print_table, progress
from worldfork.cli.regrade import read_verifier
from worldfork.cli.sandboxes import AsJson
from worldfork.cli.task_files import RepositoriesFile, Repository, read_tasks
from worldfork.core.errors import ConfigError, StoreError, WorldforkError
from worldfork.records.episode import Episode
from worldfork.records.task import Task
from worldfork.rollout.group import check_rollouts, run_rollouts
from worldfork.rollout.journal import Journal
from worldfork.rollout.judges import judges
from worldfork.rollout.policies import policy_named
from worldfork.rollout.report.figures import was_stopped
from worldfork.rollout.run_directory import RunDirectory
from worldfork.rollout.stopping import ENOUGH, StopRule
from worldfork.rollout.stored import JOURNAL


class Seeds(str, Enum):
    """How the seeds of a group's forks come about."""

    DERIVED = "derived"
    SHARED = "common"
    INDEPENDENT = "independent"


class Keep(str, Enum):
    """Whose final state is kept."""

    BEST = "best"
    ALL = "all"


@verb
def rollout(
    tasks: Annotated[Path, typer.Argument(metavar="TASKS", help="Tasks: a file or a directory, in any known form.")],
    policy: Annotated[str, typer.Option(help="nop, reference, mutate, candidates:DIR, command:LINE or host:LINE.")],
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Size of each group.")] = 1,
    run: Annotated[Path | None, typer.Option(help="Directory that keeps the episodes.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that is there.")] = False,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Rollouts at a time; default: processors.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Only the task of this id; may be repeated.")] = None,
    world: Annotated[
        str | None, typer.Option(help="Snapshot to lay the tasks over; it has pytest, pytest-timeout.")
    ] = None,
    seeds: Annotated[Seeds, typer.Option(help="Of the forks of a group.")] = Seeds.DERIVED,
    seed: Annotated[int, typer.Option(help="Derives other seeds.")] = 0,
    keep: Annotated[Keep | None, typer.Option(help="Whose final state is kept as a snapshot.")] = None,
    deadline: Annotated[float | None, typer.Option(min=0.001, help="Seconds for the whole run.")] = None,
    successes: Annotated[int | None, typer.Option(min=1, help="End a group after so many rewards of 1.")] = None,
    target: Annotated[float | None, typer.Option(min=0, max=1, help="End a group at a reward of so much.")] = None,
    no_variance: Annotated[int | None, typer.Option(min=2, help="End a group after so many equal rewards.")] = None,
    verifier: Annotated[str | None, typer.Option(help="In the place of each task's own: a kind, or JSON.")] = None,
    repositories: RepositoriesFile = None,
    repository: Repository = None,
    as_json: AsJson = False,
) -> int:
    """Run and grade groups of rollouts, and print their episodes."""
    chosen = _judged(read_tasks(tasks, task, repositories, repository), read_verifier(verifier))
    actor = policy_named(policy)
    state = None if world is None else Sandbox.get_snapshot(world)
    rule = _stop_rule(successes, target, no_variance)
    check_rollouts(chosen, n, concurrency, seeds=seeds.value, keep=None if keep is None else keep.value)
    began_s = time.perf_counter()
    with _journal(run, resume) as journal, progress("rolling out", total=len(chosen) * n, quiet=as_json) as steps:
        episodes = asyncio.run(
            run_rollouts(
                chosen,
                actor,
                n=n,
                world=state,
                concurrency=concurrency,
                journal=journal,
                run=None if run is None else RunDirectory(run),
                seeds=seeds.value,
                seed=seed,
                keep=None if keep is None else keep.value,
                deadline_s=deadline,
                stop=rule,
                on_episode=lambda episode: steps.advance(episode.task_id),
            )
        )
    _print_all(episodes, time.perf_counter() - began_s, as_json)
    return PARTIAL if any(_is_missing(episode) for episode in episodes) else OK


def _failed(episode: Episode) -> bool:
    """Tell whether a rollout failed: what a stop rule or the deadline cut off did not."""
    return episode.failure is not None and not was_stopped(episode)


def _is_missing(episode: Episode) -> bool:
    """Tell whether a reward is missing that was asked for: a stop rule asks for no more, a deadline does."""
    return episode.failure is not None and episode.failure.code != ENOUGH


def _judged(tasks: list[Task], verifier: Mapping[str, Any] | None) -> list[Task]:
    if verifier is None:
        return tasks
    # One that is none is found out before a run is made of it.
    judge, judged = judges(), [replace(task, verifier=dict(verifier)) for task in tasks]
    for task in judged:
        judge(task)
    return judged


def _stop_rule(successes: int | None, target: float | None, no_variance: int | None) -> StopRule | None:
    if successes is None and target is None and no_variance is None:
        return None
    return StopRule(successes=successes, target_reward=target, no_variance=no_variance)


@contextlib.contextmanager
def _journal(run: Path | None, resume: bool) -> Iterator[Journal | None]:
    if run is None:
        if resume:
            raise ConfigError("--resume needs the directory of the run", remedy="add --run DIR")
        yield None
        return
    with Journal.open(run / JOURNAL) as journal:
        if not resume and any(True for _ in journal.episodes()):
            raise ConfigError(
                f"{run} already holds a run",
                remedy="add --resume to go on with it, or name another --run",
                run=str(run),
            )
        try:
            yield journal
        except OSError as error:
            if isinstance(error, WorldforkError):
                raise
            raise StoreError(f"the run in {run} could not be written: {error.strerror or error}") from error


def _print_all(episodes: Sequence[Episode], took_s: float, as_json: bool) -> None:
    if as_json:
        print_json([episode.to_json() for episode in episodes])
    else:
        _print_groups(episodes, took_s)


def _print_groups(episodes: Sequence[Episode], took_s: float) -> None:
    rows = []
    for task_id, members in groupby(episodes, key=lambda episode: episode.task_id):
        group = list(members)
        rewards = [episode.reward for episode in group if episode.reward is not None]
        rows.append(
            (
                task_id,
                len(group),
                f"{statistics.fmean(rewards):.3f}" if rewards else None,
                f"{min(rewards):.2f} to {max(rewards):.2f}" if rewards else None,
                f"{max(len(episode.passed) for episode in group)}/{max(len(episode.expected) for episode in group)}",
                sum(map(_failed, group)),
                sum(map(was_stopped, group)),
            )
        )
    print_table(("task", "rollouts", "mean reward", "rewards", "best passed", "failed", "stopped"), rows)
    scored = [episode.reward for episode in episodes if episode.reward is not None]
    mean = f"mean reward {statistics.fmean(scored):.4f}, {scored.count(1.0)} with 1.0" if scored else "no reward"
    failed_n, stopped_n = sum(map(_failed, episodes)), sum(map(was_stopped, episodes))
    stopped = f", {stopped_n} stopped" if stopped_n else ""
    print_line(f"\n{len(episodes)} rollouts in {took_s:.1f} s: {mean}, {failed_n} failed{stopped}")
    for episode in episodes:
        if episode.failure is not None and _is_missing(episode):
            kind, message = episode.failure.kind.value, episode.failure.message
            how = f"failed ({kind})" if _failed(episode) else f"was {kind} ({episode.failure.code})"
            note(f"worldfork: {episode.task_id} rollout {episode.index} {how}: {message}")
