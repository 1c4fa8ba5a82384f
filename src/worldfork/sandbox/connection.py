"""A client of a sandbox's init: any number of commands and calls at the same time over one stream."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import weakref
from collections.abc import AsyncIterable, Callable
from typing import Final, Self, TypeVar

from worldfork.core.errors import ConfigError, FormatUnsupported, SandboxDied, SandboxError
from worldfork.sandbox import replies, wire
from worldfork.sandbox.command import CommandResult, CommandSpec
from worldfork.sandbox.process import Process
from worldfork.sandbox.streams import WINDOW_BYTES, Output
from worldfork.sandbox.transport import NAMESPACES, Call, Transport

MAX_OUTPUT_BYTES: Final = 64 * 1024 * 1024
"""What `run` keeps of each stream unless told otherwise."""
IN_MACHINE: Final = "machine"
"""What the init of a virtual machine calls its sandbox: with its memory forked, it cannot know which one it is in."""
_REAP_S: Final = 10.0
"""How long the tree of a cancelled command may take to die before its caller goes on."""
_HELLO_S: Final = 10.0
_ANSWER_S: Final = 180.0
"""How long init may take for an answer: mostly milliseconds, but a machine whose memory is being saved stands still."""
_PULSE_S: Final = 60.0
"""How long a machine in which something is under way may say nothing before it is asked whether it lives."""
_OVERDUE_S: Final = 360.0
"""How long a command may outlive its time limit, which init keeps: one that waits for a hold to end starts late."""
_HELLO: Final = struct.Struct("<HHI")
_U32: Final = struct.Struct("<I")
_T = TypeVar("_T")


class Connection(Transport):
    """One sandbox's init, for one event loop; every call must come from that loop's thread.

    Every call raises SandboxDied once the connection has ended, those under way included. Closing it kills
    the commands that were started through it without `keep`.
    """

    __slots__ = ()

    @classmethod
    async def open(cls, sock: socket.socket, *, sandbox_id: str) -> Self:
        """Take over a connected unix stream socket and wait for init's greeting.

        Raises:
            FormatUnsupported: init speaks another version of the protocol.
            SandboxDied: it ended, greeted as another sandbox, or did not greet within 10 s.
        """
        connection = cls(sock, sandbox_id)
        hello = connection._channels[0] = Call(wanted=wire.HELLO)
        try:
            async with asyncio.timeout(_HELLO_S):
                payload = await hello.future
            connection._check_hello(payload)
        except TimeoutError:
            connection._end(f"it did not answer within {_HELLO_S:.0f} s")
            raise connection.death() from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_hello(self, payload: bytes) -> None:
        cursor = wire.Cursor(payload)
        try:
            version, _features, _pid = cursor.take(_HELLO)
            name = cursor.text() if version == wire.VERSION else ""
        except wire.MalformedFrame as error:
            self._end(f"its init broke the protocol, {error}")
            raise self.death() from error
        if version != wire.VERSION:
            raise FormatUnsupported(
                f"sandbox {self.sandbox_id} speaks version {version} of the protocol, this is version {wire.VERSION}",
                remedy="use the version of Worldfork that started it, or start it again",
                sandbox_id=self.sandbox_id,
            )
        if name not in (self.sandbox_id, IN_MACHINE):
            self._end(f"its socket now belongs to {name!r}")
            raise self.death()
        if name == IN_MACHINE:
            # Its kernel may hang, of which nothing else tells.
            self._loop.call_later(_PULSE_S, _feel_pulse, weakref.ref(self), 0)

    async def start(self, spec: CommandSpec) -> Process:
        """Start a command; returns once it runs, or with a process that ended as `not_started`.

        Cancellation kills what was started.

        Raises:
            SandboxError: the request was refused, for an unknown user for example.
            ConfigError: the command is too large to send.
        """
        process = self.launch(spec)
        try:
            await process.started()
        except asyncio.CancelledError:
            await process.reap(_REAP_S)
            raise
        return process

    async def run(
        self, spec: CommandSpec, *, max_output_bytes: int = MAX_OUTPUT_BYTES, keep_tail: bool = False
    ) -> CommandResult:
        """Run a command to its end and keep what it prints.

        Above `max_output_bytes` on one stream the tree is killed and the reason is `output_limit`; with
        `keep_tail` it goes on, and the first and the last half of that are kept. Cancellation kills the
        tree and waits until it is gone, then passes on.

        Raises:
            SandboxError: the request was refused, for an unknown user for example.
            SandboxDied: it ended, or did not end the command long after its time limit.
            ConfigError: `stdin=True`, which nobody could write here; or the command is too large to send.
        """
        if spec.stdin is True:
            raise ConfigError("run() sends stdin whole", remedy="pass stdin as bytes, or use start()")
        process = self.launch(spec, Output(max_output_bytes, keep_tail=keep_tail))
        try:
            # A virtual machine may be in the hands of what runs in it, which has no reason to end anything.
            async with asyncio.timeout(_overdue_s(spec)):
                return await process.wait()
        except TimeoutError:
            raise self._silent("did not end a command at its time limit") from None
        except asyncio.CancelledError:
            await process.reap(_REAP_S)
            raise

    def launch(self, spec: CommandSpec, output: Output | None = None) -> Process:
        """Ask for a command and return at once; whether it starts is told by the process."""
        channel = self.new_channel()
        request = wire.exec_frame(channel, spec, WINDOW_BYTES)
        process = Process(self, channel, spec.argv[0], writable=spec.stdin is not False, output=output)
        self._channels[channel] = process
        if isinstance(spec.stdin, bytes):
            request += process.feed(spec.stdin)
        self.send(request)
        return process

    async def builtin(
        self,
        operation: str,
        *arguments: str | bytes,
        path: str | None = None,
        user: str = "",
        working_dir: str = "/",
        stdin: bytes | AsyncIterable[bytes] | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> bytes:
        """Run a file operation of init and return what it printed.

        Args:
            path: the path that an error names; by default the first argument.

        Raises:
            PathError: the operation failed; with path and errno.
        """
        spec = CommandSpec(
            (operation, *arguments),
            working_dir=working_dir,
            user=user,
            stdin=stdin if isinstance(stdin, bytes) else stdin is not None,
            builtin=True,
        )
        if stdin is None or isinstance(stdin, bytes):
            result = await self.run(spec, max_output_bytes=max_output_bytes)
        else:
            result = await self._run_fed(spec, stdin, Output(max_output_bytes))
        named = path if path is not None else os.fsdecode(arguments[0]) if arguments else ""
        if error := replies.builtin_error(result, operation, named, sandbox_id=self.sandbox_id):
            raise error
        return result.stdout_bytes

    async def _run_fed(self, spec: CommandSpec, pieces: AsyncIterable[bytes], output: Output) -> CommandResult:
        process = self.launch(spec, output)
        try:
            try:
                async for piece in pieces:
                    await process.write_stdin(piece)
            except BrokenPipeError:
                pass  # why it takes no more is in its result
            process.close_stdin()
            return await process.wait()
        except BaseException:
            await process.reap(_REAP_S)
            raise

    async def attach(
        self, pid: int, *, replay: bool = True, follow: bool = True, output: bool = True, claim_stdin: bool = False
    ) -> Process:
        """Follow a command that runs, or a kept one that ended, by its pid inside.

        Args:
            replay: begin with the kept output.
            follow: go on until its end; without it the iteration ends with the replay.
            output: False waits for the end alone.
            claim_stdin: take over its input.

        Raises:
            SandboxError: no such command.
        """
        channel = self.new_channel()
        flags = (
            (wire.ATTACH_REPLAY if replay else 0)
            | (wire.ATTACH_FOLLOW if follow else 0)
            | (0 if output else wire.ATTACH_EXIT_ONLY)
            | (wire.ATTACH_STDIN if claim_stdin else 0)
        )
        process = Process(self, channel, f"process {pid}", writable=claim_stdin)
        self._channels[channel] = process
        self.send(wire.attach_frame(channel, pid, WINDOW_BYTES, flags))
        try:
            await process.started()
        except asyncio.CancelledError:
            process.detach()
            raise
        return process

    async def processes(self) -> list[replies.ListedProcess]:
        """Every running command, and kept ones that ended (the last 256)."""
        return self.decoded(replies.read_processes, await self._call(wire.LIST))

    async def info(self) -> replies.InitInfo:
        """How init is doing."""
        return self.decoded(replies.read_info, await self._call(wire.INFO))

    async def account(self) -> replies.Account:
        """What the ended commands used."""
        return self.decoded(replies.read_account, await self._call(wire.ACCOUNT))

    async def mapped(self) -> list[tuple[int, int]]:
        """(device, inode) of files that processes inside may still change: mapped shared or open for writing."""
        return self.decoded(replies.read_mapped, await self._call(wire.MAPPED))

    async def hold(self, ttl_s: float) -> replies.HoldReport:
        """Make new commands of all clients wait until `release`, the end of this connection or `ttl_s`."""
        # One that holds it already does so for as long.
        answer = await self._call(wire.HOLD, _milliseconds(ttl_s), late=lambda: self._undo(wire.RELEASE), more_s=ttl_s)
        return self.decoded(replies.read_hold, answer)

    async def release(self) -> None:
        """Let the held commands start."""
        await self._call(wire.RELEASE)

    async def freeze(self) -> None:
        """Stop every process but init until `thaw` or the end of this connection.

        Raises:
            SandboxError: some would not stop; none is left stopped.
        """
        answer = await self._call(wire.FREEZE, late=lambda: self._undo(wire.THAW))
        if not self.decoded(lambda payload: wire.Cursor(payload).u32(), answer):
            self._undo(wire.THAW)
            raise SandboxError("the sandbox's processes could not all be stopped", sandbox_id=self.sandbox_id)

    async def thaw(self) -> None:
        """Let the stopped processes go on."""
        await self._call(wire.THAW)

    async def shutdown(self, grace_s: float) -> None:
        """End every process, politely for `grace_s` and then not, and the sandbox with them."""
        try:
            await self._call(wire.SHUTDOWN, _milliseconds(grace_s), more_s=grace_s)
        except SandboxDied:
            pass  # as asked

    async def nsfds(self) -> list[int]:
        """Descriptors of the sandbox's user, mount, pid and network namespaces; the caller closes them."""
        self.descriptor_calls += 1
        try:
            await self._call(wire.NSFDS, late=self._drop_descriptors)
            if len(self.descriptors) < NAMESPACES:
                # Those that came are not to be taken for the next answer's.
                self._drop_descriptors()
                raise SandboxError(
                    "the sandbox's namespaces did not arrive whole",
                    remedy="raise the limit of open files (ulimit -n)",
                    sandbox_id=self.sandbox_id,
                )
            taken, self.descriptors[:NAMESPACES] = self.descriptors[:NAMESPACES], []
            return taken
        finally:
            self.descriptor_calls -= 1

    def _drop_descriptors(self) -> None:
        for _ in range(min(NAMESPACES, len(self.descriptors))):
            os.close(self.descriptors.pop())

    def _undo(self, kind: int) -> None:
        """Take back what was granted to a caller that is gone; nobody waits for the answer."""
        if not self.closed.is_set():
            channel = self.new_channel()
            self._channels[channel] = Call()
            self.send(wire.frame(kind, channel))

    def decoded(self, read: Callable[[bytes], _T], payload: bytes) -> _T:
        """Return what an answer says.

        Raises:
            SandboxDied: it is none, and this connection has ended.
        """
        try:
            return read(payload)
        except wire.MalformedFrame as error:
            self._end(f"its init broke the protocol, {error}")
            raise self.death() from error

    def _silent(self, what: str) -> SandboxError:
        """End the connection to an init that does not do what any init does; return the error."""
        self._end(f"its init {what}")
        return self.death()

    async def _call(
        self,
        kind: int,
        payload: bytes = b"",
        late: Callable[[], None] | None = None,
        more_s: float = 0.0,
    ) -> bytes:
        channel = self.new_channel()
        call = self._channels[channel] = Call(late=late)
        self.send(wire.frame(kind, channel, payload))
        within_s = _ANSWER_S + more_s
        try:
            async with asyncio.timeout(within_s):
                return await call.future
        except TimeoutError:
            raise self._silent(f"did not answer within {within_s:.0f} s") from None
        except asyncio.CancelledError:
            # Answered in the same turn of the loop in which the caller was cancelled.
            if late is not None and not call.future.cancelled() and call.future.exception() is None:
                late()
            raise


def _milliseconds(seconds: float) -> bytes:
    if not 0 <= seconds <= 4_000_000:
        raise ConfigError(f"not a time that a sandbox can wait: {seconds} s")
    return _U32.pack(round(seconds * 1000))


def _overdue_s(spec: CommandSpec) -> float | None:
    """Return when a command must have ended, whatever init says; None for one without a time limit."""
    return None if spec.timeout_s is None else spec.timeout_s + spec.drain_s + _OVERDUE_S


def _feel_pulse(which: weakref.ref[Connection], read_before: int) -> None:
    """Ask a machine that has said nothing of late, while somebody waits, whether it lives; do so again and again."""
    connection = which()
    if connection is None or connection.closed.is_set():
        return
    if not connection.idle and connection.reads == read_before:
        asking = connection._loop.create_task(_ask(connection))
        _asking.add(asking)
        asking.add_done_callback(_asking.discard)
    connection._loop.call_later(_PULSE_S, _feel_pulse, which, connection.reads)


async def _ask(connection: Connection) -> None:
    with contextlib.suppress(SandboxError):
        await connection.info()


_asking: set[asyncio.Task[None]] = set()
"""Nothing else holds a task."""
