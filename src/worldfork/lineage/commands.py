"""Running commands in a live sandbox."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from worldfork.lineage.handle import Handle, Rlimits
from worldfork.sandbox.command import CommandResult, Reason
from worldfork.sandbox.connection import MAX_OUTPUT_BYTES
from worldfork.sandbox.process import Process

SH_OUTPUT_BYTES = 64 * 1024
"""What `sh` keeps, head and tail: about what an agent's context takes."""
_ARGUMENT_BYTES = 120 * 1024
"""The kernel takes 128 KiB in one argument."""


class Commands(Handle):
    """The calls that run a command to its end."""

    async def run(
        self,
        command: str,
        args: Iterable[str] | None = None,
        env: Mapping[str, str] | None = None,
        working_dir: str | None = None,
        timeout: float | None = None,
        user: str | None = None,
        *,
        stdin: bytes | str | None = None,
        check: bool = False,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        rlimits: Rlimits = (),
    ) -> CommandResult:
        """Run a program to its end and return what it printed and how it ended.

        Never raises for an exit code, a time limit or an output limit unless `check`; see `CommandResult.reason`.
        Cancelling the call kills the whole process tree.

        Args:
            timeout: seconds of wall time; the whole tree ends at it, what was printed is kept.
            stdin: sent, then closed; /dev/null without it.
            max_output_bytes: above it, on either stream, the tree is killed with the reason `output_limit`.

        Raises:
            SandboxDied: the sandbox is gone; CommandFailed, CommandTimeout: with `check` only.
        """
        connection = await self._live.connection()
        data = stdin.encode() if isinstance(stdin, str) else stdin
        spec = self._spec(
            (command, *(args or ())), env, working_dir, timeout, user, stdin=data or False, rlimits=rlimits
        )
        result = await connection.run(spec, max_output_bytes=max_output_bytes)
        return result.check() if check else result

    async def sh(
        self,
        line: str,
        timeout: float | None = None,
        *,
        env: Mapping[str, str] | None = None,
        working_dir: str | None = None,
        user: str | None = None,
        check: bool = False,
        max_output_bytes: int = SH_OUTPUT_BYTES,
    ) -> CommandResult:
        """Run one line in the world's shell (bash, else sh), as an agent sends it.

        stderr goes into stdout in the order written. Of a long output the first and the last part are kept, with a
        line between them that says how much is missing; the command goes on.
        """
        connection = await self._live.connection()
        while True:
            argv, stdin = _shell_command(self._live.shell, line)
            spec = self._spec(argv, env, working_dir, timeout, user, stdin=stdin, merge=True)
            result = await connection.run(spec, max_output_bytes=max_output_bytes, keep_tail=True)
            if result.reason is not Reason.NOT_STARTED or result.exit_code != 127 or self._live.shell == "sh":
                return result.check() if check else result
            self._live.shell = "sh"

    async def stream(
        self,
        argv: Iterable[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        working_dir: str | None = None,
        timeout: float | None = None,
        stdin: bool = False,
        tty: tuple[int, int] | None = None,
        rlimits: Rlimits = (),
    ) -> Process:
        """Start a program whose streams the caller handles as they come: iterate the process, write to it, await it.

        Its output is read no faster than it is taken, and it is killed when this connection ends.

        Args:
            tty: (rows, columns) of a terminal to run it on.
        """
        connection = await self._live.connection()
        spec = self._spec(tuple(argv), env, working_dir, timeout, user, stdin=stdin, rlimits=rlimits)
        return await connection.start(replace(spec, tty=tty))


def _shell_command(shell: str, line: str) -> tuple[tuple[str, ...], bytes | bool]:
    """Return how to hand a line to a shell: as an argument, or through its input where an argument cannot take it."""
    data = line.encode("utf-8", "surrogateescape")
    if len(data) < _ARGUMENT_BYTES:
        return (shell, "-c", line), False
    return (shell, "-c", 'eval "$(cat)"'), data
