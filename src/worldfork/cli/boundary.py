"""Where a verb meets the shell: every outcome becomes an exit code, every known error one sentence."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer

from worldfork.cli.printing import note, print_error
from worldfork.core.errors import ERROR_TABLE, WorldforkError
from worldfork.core.idmap import Lacking, find_id_map, own_map
from worldfork.core.settings import load_settings

OK = 0
FAILED = 1
PARTIAL = 3
"""Some of a batch worked."""
CANCELLED = 130
"""Interrupted by the person at the keyboard."""
PIPE_CLOSED = 128 + signal.SIGPIPE
_TRIED = "_WORLDFORK_WITH_IDS"
"""A variable that says that this command line has been run again, be it that there was no range after all."""

P = ParamSpec("P")


def exit_code(error: WorldforkError) -> int:
    """Return the exit code that belongs to an error."""
    return ERROR_TABLE.get(error.code, ERROR_TABLE["worldfork"])[1]


def use_id_range() -> None:
    """Do as `run_with_ids` where sandboxes have ranges of ids; for verbs that read and write layers' files."""
    if load_settings().id_range == "auto":
        run_with_ids()


def run_with_ids() -> None:
    """Run this command line again from its beginning, in a process with this user's range of ids.

    Returns where there is no range, or this is such a process.
    """
    if _TRIED in os.environ or own_map() or isinstance(find_id_map(), Lacking):
        return
    sys.stdout.flush()
    command = [sys.executable, "-P", "-m", "worldfork.core.mapped", "worldfork.cli.main", *sys.argv[1:]]
    # Root of a namespace has another home by default.
    os.execve(sys.executable, command, {**os.environ, "WORLDFORK_HOME": str(load_settings().home), _TRIED: "1"})


def verb(function: Callable[P, int | None]) -> Callable[P, None]:
    """Make a typer command of a function that returns its exit code (or nothing for success).

    Errors of the library are printed and become the exit code of their row in `ERROR_TABLE`; anything else is a
    defect of ours and keeps its traceback. A parameter named `as_json` decides the form in which errors are printed.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = function(*args, **kwargs) or OK
            sys.stdout.flush()
        except WorldforkError as error:
            if error.fields.get("needs_ids"):
                run_with_ids()
            print_error(error, as_json=bool(kwargs.get("as_json")))
            code = exit_code(error)
        except KeyboardInterrupt:
            note("worldfork: interrupted.")
            code = CANCELLED
        except BrokenPipeError:
            # The interpreter flushes standard output once more at exit, which would complain again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = PIPE_CLOSED
        if code != OK:
            raise typer.Exit(code)

    return run
