"""What was freed goes back, and not all the time."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from tests.stores import in_child

from worldfork.core import heap


def own_bytes() -> int:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows["RssAnon"].split()[0]) * 1024


def grow() -> bytes:
    """Fill a heap and free it but for its end, which holds all of it."""
    pieces = [bytes(2000) for _ in range(20_000)]
    return pieces[-1]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library keeps what is free")
def test_what_is_free_inside_a_heap_goes_back() -> None:
    def work() -> None:
        kept = grow()
        before = own_bytes()
        heap.give_back()
        after = own_bytes()
        assert before - after > 20_000_000
        grow()
        heap.give_back()
        assert own_bytes() - after > 20_000_000, "so soon nothing is done again"
        assert len(kept) == 2000

    assert in_child(work) == 0
