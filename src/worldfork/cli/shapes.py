"""JSON shapes that are the command line's own. Programs read them: keys are added, never renamed or dropped."""

from __future__ import annotations

import datetime
from typing import Any

from worldfork.core.errors import WorldforkError
from worldfork.sandbox.command import CommandResult


def typed(error: Exception) -> WorldforkError:
    """Return an error of the library as it is, and a foreign one in its root's clothes."""
    return error if isinstance(error, WorldforkError) else WorldforkError(f"{type(error).__name__}: {error}")


def error_shape(error: WorldforkError) -> dict[str, Any]:
    """Return what a program needs to know of an error."""
    return {
        "code": error.code,
        "message": error.message,
        "remedy": error.remedy,
        "retryable": error.retryable,
        "fields": {name: _plain(value) for name, value in error.fields.items()},
    }


def result_shape(result: CommandResult) -> dict[str, Any]:
    """Return the end of a command and its output; bytes that are not UTF-8 become U+FFFD."""
    return {
        "exit_code": result.exit_code,
        "reason": result.reason.value,
        "signal": result.signal,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "max_rss_bytes": result.max_rss_bytes,
    }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)


def when(moment_s: float | None) -> str:
    """Return a moment (seconds since the epoch) as local date and time; as it is where no calendar has it."""
    if moment_s is None:
        return "-"
    try:
        return datetime.datetime.fromtimestamp(moment_s).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{moment_s:g} s"
