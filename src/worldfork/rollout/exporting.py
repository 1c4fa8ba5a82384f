"""The episodes of a run as rows for a trainer: plain, as conversations, or as pairs; to JSON lines or Parquet."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

from worldfork.core.errors import ConfigError
from worldfork.core.whole_file import whole_file
from worldfork.records.episode import Episode, Timings, ranked
from worldfork.records.trajectory import Step
from worldfork.reward.advantages import group_advantages
from worldfork.rollout.conversing import TOOLS, conversation, distinct, preference_pairs
from worldfork.rollout.stored import StoredGroup, StoredRun

Row = dict[str, Any]

SELECTIONS = ("all", "scored", "best", "correct")
"""Every episode; those with a reward; the best of each group; those with the reward 1."""

FORMATS = ("jsonl", "parquet")

PARQUET_BATCH = 256
"""Rows that are in memory at a time."""


def episode_rows(run: StoredRun, *, select: str = "all", dedupe: bool = False) -> Iterator[Row]:
    """Yield one flat row per episode: reward, parts, test ids, timings, lineage, diff and the steps of its trajectory.

    Every row has the same columns of the same kinds, so that a table can be made of them. `advantage` is the reward
    less the mean of its whole group, also where not all of it is selected. Times end with `_s`: seconds.

    Args:
        run: a stored run.
        select: one of `SELECTIONS`.
        dedupe: leave out episodes that left the same files as a better or an earlier one of their task.

    Raises:
        ConfigError: there is no such selection.
        Corrupt: a stored piece cannot be read.
    """
    for group, episodes in _selected(run, select, dedupe):
        advantages = dict(zip([each.key for each in group.episodes], group_advantages(group.rewards), strict=True))
        for episode in episodes:
            yield _row(run, episode, advantages[episode.key])


def chat_rows(run: StoredRun, *, select: str = "all", dedupe: bool = False) -> Iterator[Row]:
    """Yield one row per episode: `messages`, `tools`, and what it was worth. Arguments and errors as `episode_rows`.

    Raises:
        ConfigError: the run does not hold an episode's task, and so not its prompt.
    """
    for _, episodes in _selected(run, select, dedupe):
        for episode in episodes:
            yield {
                "messages": conversation(run, episode),
                "tools": json.dumps(TOOLS),
                "task_id": episode.task_id,
                "index": episode.index,
                "reward": episode.reward,
            }


def pair_rows(run: StoredRun, *, most: int = 1, margin: float = 0.0) -> Iterator[Row]:
    """Yield preference pairs of every group; see `conversing.preference_pairs`."""
    for group in run.groups:
        yield from preference_pairs(run, group, most=most, margin=margin)


def write_rows(rows: Iterable[Row], path: str | Path, format: str = "jsonl") -> int:
    """Write rows to a file, which appears whole or not at all; return how many.

    Args:
        rows: from one of the functions above.
        path: replaced if it is there.
        format: one of `FORMATS`. Parquet needs pyarrow, the extra `data`.

    Raises:
        ConfigError: no such format, pyarrow is missing, or the file cannot be written.
    """
    target = Path(path)
    if format not in FORMATS:
        raise ConfigError(f"there is no format {format!r}", remedy=f"use {' or '.join(FORMATS)}", format=format)
    write: Callable[[Iterable[Row], Path], int] = _write_parquet if format == "parquet" else _write_jsonl
    try:
        with whole_file(target) as part:
            return write(rows, part)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror or error}", path=str(target)) from error


def print_rows(rows: Iterable[Row], stream: TextIO) -> int:
    """Write rows as JSON lines to an open stream; return how many."""
    count = 0
    for row in rows:
        stream.write(json.dumps(row, allow_nan=False) + "\n")
        count += 1
    return count


def _selected(run: StoredRun, select: str, dedupe: bool) -> Iterator[tuple[StoredGroup, list[Episode]]]:
    if select not in SELECTIONS:
        raise ConfigError(
            f"there is no selection {select!r}", remedy=f"use one of {', '.join(SELECTIONS)}", select=select
        )
    for group in run.groups:
        chosen = [each for each in group.episodes if select == "all" or each.reward is not None]
        if select == "correct":
            chosen = [each for each in chosen if each.reward == 1.0]
        if dedupe:
            chosen = distinct(chosen)
        if select == "best":
            chosen = ranked(chosen)[:1]
        yield group, chosen


def _row(run: StoredRun, episode: Episode, advantage: float | None) -> Row:
    trajectory = run.trajectory(episode)
    failure = episode.failure
    task = run.tasks.get(episode.task_hash)
    return {
        "run_id": run.run_id,
        "task_id": episode.task_id,
        "task_hash": episode.task_hash,
        "policy_id": episode.policy_id,
        "group_id": episode.group_id,
        "index": episode.index,
        "rollout_id": episode.rollout_id,
        "seed": episode.seed,
        "attempt": episode.attempt,
        "reward": episode.reward,
        "advantage": advantage,
        "valid": episode.valid,
        "correct": episode.reward == 1.0,
        "parts": [{"name": name, "value": value} for name, value in sorted(episode.parts.items())],
        **{name: list(getattr(episode, name)) for name in _LISTS},
        "policy_end": episode.policy_end,
        "grade_end": episode.grade_end,
        "failure_kind": None if failure is None else failure.kind.value,
        "failure_code": None if failure is None else failure.code,
        "failure_message": None if failure is None else failure.message,
        "trust": episode.trust,
        "verifier_id": episode.verifier_id,
        "judged_by": episode.judged_by,
        "started_s": episode.started_s,
        **{each.name: getattr(episode.timings, each.name) for each in fields(Timings)},
        "snapshot_id": episode.snapshot_id,
        "sandbox_id": episode.sandbox_id,
        "grading_sandbox_id": episode.grading_sandbox_id,
        "final_snapshot_id": episode.final_snapshot_id,
        "edits": episode.edits,
        "prompt": None if task is None else task.prompt,
        "diff": run.diff(episode),
        "steps": [asdict(step) for step in trajectory.steps] if trajectory else [],
        "steps_truncated": bool(trajectory and trajectory.truncated),
        "facts": json.dumps(dict(trajectory.facts) if trajectory else {}, sort_keys=True),
    }


_LISTS = ("expected", "passed", "failed", "untouched", "faults")


def _write_jsonl(rows: Iterable[Row], path: Path) -> int:
    with path.open("w", encoding="utf-8") as file:
        return print_rows(rows, file)


def _write_parquet(rows: Iterable[Row], path: Path) -> int:
    arrow = _arrow()
    parquet = importlib.import_module("pyarrow.parquet")
    count, writer = 0, None
    remaining = iter(rows)
    try:
        while batch := list(itertools.islice(remaining, PARQUET_BATCH)):
            if writer is None:
                schema = _schema(arrow, batch[0])
                writer = parquet.ParquetWriter(path, schema, compression="zstd")
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
        if writer is None:
            schema = _schema(arrow, {})
            writer = parquet.ParquetWriter(path, schema)
    finally:
        if writer is not None:
            writer.close()
    return count


def _arrow() -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed", remedy="pip install 'worldfork[data]'"
        ) from None


def _schema(arrow: Any, row: Row) -> Any:
    """Return the columns of rows like this one; a plain episode's where there is none."""
    text, number, count = arrow.string(), arrow.float64(), arrow.int64()
    kinds: dict[str, Any] = {"int": count, "float": number, "bool": arrow.bool_(), "str": text}
    call = arrow.struct(
        [("id", text), ("type", text), ("function", arrow.struct([("name", text), ("arguments", text)]))]
    )
    message = arrow.struct(
        [("role", text), ("content", text), ("tool_calls", arrow.list_(call)), ("tool_call_id", text), ("name", text)]
    )
    known: dict[str, Any] = {
        **dict.fromkeys((*_LISTS,), arrow.list_(text)),
        **dict.fromkeys(("messages", "prompt", "chosen", "rejected"), arrow.list_(message)),
        **dict.fromkeys(("index", "seed", "attempt", "index_chosen", "index_rejected"), count),
        **dict.fromkeys(("valid", "correct", "steps_truncated"), arrow.bool_()),
        "parts": arrow.list_(arrow.struct([("name", text), ("value", number)])),
        "steps": arrow.list_(
            arrow.struct([(each.name, kinds[str(each.type).partition(" ")[0]]) for each in fields(Step)])
        ),
        **dict.fromkeys(("reward", "advantage", "score_chosen", "score_rejected", "started_s"), number),
        **dict.fromkeys([each.name for each in fields(Timings)], number),
    }
    if "messages" not in row and "chosen" not in row:
        known["prompt"] = text
    columns = row or dict.fromkeys(_EMPTY_COLUMNS)
    return arrow.schema([(name, known.get(name, text)) for name in columns])


_EMPTY_COLUMNS = ("run_id", "task_id", "index", "reward")
