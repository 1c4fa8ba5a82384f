"""The `namespace` driver: Linux namespaces, an overlay, capabilities, a system call filter, cgroups."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import signal
import socket
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path

from worldfork.core import mapped
from worldfork.core.errors import DriverUnavailable, LaunchFailed, NotCapturable, SandboxDied
from worldfork.core.settings import Settings
from worldfork.records.sandbox import SandboxFacts
from worldfork.sandbox import wire
from worldfork.sandbox.cgroups import CgroupLayout, detect_layout
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.driver import Begun, Capabilities, Ground, ShownTree, Started, StartPlan
from worldfork.sandbox.program import encode_plan, spawn
from worldfork.sandbox.remedies import explain
from worldfork.sandbox.spare import Spare

_OWNER_FD, _IDS_FD = 4, 5
_USER_FD, _MOUNT_FD, _KEPT_FD = 4, 5, 6
_LAUNCHED = 110
_HEADER_BYTES = 12
_NEW_OVERLAY_KERNEL = (6, 8)
"""The first kernel whose fsconfig(2) takes `lowerdir+`."""
_CAP_SYS_ADMIN = 21
_START_S = 30.0
_REROOT_S = 30.0
_LAST_WORD_S = 2.0
_LAUNCHED_FRAME = struct.Struct("<IHHII")


class NamespaceDriver:
    """Starts sandboxes with nothing but the kernel; root or not."""

    name = "namespace"

    def __init__(self, settings: Settings) -> None:
        self.form = settings.form if settings.form != "auto" else natural_form()
        self.ids = ""
        """The map of ids of sandboxes in the user form, as text; empty while root is the only one in them."""
        self.overlay = settings.overlay if settings.overlay != "auto" else _natural_overlay()
        self._spare = Spare(lambda: self._begin("none"), lambda begun: _put_down(begun.sock, begun.pid, 0))
        self.layout = detect_layout() if settings.cgroups == "auto" else CgroupLayout({}, None)
        if settings.cgroups == "auto" and not self.layout.limited:
            # Named by hand: it is opened in threads, on whose stacks there is no line of the program that uses it.
            warnings.warn_explicit(
                "no cgroup of this host can be written, so a sandbox's memory and CPU are not limited as a whole, only "
                "each process by rlimits (on systemd: `systemd-run --user --scope -p Delegate=yes ...`)",
                RuntimeWarning,
                filename="worldfork",
                lineno=1,
            )

    def capabilities(self) -> Capabilities:
        """Return what this driver can do here."""
        trusted = self.form == "trusted"
        others = trusted or bool(self.ids)
        return Capabilities(form=self.form, rename_base_dirs=trusted, limits=self.layout.limited, other_users=others)

    def cgroups_of(self, sandbox_id: str) -> tuple[str, ...]:
        """Return the cgroup directories that `start` will make."""
        return self.layout.directories(sandbox_id)

    def begin(self, network: str) -> Begun:
        """Start the launcher, which makes the namespaces while its plan is being made; or take the spare one."""
        spare = self._spare.take() if network == "none" else None
        return spare or self._begin(network)

    def stock(self) -> None:
        """Begin one start beforehand, for the next sandbox without a network."""
        self._spare.stock()

    def drop_spare(self, unused_s: float = 0.0) -> bool:
        """Take that start back if it is `unused_s` old; return whether it remains. Blocking.

        The server for files of other ids rests too.
        """
        remains = self._spare.drop(unused_s)
        return mapped.rest(unused_s) or remains

    def forget_spare(self) -> None:
        """In a forked child: let go of the parent's."""
        self._spare.forget()

    def _begin(self, network: str) -> Begun:
        try:
            owner = os.pidfd_open(os.getpid())
        except OSError as error:
            raise explain("starting wf-init", error.errno or 0, "") from error
        try:
            items, fds = [("form", self.form), ("net", network)], {_OWNER_FD: owner}
            if self.ids:
                items.append(("ids", "range"))
                fds[_IDS_FD] = self._namespace()
            pid, sock = spawn("launch", encode_plan(items), fds)
        finally:
            os.close(owner)
        sock.setblocking(False)
        return Begun(pid, sock)

    def _namespace(self) -> int:
        """Return the user namespace whose map sandboxes get: that which snapshots will say."""
        namespace = mapped.namespace()
        if mapped.present_map().text != self.ids:
            raise DriverUnavailable(
                "the range of ids in /etc/subuid or /etc/subgid was changed while this program ran",
                remedy="start the program again",
            )
        return namespace

    async def abandon(self, begun: Begun) -> None:
        """Take back a start that was begun."""
        loop = asyncio.get_running_loop()
        await asyncio.shield(loop.run_in_executor(None, _put_down, begun.sock, begun.pid, 0))

    async def start(self, plan: StartPlan, begun: Begun | None = None) -> Started:
        """Start a sandbox; on failure or cancellation nothing of it is left running."""
        facts = plan.facts
        begun = begun or self.begin(facts.network)
        launcher, sock = begun.pid, begun.sock
        pid = 0
        leash = -1
        try:
            async with asyncio.timeout(_START_S):
                _send_plan(sock, encode_plan(self._launch_items(plan)))
                pid = await _launched(sock, facts.sandbox_id)
                await _greeted(sock, facts.sandbox_id)
                _reap_later(launcher)
                launcher = 0
                leash = os.dup(sock.fileno())
                connection = await Connection.open(sock, sandbox_id=facts.sandbox_id)
        except BaseException as error:
            if leash >= 0:
                os.close(leash)
            loop = asyncio.get_running_loop()
            await asyncio.shield(loop.run_in_executor(None, _put_down, sock, launcher, pid))
            if isinstance(error, TimeoutError):
                raise LaunchFailed(f"the sandbox did not answer within {_START_S:.0f} s") from None
            raise
        return Started(pid=pid, connection=connection, leash=leash)

    async def reroot(
        self, facts: SandboxFacts, ground: Ground, namespaces: list[int], kept: tuple[int, ...]
    ) -> asyncio.Future[None]:
        """Move a held sandbox onto `ground`; see `Driver.reroot`."""
        items = [*self._ground_items(facts, ground)]
        kind, payload, ended = await _reroot(items, namespaces, kept)
        if kind == wire.REPLY:
            return ended
        await ended
        number, text = wire.read_error(payload) if kind == wire.ERROR else (0, "reroot died")
        if kind != wire.ERROR or "lost" in text:
            raise SandboxDied(
                f"changing the root of {facts.sandbox_id} failed half-way: {text}",
                remedy="end it and restore its last snapshot",
                sandbox_id=facts.sandbox_id,
            )
        if number == errno.EBUSY:
            raise NotCapturable(
                f"something still uses the root of {facts.sandbox_id}", what="the root", why=f"{text}: busy"
            )
        raise explain(text, number, facts.sandbox_id)

    async def upper_of(self, facts: SandboxFacts, namespaces: list[int]) -> str:
        """Return the name of the directory that the sandbox writes to now; see `Driver.upper_of`."""
        kind, payload, ended = await _reroot([("form", facts.form), ("look", "1")], namespaces)
        await ended
        if kind == wire.REPLY:
            return payload.decode()
        number, text = wire.read_error(payload) if kind == wire.ERROR else (0, "looking at the root failed")
        raise explain(text, number, facts.sandbox_id)

    def _launch_items(self, plan: StartPlan) -> Iterator[tuple[str, str]]:
        facts = plan.facts
        yield "id", facts.sandbox_id
        yield "hostname", plan.hostname
        yield "run", facts.run
        # Any directory serves to mount on: nobody but the sandbox sees that mount.
        yield "root", facts.run
        yield "lock", plan.lock
        yield "net", facts.network
        if self.ids:
            yield "ids", "range"
        yield "shm_bytes", str(plan.shm_bytes)
        if facts.detached:
            yield "detached", "1"
        if facts.timeout_s:
            yield "lifetime_ms", str(int(facts.timeout_s * 1000))
        for source, target in (*facts.base.binds, *plan.binds):
            yield "bind", f"{source}\t{target}"
        for tree in plan.shown:
            yield from _shown_items(tree)
        for path, content in plan.identity:
            yield "idfile", f"{path}\t{content}"
        yield from self.layout.items(facts.sandbox_id, facts.limits)
        yield from self._ground_items(facts, plan.ground)

    def _ground_items(self, facts: SandboxFacts, ground: Ground) -> Iterator[tuple[str, str]]:
        yield "form", facts.form
        yield "overlay", self.overlay
        yield "scratch", f"{facts.run}/scratch"
        for layer in ground.layers:
            yield "layer", layer
        yield "upper", ground.upper
        yield "work", ground.work


