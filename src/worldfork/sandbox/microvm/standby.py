"""Machines begun beforehand, so that the next ones of their kind find that done; `waiting` says what one is."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from worldfork.core.errors import WorldforkError
from worldfork.core.remove import remove_tree
from worldfork.sandbox.accounting import machine_used_s
from worldfork.sandbox.driver import StartPlan
from worldfork.sandbox.microvm.keep import Kept
from worldfork.sandbox.microvm.waiting import BEGIN_S, LOCK, Kind, Waiting, has_ended, put_away

_log = logging.getLogger("worldfork")
_THREAD: Final = "worldfork-standby"
_PREFIX: Final = ".standby-"
_YOUNG_S: Final = 60.0
"""So long nobody takes a place without a lock for one that was left behind."""
_LOOK_S: Final = 0.02
"""Between two looks at the processors, which count in hundredths of a second."""
_BUSY_S: Final = 2.0
"""So long one that is to be begun waits for an idle processor."""
PLACES: Final = 2
"""Who forks one after another takes one at about the rate at which two processors begin them: with a single place, one
of them would stand idle while a caller waits."""


Begin = Callable[[StartPlan], tuple[Kept, int]]
"""Starts a machine and brings it to where it waits (`bring_up`), from a plan in which it is a sandbox of its own;
returns its generation too. Blocking."""


class Standby:
    """A few machines that wait, all of one kind; safe for many threads.

    Args:
        top: the directory in which their places are made, on the file system of run directories.
        places: so many wait, or are being begun, at most.
        used_s: seconds for which processors of this host have been at work, all together.
    """

    def __init__(self, top: Path, places: int = PLACES, used_s: Callable[[], float] = machine_used_s) -> None:
        self._top = top
        self._places = places
        self._used_s = used_s
        self._changed = threading.Condition()
        self._kind: Kind | None = None
        self._waiting: deque[Waiting] = deque()
        self._coming = 0
        """So many are being begun."""
        self._awaiting = 0
        """So many callers wait for one of those."""
        self._stocking = 0
        """So many threads begin some, or are about to."""
        self._since_s = 0.0
        self._tidied = False
        self._drops = 0
        """So often all were let go."""
        self.useless = False
        """Whether none is begun any more: what cannot be renamed cannot be taken."""

    def stock(self, kind: Kind, plan: StartPlan, begin: Begin) -> threading.Thread | None:
        """Begin machines like that of `plan` until no place is left; those of another kind go.

        Returns:
            The thread that does it, for which `drop` waits; None if as many are at it as there are places.
        """
        with self._changed:
            if self._stocking >= self._places:
                return None
            drops = self._drops
            self._stocking += 1
        thread = threading.Thread(target=self._stock, args=(kind, plan, begin, drops), name=_THREAD, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread is to be had, and the next one starts as it would have
            self._note_stocked()
        return thread

    def _stock(self, kind: Kind, plan: StartPlan, begin: Begin, drops: int) -> None:
        try:
            self._fill(kind, plan, begin, drops)
        except (WorldforkError, OSError) as error:
            _log.debug("no machine waits for the next sandbox: %s", error)
        finally:
            self._note_stocked()

    def _note_stocked(self) -> None:
        with self._changed:
            self._stocking -= 1
            self._changed.notify_all()

    def _fill(self, kind: Kind, plan: StartPlan, begin: Begin, drops: int) -> None:
        with self._changed:
            untidy, self._tidied = not self._tidied, True
        if untidy:
            self._tidy()
        while self._may_begin(kind, drops):
            self._await_idle(drops)
            if not self._takes_place(kind, drops):
                return
            waiting = None
            try:
                waiting = self._begin(plan, begin)
            finally:
                with self._changed:
                    self._coming -= 1
                    if waiting is not None:
                        self._waiting.append(waiting)
                        self._since_s = time.monotonic()
                    self._changed.notify_all()

    def _may_begin(self, kind: Kind, drops: int) -> bool:
        """Whether there is a place for one of a kind, and nobody has let go of all since."""
        with self._changed:
            if self.useless or drops != self._drops:
                return False
            if self._kind != kind:
                return not self._coming
            return len(self._waiting) + self._coming < self._places

    def _takes_place(self, kind: Kind, drops: int) -> bool:
        """Take a place for one that is to be begun, if it may be."""
        with self._changed:
            if not self._may_begin(kind, drops):
                return False
            if self._kind != kind:
                self._put_down()
                self._kind = kind
            self._coming += 1
            return True

    def _await_idle(self, drops: int) -> None:
        """Let those who were started do first what they were started for: wait until a processor is idle, or a while.

        Sixteen that start at once take all processors for a second or two.
        """
        processors, deadline_s = os.cpu_count() or 1, time.monotonic() + _BUSY_S
        since_s, used_s = time.monotonic(), self._used_s()
        while since_s < deadline_s:
            with self._changed:
                if self._changed.wait_for(lambda: drops != self._drops, _LOOK_S):
                    return
            now_s, now_used_s = time.monotonic(), self._used_s()
            idle_s = processors * (now_s - since_s) - (now_used_s - used_s)
            if idle_s > (now_s - since_s) / 2 or math.isnan(idle_s):  # not told
                return
            since_s, used_s = now_s, now_used_s

    def _begin(self, plan: StartPlan, begin: Begin) -> Waiting:
        name = f"{_PREFIX.lstrip('.')}{os.urandom(8).hex()}"
        place = self._top / f".{name}"
        place.mkdir(mode=0o700)
        facts = replace(plan.facts, sandbox_id=name, run=str(place), cgroups=())
        try:
            kept, generation = begin(replace(plan, facts=facts, lock=str(place / LOCK)))
        except BaseException:
            remove_tree(place)
            raise
        return Waiting(kept, place, generation)

    def comes(self, kind: Kind | None) -> bool:
        """Whether none of this kind is there, and one is being begun that nobody waits for: `take` does."""
        with self._changed:
            free = len(self._waiting) - self._awaiting
            return kind is not None and self._kind == kind and free <= 0 < free + self._coming

    def take(self, kind: Kind | None) -> Waiting | None:
        """Hand out a machine that waits, if one is of this kind and has not ended; then `settle` it.

        Blocking where one `comes`: that one is there sooner than another could be.
        """
        while True:
            with self._changed:
                others = self._awaiting  # who waited before has the first of them
                if self.comes(kind):
                    self._awaiting += 1
                    self._changed.wait_for(lambda: self._waiting or not self._coming, BEGIN_S)
                    self._awaiting -= 1
                    others = 0
                if kind is None or self._kind != kind or len(self._waiting) <= others:
                    return None
                waiting = self._waiting.popleft()
            if not has_ended(waiting.kept.pid):
                return waiting
            put_away(waiting)

    def drop(self, unused_s: float) -> bool:
        """End those that wait if the newest has done so for `unused_s`; return whether one remains. Blocking."""
        with self._changed:
            if not unused_s:
                self._drops += 1
                self._changed.wait_for(lambda: not self._stocking, BEGIN_S)
            if time.monotonic() - self._since_s >= unused_s:
                self._put_down()
            return bool(self._waiting or self._stocking)

    def forget(self) -> None:
        """In a forked child: close our copies of what is the parent's."""
        self._changed = threading.Condition()
        self._coming = self._awaiting = self._stocking = 0
        while self._waiting:
            fd = self._waiting.pop().kept.let_go()
            if fd >= 0:
                os.close(fd)

    def _put_down(self) -> None:
        while self._waiting:
            put_away(self._waiting.popleft())

    def _tidy(self) -> None:
        """Remove places whose process was killed."""
        for left in self._top.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError, WorldforkError):
                if _is_left(left):
                    remove_tree(left)


def _is_left(place: Path) -> bool:
    """Whether nobody holds the lock of a place."""
    try:
        fd = os.open(place / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # It may have been made just before.
        return time.time_ns() / 1e9 - place.stat().st_mtime > _YOUNG_S
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)
