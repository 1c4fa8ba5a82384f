"""The verb exec: a command in a live sandbox, with this terminal's streams, signals and exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from typing import Annotated

import typer

from worldfork import AsyncSandbox, Sandbox
from worldfork.cli.boundary import OK, PIPE_CLOSED, verb
from worldfork.cli.printing import note, print_json
from worldfork.cli.sandboxes import AsJson, key_values
from worldfork.cli.shapes import result_shape
from worldfork.core.errors import ConfigError
from worldfork.sandbox.command import CommandResult, Reason
from worldfork.sandbox.process import Process

PASSED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
TIMED_OUT_CODE = 124
"""What timeout(1) ends with."""
_READ_BYTES = 1 << 16


def command_exit_code(result: CommandResult) -> int:
    """Return the exit code that a shell would give for the end of a command."""
    if result.reason is Reason.TIMED_OUT:
        return TIMED_OUT_CODE
    if result.reason is Reason.OOM_KILLED:
        return 128 + signal.SIGKILL
    if result.signal is not None:
        return 128 + result.signal
    return result.exit_code & 0xFF


@verb
def execute(
    sandbox_id: Annotated[str, typer.Argument(metavar="ID", help="Id or name of a live sandbox.")],
    command: Annotated[list[str], typer.Argument(metavar="[--] CMD...", help="The program and its arguments.")],
    terminal: Annotated[bool, typer.Option("--tty", "-t", help="Run it on a terminal.")] = False,
    no_stdin: Annotated[bool, typer.Option("--no-stdin", "-n", help="Give it no input.")] = False,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE for this command.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="User to run it as.")] = None,
    working_dir: Annotated[str | None, typer.Option("--working-dir", "-w", help="Directory to run it in.")] = None,
    timeout: Annotated[float | None, typer.Option(help="End it, and all it started, after this many seconds.")] = None,
    as_json: AsJson = False,
) -> int:
    """Run a command in a live sandbox and end with its exit code. Options go before the ID."""
    argv = command[1:] if command[0] == "--" else command
    if not argv:
        raise ConfigError("no command was given", remedy="worldfork exec ID -- CMD...")
    variables = key_values(env or [])
    if as_json:
        sandbox = Sandbox.connect(sandbox_id)
        print_json(
            result_shape(
                sandbox.run(argv[0], argv[1:], env=variables, user=user, working_dir=working_dir, timeout=timeout)
            )
        )
        return OK
    if terminal and not sys.stdin.isatty():
        raise ConfigError("-t needs a terminal on standard input", remedy="leave -t out")
    return asyncio.run(
        _follow(
            sandbox_id,
            argv,
            variables,
            user=user,
            working_dir=working_dir,
            timeout=timeout,
            terminal=terminal,
            stdin=not no_stdin,
        )
    )


async def _follow(
    sandbox_id: str,
    argv: list[str],
    env: dict[str, str],
    *,
    user: str | None,
    working_dir: str | None,
    timeout: float | None,
    terminal: bool,
    stdin: bool,
) -> int:
    sandbox = await AsyncSandbox.connect(sandbox_id)
    size = _terminal_size() if terminal else None
    if terminal:
        env.setdefault("TERM", os.environ.get("TERM", "xterm"))
    process = await sandbox.stream(
        argv, env=env, user=user, working_dir=working_dir, timeout=timeout, stdin=stdin, tty=size
    )
    with _raw_terminal(terminal):
        _pass_signals(process, terminal=terminal)
        if stdin:
            _pump_stdin(process)
        try:
            async for stream, data in process:
                await asyncio.to_thread(_write_all, 2 if stream == "stderr" else 1, data)
        except BrokenPipeError:
            process.kill()
            await process.wait()
            return PIPE_CLOSED
        result = await process.wait()
    if result.reason is Reason.TIMED_OUT:
        note(f"worldfork: the command met its time limit of {timeout:g} s.")
    elif result.reason is Reason.OOM_KILLED:
        note("worldfork: the command was killed because the sandbox ran out of memory.")
    return command_exit_code(result)


def _terminal_size() -> tuple[int, int]:
    # Asked of the terminal itself: COLUMNS and LINES are what a shell once believed.
    size = os.get_terminal_size(0)
    return size.lines or 24, size.columns or 80


@contextlib.contextmanager
def _raw_terminal(wanted: bool) -> Iterator[None]:
    """Let every key go through to the command; give the terminal back as it was."""
    if not wanted:
        yield
        return
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _pass_signals(process: Process, *, terminal: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in PASSED_SIGNALS:
        loop.add_signal_handler(number, process.signal, number)
    if terminal:
        loop.add_signal_handler(signal.SIGWINCH, lambda: process.resize(*_terminal_size()))


def _pump_stdin(process: Process) -> None:
    """Read standard input on a thread of its own: a read of a terminal or a pipe cannot be taken back."""
    loop = asyncio.get_running_loop()

    def send(data: bytes) -> None:
        writing = process.write_stdin(data)
        try:
            asyncio.run_coroutine_threadsafe(writing, loop).result()
        except RuntimeError:
            writing.close()
            raise

    def pump() -> None:
        # Whatever goes wrong here (input closed or unreadable, the command or the loop gone), there is no more input.
        with contextlib.suppress(Exception):
            while data := os.read(0, _READ_BYTES):
                send(data)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(process.close_stdin)

    threading.Thread(target=pump, name="worldfork-stdin", daemon=True).start()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
