"""This process's hold on one live sandbox: connections, its PID 1, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

from worldfork.core.errors import SandboxDied, SandboxError, WorldforkError
from worldfork.core.threads import in_thread
from worldfork.lineage.connections import Connections
from worldfork.lineage.deaths import asked, condemned, exit_of, found_dead, left
from worldfork.lineage.place import Place
from worldfork.records.cpu import CpuUse
from worldfork.records.death import Death, DeathCause, LimitHits
from worldfork.records.sandbox import SandboxFacts
from worldfork.sandbox.accounting import Account, find_account
from worldfork.sandbox.cgroups import thaw_groups
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.driver import Started
from worldfork.sandbox.pressure import limit_hits
from worldfork.store.faultpoints import fault

_EXIT_S = 30.0
_DYING_S = 5.0
"""How long the processes of a sandbox whose socket has closed may take to be gone."""
_POLL_S = 0.005
"""Between two looks at the lock of a PID 1 that is not ours to wait for."""

_all: weakref.WeakSet[Live] = weakref.WeakSet()
_claims = threading.Lock()
"""Held while somebody claims to end one: the watch does so in a thread of its own."""


class Live:
    """One live sandbox, as this process sees it. Shared by every handle on it."""

    def __init__(self, place: Place, facts: SandboxFacts, started: Started | None = None) -> None:
        self.place = place
        self.facts = facts
        self.shell = "bash"
        """What `sh` uses; falls back to sh where a world has no bash."""
        self.names: dict[str, int] = {}
        """Names of processes that this handle started -> pid inside."""
        self._owner_pid = os.getpid()
        self._pid: int | None = None
        self._pidfd: int | None = None
        self._leash: int | None = None
        self._connections = Connections()
        self._over = False
        self._clearing: threading.Event | None = None
        """Set once `end_now`, which may be at it in another thread, is through."""
        self._taking = False
        self._taken = False
        self._ending: asyncio.Task[None] | None = None
        self._why: Callable[[], SandboxError] | None = None
        self._death: Death | None = None
        self._account: Account | None = None
        # Opened before the sandbox writes, so that no error of writing back goes unseen.
        self._sync_fd: int | None = os.open(facts.run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if started:
            self._pidfd = os.pidfd_open(started.pid)
            self._pid, self._leash = started.pid, started.leash
            self._connections.keep(started.connection)
            place.adopt(self)
        _all.add(self)

    def __del__(self) -> None:
        # A dropped handle on somebody else's sandbox; what a stream of it still reads goes on.
        if getattr(self, "_sync_fd", None) is None or self._owner_pid != os.getpid():
            return
        if all(connection.idle for connection in self._connections):
            self._close_descriptors()

    @property
    def sandbox_id(self) -> str:
        """Its id."""
        return self.facts.sandbox_id

    @property
    def over(self) -> bool:
        """Whether this handle ended it."""
        return self._over

    async def connection(self) -> Connection:
        """Return this event loop's connection, made when there is none.

        Raises:
            SandboxDied: the sandbox is gone; OutOfSpace: it was ended for the disk it took.
        """
        self._check_process()
        if self._why is not None:
            raise self._why()
        self._connections.drop_ended_loops()
        found = self._connections.mine()
        if found is None or (found.closed.is_set() and self.alive()):
            found = self._connections.keep(await self._connect())
        if found.closed.is_set():
            raise self.gone("its init ended")
        return found

    def alive(self) -> bool:
        """Whether its PID 1 lives."""
        return not self._over and self._lives()

    def _lives(self) -> bool:
        pidfd = self._pidfd  # the watch may close it meanwhile
        if pidfd is not None:
            return not _is_readable(pidfd, 0)
        return self.place.store.is_alive(self.sandbox_id)

    def rlimits(self) -> tuple[tuple[int, int, int], ...]:
        """Return the limits of each process: the disk limit bounds one file at once, whatever the watch sees later.

        Where no cgroup limits the sandbox, memory and processes are limited here, as well as one process can be.
        """
        limits, rlimits = self.facts.limits, []
        if limits.disk_mb is not None:
            rlimits.append((resource.RLIMIT_FSIZE, limits.disk_mb << 20, limits.disk_mb << 20))
        if not self.place.disk_on_host(self.facts):
            return tuple(rlimits)  # its own kernel limits the rest
        if not self.facts.cgroups and limits.memory_mb is not None:
            rlimits.append((resource.RLIMIT_AS, limits.memory_mb << 20, limits.memory_mb << 20))
        if not self.facts.cgroups and limits.pids is not None and self.facts.form == "user":
            rlimits.append((resource.RLIMIT_NPROC, limits.pids, limits.pids))
        return tuple(rlimits)

    def sync_descriptor(self) -> int | None:
        """Return a copy of the descriptor that saw every write of the sandbox; the caller closes it."""
        return None if self._sync_fd is None else os.dup(self._sync_fd)

    async def cause_of_death(self) -> Death | None:
        """Return how it ended; None while it lives."""
        self._check_process()
        if self._death is None and self._lives() and any(each.closed.is_set() for each in self._connections):
            # Its socket closes before its last process is gone.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DYING_S):
                    await self.wait_ended()
        return self._note_death()

    async def limit_hits(self) -> LimitHits:
        """Return what its groups counted, as last seen where they are gone."""
        death = self._note_death()
        return limit_hits(self.facts.cgroups) if death is None else death.hits

    def cpu_use(self) -> CpuUse | None:
        """Return what its group counted of the CPU; None where it has none that counts, or is gone."""
        if self._account is None:
            self._account = find_account(self.facts.cgroups)
        return None if self._account is None else self._account.read(self._pid)

    def _note_death(self) -> Death | None:
        """Find out why it is dead, once, before what shows that is cleared away; None while it lives."""
        if self._death is None and not self._lives():
            status = None if self._pidfd is None else exit_of(self._pidfd)
            self._death = found_dead(status, self.place.host_kills, limit_hits(self.facts.cgroups))
        return self._death

    def condemn(self, why: Callable[[], SandboxError]) -> None:
        """Kill its PID 1 and make every later call raise what `why` returns. Not blocking."""
        if self._note_death() is None:
            self._death = replace(condemned(why()), hits=limit_hits(self.facts.cgroups))
        self._why = why
        for connection in self._connections:
            connection.epitaph = why
        self._kill()

    @contextlib.contextmanager
    def being_taken(self) -> Iterator[None]:
        """For the length of the block nobody clears away what the sandbox leaves; whoever took it does afterwards.

        Raises:
            SandboxDied: that was begun before.
        """
        if self._over:
            raise self.gone("it was ended")
        self._taking = self._taken = True
        try:
            yield
        finally:
            self._taking = False

    def _is_taken_elsewhere(self) -> bool:
        """Whether another handle is about to make a layer of what the sandbox leaves, and to clear the rest away."""
        # Only a checkpoint makes this file, and most sandboxes end without one.
        if self._taken or not os.path.lexists(f"{self.facts.run}/turn"):
            return False
        return self.place.store.is_vouched(self.sandbox_id)

    async def end(self, death: Death | None = None) -> None:
        """End the sandbox and clear it away. Idempotent, and finished even if the caller is cancelled.

        A second caller waits for the first; one that comes after a failure tries again. What it leaves stays for a
        last checkpoint that is being taken.

        Args:
            death: what is told of it, if it lives until now; by default that a handle of this process ended it.
        """
        if self._owner_pid != os.getpid():
            return
        while self._taking:
            await asyncio.sleep(_POLL_S)
        failed = self._ending is not None and self._ending.done() and self._ending.exception() is not None
        if failed or self._claim_end():
            self._note_end(death or asked())
            self._ending = asyncio.ensure_future(self._end())
        if self._clearing is not None and not self._clearing.is_set():
            await in_thread(self._clearing.wait, _EXIT_S)
        if self._ending is None or self._ending.get_loop() is not asyncio.get_running_loop():
            return
        try:
            await asyncio.shield(self._ending)
        except asyncio.CancelledError:
            await self._ending
            raise

    def end_now(self) -> None:
        """The same without an event loop: at the end of the interpreter, or for one that died. Blocking."""
        if self._owner_pid != os.getpid():
            return
        if self._over:
            if self._clearing is not None:
                self._clearing.wait(_EXIT_S)
            return
        if self.facts.detached and self.alive():
            self._close_descriptors()
            return
        try:
            if self._taking or self._is_taken_elsewhere():
                return
        except WorldforkError:
            return  # nobody knows now; the next look, or the next sweep, does it
        clearing = threading.Event()
        if not self._claim_end(clearing):
            return
        try:
            self._end_now()
        finally:
            clearing.set()

    def _end_now(self) -> None:
        self._note_end(left())
        self.place.live.pop(self.sandbox_id, None)
        self._kill()
        if self._pidfd is not None:
            _is_readable(self._pidfd, _EXIT_S)
        self._close_descriptors()
        with contextlib.suppress(WorldforkError, OSError):
            self._dispose()
        self.place.tidy_soon()

    def _claim_end(self, clearing: threading.Event | None = None) -> bool:
        """Whether the caller is to end it, since nobody else has begun to."""
        with _claims:
            if self._over:
                return False
            self._over, self._clearing = True, clearing
            return True

    async def wait_ended(self) -> None:
        """Return when its PID 1 has ended."""
        if self._pidfd is not None:
            await _until_readable(self._pidfd)
            return
        while self.place.store.is_alive(self.sandbox_id):
            await asyncio.sleep(_POLL_S)

    async def see_out(self) -> None:
        """Return when its PID 1, which was killed, has ended.

        Raises:
            SandboxError: it did not within half a minute.
        """
        try:
            async with asyncio.timeout(_EXIT_S):
                await self.wait_ended()
        except TimeoutError:
            raise SandboxError(
                f"the processes of {self.sandbox_id} did not end within {_EXIT_S:.0f} s of being killed",
                remedy="a device or a network file system may hold them; `worldfork sweep` clears up later",
                sandbox_id=self.sandbox_id,
            ) from None

    def close(self) -> None:
        """Let go of a sandbox that is not ours; it lives on. Its owner's handle keeps it."""
        if self._pid is None:
            self._close_descriptors()

    def _note_end(self, death: Death) -> None:
        if self._note_death() is None:
            self._death = death

    async def kill(self, death: Death | None = None) -> None:
        """Kill its PID 1, and with it every process inside; what it leaves stays until `end`.

        Args:
            death: as of `end`.
        """
        self._note_end(death or asked())
        if self._pid is not None:
            self._kill()
        else:
            await self._ask_to_end()

    async def _end(self) -> None:
        self.place.live.pop(self.sandbox_id, None)
        await self.kill()
        if self._pid is not None and self.facts.network == "none" and self.place.disk_on_host(self.facts):
            self.place.stock()
        await self.see_out()
        fault("end:dead")
        self._close_descriptors()
        await self.place.work(self._clear_away)
        self.place.tidy_soon()

    def _clear_away(self) -> None:
        if not self._is_taken_elsewhere():
            self._dispose()

    def _dispose(self) -> None:
        """Clear away what it leaves; the snapshot that it was resumed from only if somebody wished its end."""
        gone = self.place.dispose(self.facts)
        if gone and self.facts.resumed and self._death is not None and self._death.cause is DeathCause.ENDED:
            from worldfork.lineage.suspending import drop_resumed

            drop_resumed(self.place, self.facts)

    async def _ask_to_end(self) -> None:
        if self.place.disk_on_host(self.facts):
            await self._shut_down()
            return
        try:
            async with asyncio.timeout(_EXIT_S):
                await self._shut_down()
                await self.wait_ended()
        except TimeoutError:
            # A guest that was broken into ends nothing.
            from worldfork.sandbox.microvm.ending import end_machine

            await self.place.work(lambda: end_machine(self.facts.run))

    async def _shut_down(self) -> None:
        with contextlib.suppress(SandboxError):
            connection = self._connections.mine()
            if connection is None or connection.closed.is_set():
                connection = await self._connect()
            await connection.shutdown(0)

    async def _connect(self) -> Connection:
        if not self._lives():
            raise self.gone("its init ended")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The path of a unix socket has 108 bytes: reached through its directory's descriptor.
            directory = os.open(self.facts.run, os.O_PATH | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{directory}/sock")
            finally:
                os.close(directory)
        except OSError as error:
            sock.close()
            raise self.gone(f"nobody answers at its socket ({error.strerror})") from error
        return await Connection.open(sock, sandbox_id=self.sandbox_id)

    def gone(self, why: str) -> SandboxDied:
        """Return the error of every call on a sandbox that is gone; `cause` has a `DeathCause`, if it is known yet."""
        death = self._note_death()
        remedy = "restore or fork its last snapshot; a sandbox that died is never replaced silently"
        if death is not None and death.cause is DeathCause.ENDED:
            why, remedy = "it was ended by its owner", "create another sandbox, or restore a snapshot of this one"
        return SandboxDied(
            f"sandbox {self.sandbox_id} is gone: {why}",
            remedy=remedy,
            sandbox_id=self.sandbox_id,
            cause=None if death is None else death.cause.value,
        )

    def _check_process(self) -> None:
        if self._owner_pid != os.getpid():
            raise SandboxError(
                f"this handle on {self.sandbox_id} belongs to the process that this one was forked from",
                remedy=f"attach again: Sandbox.connect({self.sandbox_id!r})",
                sandbox_id=self.sandbox_id,
            )

    def _kill(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            thaw_groups(self.facts.cgroups)

    def _close_descriptors(self) -> None:
        self._connections.close()
        if self._pid is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, os.WNOHANG)
        for name in ("_pidfd", "_leash", "_sync_fd"):
            fd = getattr(self, name)
            setattr(self, name, None)
            if fd is not None:
                os.close(fd)

    def _abandon(self) -> None:
        """In a forked child: close our copies, so that the parent alone decides over the sandbox's life."""
        for name in ("_pidfd", "_leash", "_sync_fd"):
            fd = getattr(self, name)
            setattr(self, name, None)
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)


def _is_readable(fd: int, timeout_s: float) -> bool:
    # poll, since select cannot take a descriptor above 1023.
    waiter = select.poll()
    waiter.register(fd, select.POLLIN)
    return bool(waiter.poll(timeout_s * 1000))


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _until_readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    try:
        copy = os.dup(fd)  # several callers may wait, and a loop takes one reader for a descriptor
    except OSError:  # too many are open, which the end of a sandbox is to relieve
        await loop.run_in_executor(None, _is_readable, fd, _EXIT_S)
        return
    loop.add_reader(copy, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(copy)
        os.close(copy)


def _forked() -> None:
    global _claims
    _claims = threading.Lock()
    for live in list(_all):
        live._abandon()


os.register_at_fork(after_in_child=_forked)
