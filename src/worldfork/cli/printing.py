"""What the verbs print: tables or JSON on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from worldfork.cli.shapes import error_shape
from worldfork.core.errors import WorldforkError
from worldfork.store.failures import from_system

_PIPE_WIDTH = 100_000
_CONTROLS = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def console(*, error: bool = False) -> Console:
    """Make a console for standard output or, with `error`, for standard error.

    Where the stream is no terminal its lines are never cut or wrapped: another program reads them.
    """
    stream = sys.stderr if error else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=width is None)


def one_line(text: str) -> str:
    """Return a text that may hold anything as one line that a terminal only shows: what is not printable is escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def _shown(text: str) -> str:
    """Return lines of ours, in which there may be words of others."""
    return "\n".join(map(one_line, text.split("\n")))


def print_line(text: str = "") -> None:
    """Print lines on standard output, at once. Nothing in them is a command to the terminal."""
    with to_output():
        _write(sys.stdout, _shown(text))


def note(text: str) -> None:
    """Print lines on standard error, at once. Nothing in them is a command to the terminal."""
    _write(sys.stderr, _shown(text))


def print_bytes(data: bytes) -> None:
    """Put bytes on standard output as they are, at once."""
    with to_output():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


@contextmanager
def to_output() -> Iterator[None]:
    """Let no failure of standard output out untyped, but for that of a reader who went away."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is left in the buffer is written at exit once more, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise from_system(error, "standard output cannot be written") from error


def _write(stream: TextIO, text: str) -> None:
    stream.write(f"{text}\n")
    stream.flush()


def print_json(value: object) -> None:
    """Print one JSON document on standard output; names that are not UTF-8 as escapes of their bytes."""
    with to_output():
        _write(sys.stdout, _json(value, indent=2))


def _json(value: object, indent: int | None = None) -> str:
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    # Control characters of a terminal that JSON does not escape, and what is no text.
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str = "") -> None:
    """Print rows under their column names, or `empty` where there are none."""
    if not rows and empty:
        print_line(empty)
        return
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, no_wrap=position == 0, overflow="fold")
    for row in rows:
        table.add_row(*("-" if cell is None else one_line(str(cell)) for cell in row))
    shown = console()
    with to_output():
        with shown.capture() as captured:
            shown.print(table, soft_wrap=False)
        for line in captured.get().splitlines():
            _write(sys.stdout, line.rstrip())


def print_error(error: WorldforkError, *, as_json: bool) -> None:
    """Print an error on standard error: one sentence and its remedy, or a JSON object with the same facts."""
    if not as_json:
        note(f"worldfork: {_sentence(error.message)}")
        if error.remedy:
            note(f"  try: {error.remedy}")
        return
    _write(sys.stderr, _json({"error": error_shape(error)}))


def _sentence(text: str) -> str:
    # Blanks within a line stay: a message may quote lines that differ in nothing else.
    one_line = " ".join(line for each in text.splitlines() if (line := each.strip()))
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
