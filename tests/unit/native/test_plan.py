"""What launch says of a plan that makes no sense: nothing is made of it."""

from __future__ import annotations

import os
import struct

import pytest

from worldfork.sandbox import wire
from worldfork.sandbox.program import encode_plan, spawn

OWNER_FD = 4
SHOWN = ("shown", "/layer")


def refusal(items: list[tuple[str, str]]) -> tuple[int, str]:
    """The errno and the text with which launch refuses the first plan that it is given."""
    owner = os.pidfd_open(os.getpid())
    try:
        pid, sock = spawn("launch", encode_plan(items), {OWNER_FD: owner})
    finally:
        os.close(owner)
    with sock:
        sock.settimeout(10)
        data = b""
        while piece := sock.recv(4096):
            data += piece
    os.waitpid(pid, 0)
    size, kind = struct.unpack_from("<IH", data)
    assert (kind, len(data)) == (wire.ERROR, 12 + size)
    return wire.read_error(data[12:])


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([SHOWN], "shown before any mount"),
        ([("mount", "/a\t")] * 17, "more than 16 mounts"),
        ([("mount", "/a\t"), *[SHOWN] * 1001], "more than 1000 layers in mounts"),
        ([("layer", "/l")] * 501, "more than 500 layers"),
        ([("bind", "/a\t/b")] * 257, "more than 256 items"),
    ],
    ids=["orphan", "mounts", "shown", "layers", "items"],
)
def test_a_plan_past_its_bounds_is_refused(items: list[tuple[str, str]], text: str) -> None:
    number, said = refusal(items)
    assert text in said
    assert number > 0
