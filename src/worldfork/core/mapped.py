"""Work on files that belong to a range of ids: in processes that are root of a user namespace with the same map.

Files of a sandbox with a range belong on the host to ids that this process is not, in directories that may be closed
to it. One user namespace of this process has the map that newuidmap(1) wrote; sandboxes get theirs from it, and a
small server in it runs functions by name. It is started when it is needed, ends when it has nothing to do, and with
its owner at the latest.

`python -m worldfork.core.mapped MODULE [ARGUMENT...]` runs a whole module so, or as it is where there is no range.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import json
import os
import pickle
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

from worldfork.core import mapped_server
from worldfork.core.errors import DriverUnavailable, StoreError
from worldfork.core.idmap import IdMap, Lacking, arguments, find_id_map, tool

_P = ParamSpec("_P")
_T = TypeVar("_T")
_START_S = 20.0
_TRIES = 3
_FOREIGN = (errno.EACCES, errno.EPERM)


class _Server:
    """One server process."""

    def __init__(self, namespace: int | None) -> None:
        self.orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.orders.settimeout(_START_S)
        passed = [theirs.fileno(), *([namespace] if namespace is not None else [])]
        argv = [sys.executable, "-I", "-S", mapped_server.__file__, str(theirs.fileno())]
        argv += [str(-1 if namespace is None else namespace), json.dumps(_path())]
        try:
            with theirs:
                self.process = subprocess.Popen(
                    argv,
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    cwd="/",
                )
        except OSError as error:
            self.orders.close()
            raise DriverUnavailable(
                f"{sys.executable!r} could not be started for a range of ids: {error.strerror}"
            ) from error
        self.used_s = time.monotonic()

    def expect(self, word: bytes) -> None:
        """Wait for a word of the beginning."""
        with contextlib.suppress(OSError):
            if self.orders.recv(1) == word:
                return
        raise DriverUnavailable(f"no user namespace with a range of ids: {self.end()}")

    def end(self) -> str:
        """End it and return its last words. Blocking, as long as it takes to exit."""
        self.orders.close()
        _, words = self.process.communicate()
        return (words or b"").decode(errors="replace").strip().rpartition("\n")[
            2
        ] or f"ended with {self.process.returncode}"


class _Mapped:
    """The user namespace of this process, and the server in it. Safe for many threads."""

    def __init__(self) -> None:
        self.map: IdMap | None = None
        self._namespace = -1
        self._server: _Server | None = None
        self._lock = threading.Lock()
        self._busy = 0
        """Calls under way, which would end with the server."""

    def namespace(self) -> int:
        with self._lock:
            return self._open()

    def _open(self) -> int:
        if self._namespace < 0:
            found = find_id_map()
            if isinstance(found, Lacking):
                raise DriverUnavailable(f"no range of ids: {found.reason}", remedy=found.remedy)
            server = _Server(None)
            try:
                server.expect(mapped_server.UNSHARED)
                _write_map(server.process.pid, found)
                server.orders.send(mapped_server.GO)
                server.expect(mapped_server.READY)
                self._namespace = os.open(f"/proc/{server.process.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            except BaseException:
                server.end()
                raise
            self._server, self.map = server, found
        return self._namespace

    def order(self, module: str, fd: int) -> None:
        """Give a server the end of a socket by which it will get a call."""
        with self._lock:
            namespace = self._open()
            for _ in range(_TRIES):
                if self._server is None:
                    server = _Server(namespace)
                    server.expect(
                        mapped_server.READY
                    )  # one that is not ready is ended, and the next call makes another
                    self._server = server
                self._server.used_s = time.monotonic()
                try:
                    socket.send_fds(self._server.orders, [module.encode()], [fd])
                    return
                except (BrokenPipeError, ConnectionResetError):
                    self._drop()  # it had nothing to do
        raise StoreError("no process for files of other ids stays alive")

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Keep the server from resting meanwhile."""
        with self._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
                if self._server is not None:
                    self._server.used_s = time.monotonic()

    def rest(self, unused_s: float) -> bool:
        with self._lock:
            if self._server is not None and not self._busy and time.monotonic() - self._server.used_s >= unused_s:
                self._drop()
            return self._server is not None

    def _drop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.end()

    def forget(self) -> None:
        """In a forked child: the namespace serves it as well, the server is the parent's."""
        self._lock = threading.Lock()
        self._busy = 0
        if self._server is not None:
            self._server.process.returncode = 0  # nothing of ours to wait for
            self._server.orders.close()
            if self._server.process.stderr:
                self._server.process.stderr.close()
            self._server = None


