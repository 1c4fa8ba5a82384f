"""The start that is begun beforehand: taken once, given up when it failed or nobody came."""

from __future__ import annotations

import socket

from worldfork.sandbox.driver import Begun
from worldfork.sandbox.spare import Spare


class Starts:
    """Begins that are mere socket pairs, counted."""

    def __init__(self) -> None:
        self.far: list[socket.socket] = []
        self.put_down: list[Begun] = []

    def begin(self) -> Begun:
        near, far = socket.socketpair()
        self.far.append(far)
        return Begun(pid=len(self.far), sock=near)

    def end(self, begun: Begun) -> None:
        self.put_down.append(begun)
        begun.sock.close()

    def close(self) -> None:
        for far in self.far:
            far.close()


def test_one_is_kept_and_handed_out_once() -> None:
    starts = Starts()
    spare = Spare(starts.begin, starts.end)
    assert spare.take() is None
    spare.stock()
    spare.stock()
    assert len(starts.far) == 1
    begun = spare.take()
    assert begun is not None
    assert spare.take() is None
    begun.sock.close()
    starts.close()


def test_one_that_failed_is_put_down_instead() -> None:
    starts = Starts()
    spare = Spare(starts.begin, starts.end)
    spare.stock()
    starts.far[0].send(b"an error frame")
    assert spare.take() is None
    assert len(starts.put_down) == 1
    starts.close()


def test_it_is_dropped_only_when_nobody_came_for_long_enough() -> None:
    starts = Starts()
    spare = Spare(starts.begin, starts.end)
    assert not spare.drop(0.0)
    spare.stock()
    assert spare.drop(3600.0)
    assert not starts.put_down
    assert not spare.drop(0.0)
    assert len(starts.put_down) == 1
    assert spare.take() is None
    starts.close()


def test_a_forked_child_lets_go_without_ending_it() -> None:
    starts = Starts()
    spare = Spare(starts.begin, starts.end)
    spare.stock()
    spare.forget()
    assert spare.take() is None
    assert not starts.put_down
    starts.close()
