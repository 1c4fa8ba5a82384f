"""The program that lives in a user namespace with a range of ids, and forks a child for each call. See `mapped`.

Arguments: the descriptor of the socket that orders come by, and Python's path as JSON. It begins with a namespace to
join, or is told by -1 to make one and wait until its map is written.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import os
import pickle
import select
import signal
import socket
import sys

CLONE_NEWUSER = 0x10000000
IDLE_S = 5.0
"""How long it waits for the next order before it ends."""
UNSHARED, GO, READY, BEGUN = b"u", b"g", b"r", b"b"
_PDEATHSIG = 1
_NAME_BYTES = 4096


def join(namespace: int) -> None:
    """Enter a user namespace as its root; the caller has one thread.

    Raises:
        OSError: the kernel refused.
    """
    _checked(_libc().setns(namespace, CLONE_NEWUSER))
    os.setgroups([])


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _enter(orders: socket.socket, namespace: int) -> None:
    if namespace >= 0:
        join(namespace)
        os.close(namespace)
    else:
        _checked(_libc().unshare(CLONE_NEWUSER))
        orders.send(UNSHARED)
        if orders.recv(1) != GO:
            sys.exit(0)
        os.setgroups([])
    orders.send(READY)


def _serve(orders: socket.socket) -> None:
    children: set[int] = set()
    waiter = select.poll()
    waiter.register(orders, select.POLLIN)
    while True:
        ready = waiter.poll(IDLE_S * 1000)
        children -= {child for child in children if os.waitpid(child, os.WNOHANG)[0]}
        if not ready:
            if not children:
                return
            continue
        module, fds, _, _ = socket.recv_fds(orders, _NAME_BYTES, 1)
        if not module:
            return  # the owner ended, and its children go with it
        if not fds:
            continue
        try:
            # Here, so that the next call finds it imported; what it raises is raised again in the child.
            importlib.import_module(module.decode())
        except Exception:
            pass
        me = os.getpid()
        child = os.fork()
        if child == 0:
            orders.close()
            _answer(fds[0], me)
        os.close(fds[0])
        children.add(child)


def _answer(fd: int, server: int) -> None:
    """Do one call and end."""
    code = 1
    try:
        _libc().prctl(_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() == server:
            with socket.socket(fileno=fd) as sock:
                sock.sendall(BEGUN)
                with sock.makefile("rwb") as stream:
                    stream.write(_outcome(stream))
            code = 0
    finally:
        os._exit(code)


def _outcome(stream: io.BufferedRWPair) -> bytes:
    try:
        function, arguments = pickle.load(stream)
        return pickle.dumps((True, function(*arguments)))
    except BaseException as error:
        try:
            return pickle.dumps((False, error))
        except Exception:
            return pickle.dumps((False, OSError(f"{type(error).__name__}: {error}")))


if __name__ == "__main__":
    # Orders come from our own process alone, and no terminal's signal is meant for this one.
    sys.path[:] = json.loads(sys.argv[3])
    with socket.socket(fileno=int(sys.argv[1])) as control:
        _enter(control, int(sys.argv[2]))
        _serve(control)
