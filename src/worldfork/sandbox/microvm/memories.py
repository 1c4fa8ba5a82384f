"""The saved memories that this process holds: assembled once, and mapped by every machine that goes on from one."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from worldfork.sandbox.microvm.manifest import MANIFEST, Saved
from worldfork.sandbox.microvm.ram import assemble

_HELD_LIMIT: Final = 4
"""Memories that are held unused at most: each takes as much of the host's memory as it has pages."""
_UNUSED_S: Final = 30.0

_Key = tuple[str, int, int]


@dataclass
class _Memory:
    lock: threading.Lock = field(default_factory=threading.Lock)
    fd: int = -1
    used_s: float = 0.0


def _key(directory: Path) -> _Key:
    # A directory that was removed and made again is another one.
    info = os.stat(directory / MANIFEST)
    return str(directory), info.st_ino, info.st_mtime_ns


class Memories:
    """Sealed memories by their directory. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[_Key, _Memory] = {}

    def lend(self, directory: Path, saved: Saved) -> int:
        """Return a descriptor of a directory's memory, which the caller closes. Blocking where it has to be assembled.

        Raises:
            NotFound, Corrupt: a file of it is gone or damaged.
            OutOfSpace: the host has too little memory.
        """
        key = _key(directory)
        with self._lock:
            memory = self._held.setdefault(key, _Memory())
        with memory.lock:
            if memory.fd < 0:
                try:
                    memory.fd = assemble([directory / name for name in saved.ram], saved.build.ram_bytes)
                except BaseException:
                    self._forget(key, memory)
                    raise
            memory.used_s = time.monotonic()
            with self._lock:
                kept = self._held.setdefault(key, memory) is memory
            if not kept:
                # It was dropped before it was assembled, and somebody else was faster.
                lent, memory.fd = memory.fd, -1
                return lent
            lent = os.dup(memory.fd)
        self._drop_oldest()
        return lent

    def holds(self, directory: Path) -> bool:
        """Whether `lend` would return at once."""
        try:
            key = _key(directory)
        except OSError:
            return False
        with self._lock:
            memory = self._held.get(key)
            return memory is not None and memory.fd >= 0 and not memory.lock.locked()

    def drop(self, unused_s: float) -> bool:
        """Let go of those that nobody asked for of late, of all where `unused_s` is 0; return whether one is left."""
        oldest_s = time.monotonic() - (max(unused_s, _UNUSED_S) if unused_s else 0.0)
        with self._lock:
            for key, memory in list(self._held.items()):
                if memory.used_s <= oldest_s:
                    self._drop(key)
            return bool(self._held)

    def forget(self) -> None:
        """In a forked child: let go of the parent's."""
        self._lock = threading.Lock()
        for memory in self._held.values():
            if memory.fd >= 0:
                os.close(memory.fd)
        self._held = {}

    def _forget(self, key: _Key, memory: _Memory) -> None:
        with self._lock:
            if self._held.get(key) is memory:
                del self._held[key]

    def _drop_oldest(self) -> None:
        with self._lock:
            order = sorted(self._held.items(), key=lambda pair: pair[1].used_s)
            for key, _ in order[:-_HELD_LIMIT]:
                self._drop(key)

    def _drop(self, key: _Key) -> None:
        memory = self._held[key]
        # One that is being assembled or lent stays.
        if memory.fd < 0 or not memory.lock.acquire(blocking=False):
            return
        try:
            os.close(memory.fd)
            memory.fd = -1
            del self._held[key]
        finally:
            memory.lock.release()
