"""Memory that was freed goes back to the system."""

from __future__ import annotations

import contextlib
import time
from typing import Final

_PAUSE_S: Final = 20.0

_last_s = 0.0


def give_back() -> None:
    """Let malloc give the pages that are free back to the system; at most once in a while, and only where it can.

    glibc keeps a heap for each of many threads, and what is free inside one stays with it: a process that starts
    threads for days, as the owner of many sandboxes does, grows by that without holding anything. Blocking, for about
    a millisecond.

    Source: malloc_trim(3).
    """
    global _last_s
    now_s = time.monotonic()
    if now_s - _last_s < _PAUSE_S:
        return
    _last_s = now_s
    import ctypes  # only who owns sandboxes needs it

    with contextlib.suppress(OSError, AttributeError):  # other C libraries have none
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