def _shown_items(tree: ShownTree) -> Iterator[tuple[str, str]]:
    if not tree.layers:
        yield "bind", f"{tree.path}\t{tree.target}"
        return
    yield "mount", f"{tree.target}\t{tree.path}"
    for layer in tree.layers:
        yield "shown", layer


async def _reroot(
    items: list[tuple[str, str]], namespaces: list[int], kept: tuple[int, ...] = ()
) -> tuple[int, bytes, asyncio.Future[None]]:
    """Let the `reroot` face work on a sandbox; return the type and payload of its answer, and a future of its end."""
    fds = {_USER_FD: namespaces[0], _MOUNT_FD: namespaces[1]}
    fds.update(enumerate(kept, _KEPT_FD))
    pid, sock = spawn("reroot", encode_plan(items), fds)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(_REROOT_S):
            kind, payload = await _frame(sock)
    except BaseException:
        sock.close()
        _kill(pid)
        _reap(pid)
        raise
    return kind, payload, asyncio.get_running_loop().run_in_executor(None, _wait_and_close, pid, sock)


def _send_plan(sock: socket.socket, plan: bytes) -> None:
    """Send a plan, which a socket's buffer takes whole; a launcher that has failed already says why itself."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sent = sock.send(plan)
        if sent < len(plan):
            raise LaunchFailed(
                f"the plan of the sandbox did not fit into a socket's buffer: {sent} of {len(plan)} bytes",
                remedy="use a shorter WORLDFORK_HOME, or raise net.core.wmem_default",
            )


async def _launched(sock: socket.socket, sandbox_id: str) -> int:
    kind, payload = await _frame(sock)
    if kind == _LAUNCHED:
        return int(struct.unpack("<I", payload)[0])
    if kind == wire.ERROR:
        number, text = wire.read_error(payload)
        raise explain(text, number, sandbox_id)
    raise LaunchFailed("launch ended without a word", remedy="see `worldfork doctor`", sandbox_id=sandbox_id)


async def _greeted(sock: socket.socket, sandbox_id: str) -> None:
    """Wait for the greeting, which stays in the socket for the connection, or for PID 1's last error."""
    while True:
        await _readable(sock)
        header = sock.recv(_HEADER_BYTES, socket.MSG_PEEK)
        if len(header) < _HEADER_BYTES and header:
            continue
        if not header or struct.unpack_from("<H", header, 4)[0] != wire.ERROR:
            return
        _, payload = await _frame(sock)
        number, text = wire.read_error(payload)
        raise explain(text, number, sandbox_id)


