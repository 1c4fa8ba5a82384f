"""The distribution's programs that make parts of images: run to their end within a limit, or an error says why not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from worldfork.core.errors import DriverUnavailable, OutOfSpace

_FULL = "No space left on device"
_WORDS = 300
_LINES = 3


def run_program(
    argv: list[str],
    directory: Path,
    limit_s: float,
    remedy: str,
    *,
    variables: Mapping[str, str] | None = None,
    pass_fds: Iterable[int] = (),
) -> str:
    """Run a program and return what it printed. Blocking; what it started in its session ends with it.

    Raises:
        DriverUnavailable: it is not there, failed, or took too long; with `remedy`.
        OutOfSpace: it says that the disk is full.
    """
    try:
        process = subprocess.Popen(
            argv,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C", **(variables or {})},
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
    except OSError as error:
        raise DriverUnavailable(f"{argv[0]} could not be started: {error.strerror}", remedy=remedy) from error
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise DriverUnavailable(f"{argv[0]} did not end within {limit_s:g} s", remedy=remedy) from None
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        _explain(argv, out.decode(errors="replace"), err.decode(errors="replace"), remedy)
    return out.decode(errors="replace")


def _explain(argv: list[str], out: str, err: str, remedy: str) -> None:
    if _FULL in err or _FULL in out:
        raise OutOfSpace(
            f"{argv[0]} found the disk full", remedy="free some on that disk, or worldfork prune", scope="host"
        )
    last = [line.strip() for line in (err.strip() or out.strip()).splitlines()[-_LINES:]]
    shown = " ".join(word for word in argv if "\n" not in word)[:_WORDS]
    raise DriverUnavailable(f"{shown} failed: {'; '.join(last)[-_WORDS:]}", remedy=remedy)
