"""The verb export-episodes: a run as data for a trainer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from worldfork.cli.boundary import OK, verb
from worldfork.cli.printing import note, to_output
from worldfork.cli.task_files import RepositoriesFile, Repository, read_tasks
from worldfork.core.errors import ConfigError
from worldfork.rollout.exporting import chat_rows, episode_rows, pair_rows, print_rows, write_rows
from worldfork.rollout.stored import StoredRun


class Form(str, Enum):
    """What is written."""

    JSONL = "jsonl"
    PARQUET = "parquet"


class Select(str, Enum):
    """Which episodes are written."""

    ALL = "all"
    SCORED = "scored"
    BEST = "best"
    CORRECT = "correct"


@verb
def export_episodes(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    format: Annotated[Form, typer.Option(help="jsonl, or parquet (needs pyarrow).")] = Form.JSONL,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; default: standard output.")] = None,
    select: Annotated[Select, typer.Option(help="all, scored, best of each group, or correct.")] = Select.ALL,
    dedupe: Annotated[bool, typer.Option("--dedupe", help="Leave out episodes that left the same files.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="One conversation per episode.")] = False,
    pairs: Annotated[int, typer.Option(min=0, help="Instead: at most so many preference pairs per group.")] = 0,
    margin: Annotated[float, typer.Option(min=0, help="How much the rewards of a pair differ at least.")] = 0.0,
    tasks: Annotated[Path | None, typer.Option(help="The run's tasks, for their prompts.")] = None,
    repositories: RepositoriesFile = None,
    repository: Repository = None,
) -> int:
    """Write the episodes of a run as JSON lines or Parquet."""
    stored = StoredRun(run, None if tasks is None else read_tasks(tasks, None, repositories, repository))
    rows = _rows(stored, select.value, dedupe, chat, pairs, margin)
    if out is not None:
        count = write_rows(rows, out, format.value)
        note(f"worldfork: {count} rows in {out}.")
    elif format is Form.PARQUET:
        raise ConfigError("Parquet goes to a file", remedy="add --out FILE")
    else:
        with to_output():
            print_rows(rows, sys.stdout)
            sys.stdout.flush()
    return OK


def _rows(run: StoredRun, select: str, dedupe: bool, chat: bool, pairs: int, margin: float) -> Iterator[dict[str, Any]]:
    if pairs:
        if chat or select != Select.ALL.value:
            raise ConfigError("pairs are made of whole groups", remedy="leave out --chat and --select")
        return pair_rows(run, most=pairs, margin=margin)
    return (chat_rows if chat else episode_rows)(run, select=select, dedupe=dedupe)