def namespace() -> int:
    """Return a descriptor of this process's user namespace with a range of ids, made at the first call.

    Raises:
        DriverUnavailable: there is no range here; the remedy says what is missing.
    """
    return _mapped.namespace()


def likely_map() -> IdMap | Lacking:
    """Return the map of that namespace, or the one that it would get if it was made now."""
    return _mapped.map or find_id_map()


def present_map() -> IdMap:
    """Return the map of that namespace.

    Raises:
        DriverUnavailable: as `namespace`.
    """
    _mapped.namespace()
    return cast(IdMap, _mapped.map)


def run(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function of a module, whose arguments and result can be pickled, as root of that namespace. Blocking.

    Raises:
        DriverUnavailable: as `namespace`.
        StoreError: the process that did it was killed.
        Whatever the function raises.
    """
    bound = functools.partial(function, **kwargs) if kwargs else function
    return cast(_T, _call(bound, args, function.__module__))


def warm(function: Callable[..., object]) -> None:
    """Have the next call of a function find everything imported. Blocking.

    Raises:
        DriverUnavailable, StoreError: as `run`.
    """
    _call(os.getpid, (), function.__module__)


def _call(function: object, args: tuple[object, ...], module: str) -> object:
    order = pickle.dumps((function, args))
    for _ in range(_TRIES):
        ours, theirs = socket.socketpair()
        with ours, _mapped.busy():
            with theirs:
                _mapped.order(module, theirs.fileno())
            if ours.recv(1) != mapped_server.BEGUN:
                continue  # the server went to rest at that moment, and nothing was done
            with ours.makefile("rwb") as stream:
                try:
                    stream.write(order)
                    stream.flush()
                    done, outcome = pickle.load(stream)
                except (EOFError, BrokenPipeError, ConnectionResetError, pickle.UnpicklingError) as error:
                    raise StoreError(f"the process that was at {module} for files of other ids was killed") from error
            if done:
                return outcome
            raise outcome
    raise StoreError("no process for files of other ids stays alive")


def if_refused(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function here, and again by `run` if the files are closed to this user or belong to others.

    Where there is no range of ids, what the first call raised is raised. `function` must bear a second call.
    """
    try:
        return function(*args, **kwargs)
    except OSError as error:
        if error.errno not in _FOREIGN or os.geteuid() == 0:
            raise
        try:
            namespace()
        except DriverUnavailable:
            raise error from None
    return run(function, *args, **kwargs)


def rest(unused_s: float = 0.0) -> bool:
    """End the server if it has had nothing to do for `unused_s`; return whether it is there still. Blocking."""
    return _mapped.rest(unused_s)


def _write_map(pid: int, ids: IdMap) -> None:
    for name, extents in (("newuidmap", ids.uids), ("newgidmap", ids.gids)):
        program = tool(name)
        try:
            if program is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            done = subprocess.run(
                [program, str(pid), *arguments(extents)], capture_output=True, timeout=_START_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DriverUnavailable(
                f"{name} could not be run: {error}", remedy="sudo apt-get install uidmap"
            ) from error
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip()
            raise DriverUnavailable(
                f"{name} refused a range of ids: {words}",
                remedy=f"see that {program} is set-uid root (or has its capability), and what /etc/sub{{u,g}}id say",
            )


def _path() -> list[str]:
    return [str(Path(__file__).resolve().parents[2]), *(entry for entry in sys.path if entry)]


def _main() -> None:
    module, sys.argv[:] = sys.argv[1], sys.argv[1:]
    with contextlib.suppress(DriverUnavailable):
        descriptor = namespace()
        rest()
        mapped_server.join(descriptor)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


_mapped = _Mapped()
os.register_at_fork(after_in_child=_mapped.forget)
atexit.register(rest)

if __name__ == "__main__":
    _main()
