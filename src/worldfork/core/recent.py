"""What was used last, within a bound of bytes: long runs over many tasks keep no more than that."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values by key; those used longest ago go where all together are too large. Safe from any thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._held: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable) -> Value | None:
        """Return the value of a key, if it is still there."""
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key][0]

    def put(self, key: Hashable, value: Value, size_bytes: int) -> None:
        """Keep a value. The newest is kept however large it is."""
        with self._lock:
            self._held_bytes += size_bytes - self._held.pop(key, (None, 0))[1]
            self._held[key] = (value, size_bytes)
            while len(self._held) > 1 and self._held_bytes > self._most_bytes:
                self._held_bytes -= self._held.popitem(last=False)[1][1]