async def _frame(sock: socket.socket) -> tuple[int, bytes]:
    """Read exactly one frame; type 0 at the end of the stream."""
    header = await _exactly(sock, _HEADER_BYTES)
    if len(header) < _HEADER_BYTES:
        return 0, b""
    size, kind = struct.unpack_from("<IH", header)
    return kind, await _exactly(sock, min(size, wire.MAX_PAYLOAD_BYTES))


async def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            piece = sock.recv(size - len(data))
        except BlockingIOError:
            await _readable(sock)
            continue
        except ConnectionResetError:
            break
        if not piece:
            break
        data += piece
    return data


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock.fileno(), _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _wait_and_close(pid: int, sock: socket.socket) -> None:
    _reap(pid)
    sock.close()


def _put_down(sock: socket.socket, launcher: int, pid: int) -> None:
    """End a start that nobody wants any more, and reap what it made. Blocking.

    A launcher that has not yet said which of our children PID 1 is gets the time to do so: killed in between, it
    would leave a child that nobody knows.
    """
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)  # one that still waits for its plan says that it will not come, and ends
    if not pid:
        sock.settimeout(_LAST_WORD_S)
        try:
            frame = sock.recv(_LAUNCHED_FRAME.size, socket.MSG_WAITALL)
            if len(frame) == _LAUNCHED_FRAME.size:
                _, kind, _, _, told = _LAUNCHED_FRAME.unpack(frame)
                pid = told if kind == _LAUNCHED else 0
        except OSError:
            pass  # it died, or hangs
    sock.close()
    for child in filter(None, (pid, launcher)):
        _kill(child)
        _reap(child)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _reap_later(pid: int) -> None:
    """Reap a child that has done its work; it has mostly ended already, else a thread waits for it."""
    try:
        gone = os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return
    if not gone:
        asyncio.get_running_loop().run_in_executor(None, _reap, pid)


def _reap(pid: int) -> None:
    """Wait for a child that is ending; somebody else's `os.wait()` may have taken it already."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return


@functools.cache
def natural_form() -> str:
    """Return the form for this process: real root needs CAP_SYS_ADMIN in the first user namespace."""
    if os.geteuid() != 0:
        return "user"
    status = Path("/proc/self/status").read_text()
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    first = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    return "trusted" if effective >> _CAP_SYS_ADMIN & 1 and first else "user"


@functools.cache
def _natural_overlay() -> str:
    release = os.uname().release.split(".")
    version = (int(release[0]), int("".join(c for c in release[1] if c.isdigit()) or 0))
    return "new" if version >= _NEW_OVERLAY_KERNEL else "legacy"
