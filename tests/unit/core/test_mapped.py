"""The process for files of other ids: one that does not come up is no obstacle for the next."""

from __future__ import annotations

import os
import socket

import pytest

from worldfork.core import mapped, mapped_server
from worldfork.core.errors import DriverUnavailable


class _Started:
    """In the place of a server process; the first one is too slow."""

    made: list[_Started]

    def __init__(self, namespace: int | None) -> None:
        self.orders, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.used_s = 0.0
        self.made.append(self)

    def expect(self, word: bytes) -> None:
        assert word == mapped_server.READY
        if len(self.made) == 1:
            self.orders.close()
            raise DriverUnavailable("no user namespace with a range of ids: too slow")


def test_a_slow_start_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    _Started.made = []
    monkeypatch.setattr(mapped, "_Server", _Started)
    work = mapped._Mapped()
    monkeypatch.setattr(work, "_open", lambda: 0)
    mine, passed = os.pipe()
    with pytest.raises(DriverUnavailable):
        work.order("module", passed)
    work.order("module", passed)
    slow, ready = _Started.made
    assert ready.theirs.recv(100) == b"module"
    for each in (slow.theirs, ready.orders, ready.theirs):
        each.close()
    os.close(mine)
    os.close(passed)
