"""What the verbs print: tables or JSON on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from worldfork.cli.shapes import error_shape
from worldfork.core.errors import WorldforkError

_PIPE_WIDTH = 100_000


def console(*, error: bool = False) -> Console:
    """Make a console for standard output or, with `error`, for standard error.

    Where the stream is no terminal its lines are never cut or wrapped: another program reads them.
    """
    stream = sys.stderr if error else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=width is None)


def print_line(text: str = "") -> None:
    """Print one line as it is on standard output, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Print one line as it is on standard error, at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def print_json(value: object) -> None:
    """Print one JSON document on standard output; names that are not UTF-8 as escapes of their bytes."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2, default=str)
    print_line(text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str = "") -> None:
    """Print rows under their column names, or `empty` where there are none."""
    if not rows and empty:
        print_line(empty)
        return
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, no_wrap=position == 0, overflow="fold")
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    shown = console()
    with shown.capture() as captured:
        shown.print(table, soft_wrap=False)
    for line in captured.get().splitlines():
        print_line(line.rstrip())


def print_error(error: WorldforkError, *, as_json: bool) -> None:
    """Print an error on standard error: one sentence and its remedy, or a JSON object with the same facts."""
    if not as_json:
        note(f"worldfork: {_sentence(error.message)}")
        if error.remedy:
            note(f"  try: {error.remedy}")
        return
    note(json.dumps({"error": error_shape(error)}, ensure_ascii=False))


def _sentence(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if one_line.endswith((".", "!", "?")) else f"{one_line}."


def human_bytes(size_bytes: int | None) -> str:
    """Return a size such as `1.5 MiB`; `-` for an unknown one."""
    if size_bytes is None:
        return "-"
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def human_seconds(duration_s: float) -> str:
    """Return a duration in the unit that suits it: `850 us`, `3.2 ms`, `7.20 s`."""
    if duration_s < 0.001:
        return f"{duration_s * 1e6:.0f} us"
    if duration_s < 1:
        return f"{duration_s * 1e3:.1f} ms"
    return f"{duration_s:.2f} s"


class Steps(Protocol):
    """Where long work says how far it is."""

    def advance(self, text: str | None = None) -> None:
        """Count one more step; `text` replaces what is shown."""
        ...


class _Silent:
    def advance(self, text: str | None = None) -> None:
        """Show nothing."""


class _Shown:
    def __init__(self, progress: Progress, text: str, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(text, total=total)

    def advance(self, text: str | None = None) -> None:
        """Move the bar."""
        self._progress.update(self._task, advance=1, description=text)


@contextmanager
def progress(text: str, *, total: int | None = None, quiet: bool = False) -> Iterator[Steps]:
    """Show progress on standard error while the block runs; nothing at all where that is no terminal or `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield _Silent()
        return
    columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if total is not None:
        columns[2:2] = [BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, console=console(error=True), transient=True) as shown:
        yield _Shown(shown, text, total)
