"""What the program of the candidate's fork loads before the candidate does."""

from __future__ import annotations

import subprocess
import sys

from worldfork.reward.split.frames import program_argument
from worldfork.reward.split.relay import candidate_program

_SLOW = {"typing", "collections", "collections.abc", "datetime", "re", "enum", "functools", "contextlib", "decimal"}


def test_it_loads_no_module_that_takes_long() -> None:
    command = [sys.executable, "-I", "-S", "-X", "importtime", "-c", program_argument()]
    done = subprocess.run(command, input=candidate_program(), capture_output=True, timeout=60)
    lines = [line for line in done.stderr.decode().splitlines() if line.startswith("import time:")]
    loaded = {line.rpartition("|")[2].strip() for line in lines}
    assert {"struct", "importlib"} <= loaded, done.stderr.decode()
    assert not loaded & _SLOW
