"""Looking for a regular expression in a text that a policy wrote."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys

from worldfork.core.errors import VerifierError
from worldfork.records.episode import FailureKind

_MATCH_WALL_S = 120.0
"""As a backstop: 5 s of CPU end a search, and a machine that gives it none within this time is overloaded."""
_FOUND, _NOT_FOUND, _TOO_LARGE = 10, 11, 12
_MATCH_PROGRAM = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (5, 6))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    pattern, text = json.loads(sys.stdin.buffer.readline()), sys.stdin.buffer.read().decode("utf-8")
    code = {_FOUND} if re.search(pattern, text, re.MULTILINE) else {_NOT_FOUND}
except (MemoryError, RecursionError):
    code = {_TOO_LARGE}
sys.exit(code)
"""


async def matches(pattern: str, text: str) -> bool:
    """Look for an expression in a process that can be ended: it can take for ever on a policy's text.

    Raises:
        VerifierError: the machine had no CPU or no memory for it.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        "-c",
        _MATCH_PROGRAM,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_MATCH_WALL_S):
            await process.communicate(json.dumps(pattern).encode("ascii") + b"\n" + text.encode("utf-8"))
    except TimeoutError:
        raise _not_looked_for("had no CPU", FailureKind.OVERLOAD) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode in (_FOUND, _NOT_FOUND, _TOO_LARGE, -signal.SIGXCPU):
        return process.returncode == _FOUND
    if process.returncode == -signal.SIGKILL:
        raise _not_looked_for("was killed", FailureKind.MEMORY)
    raise _not_looked_for(f"ended with {process.returncode}", FailureKind.GRADING)


def _not_looked_for(what: str, kind: FailureKind) -> VerifierError:
    return VerifierError(
        f"the process that looks for an expression {what}", remedy="run fewer rollouts at once", kind=kind
    )
