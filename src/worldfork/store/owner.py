"""What every part of the store stands on: one home, its metadata, and this process as an owner."""

from __future__ import annotations

import json
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from worldfork.core import mapped
from worldfork.core.clock import Clock, SystemClock, boot_id
from worldfork.core.errors import Locked, OutOfSpace, StoreError
from worldfork.core.ids import new_id
from worldfork.core.remove import remove_tree
from worldfork.core.settings import DEFAULT_LEASE_TTL_S
from worldfork.store import ballast, locks
from worldfork.store.database import Database
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.heartbeat import Heartbeat
from worldfork.store.home import Home

_BEATS = 4
"""How often a lease is renewed within its time to live."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="OwnedStore")


class OwnedStore:
    """A home, its metadata, and this process's record lock on `locks/<owner_id>`.

    Use is as the class `Store`; this holds what its nouns share. A forked child gets an owner of its own.
    """

    def __init__(self, home: Home, *, clock: Clock | None = None, ttl_s: float = DEFAULT_LEASE_TTL_S) -> None:
        self.home = home
        self.ttl_s = ttl_s
        """How long an owner that is alive may stand still before its drafts and readings are lost."""
        self._clock: Clock = clock or SystemClock()
        with typed("the boot id of the machine cannot be read"):
            self.boot_id = boot_id()
        """The boot of the machine that this store was opened in."""
        self.database = Database(home.database, lock_directory=home.locks)
        self._owner: tuple[str, locks.RecordLock] | None = None
        self._owner_mutex = threading.Lock()
        self._leases: set[str] = set()
        """Ids of the drafts and readings that this process goes on with. What was given up and could not be forgotten
        is not among them, and runs out."""
        self._heartbeat = self._new_heartbeat()
        _follow_forks(self)

    def _new_heartbeat(self) -> Heartbeat:
        return Heartbeat(self._renew, every_s=self.ttl_s / _BEATS)

    def _renew(self) -> int:
        """Renew the drafts and readings that this process goes on with; return how many those are."""
        owner, leases = self._owner, list(self._leases)
        if owner is None or not leases:
            return 0
        values = (self._clock.monotonic_s(), owner[0], json.dumps(leases))
        mine = "owner_id = ? AND {} IN (SELECT value FROM json_each(?))"
        with self.database.write() as db:
            db.execute(
                f"UPDATE layers SET renewed_s = ? WHERE state = 'building' AND {mine.format('layer_id')}", values
            )
            db.execute(
                f"UPDATE holders SET renewed_s = ? WHERE kind = 'reading' AND {mine.format('holder_id')}", values
            )
        return len(leases)

    def _go_on_with(self, lease_id: str) -> None:
        """Renew a draft or a reading from now on."""
        self._leases.add(lease_id)
        self._heartbeat.start()

    def is_going(self, owner_id: str, renewed_s: float) -> bool:
        """Tell whether an owner is alive and has said so within `ttl_s`.

        Args:
            owner_id: whose lock to look at.
            renewed_s: when it said so last, on the machine's monotonic clock; below 0 if it never does.
        Raises:
            StoreError: the lock cannot be looked at.
        """
        in_time = renewed_s < 0 or self._clock.monotonic_s() - renewed_s < self.ttl_s
        return in_time and self.is_alive(owner_id)

    @property
    def owner_id(self) -> str:
        """This process's owner. What it has begun lasts as long as the process does.

        Raises:
            OutOfSpace, StoreError: its lock file cannot be made.
        """
        owner = self._owner
        return owner[0] if owner is not None else self._become_owner()

    def _become_owner(self) -> str:
        with self._owner_mutex, typed("the lock of this process cannot be taken"):
            while self._owner is None:
                if self.database.closed:
                    raise StoreError("the store is closed")
                owner_id = new_id("ow")
                lock = locks.take(self.lock_path(owner_id))
                # Another process may sweep in the moment between making the file and locking it.
                if lock is not None:
                    self._owner = (owner_id, lock)
            return self._owner[0]

    def lock_path(self, holder_id: str) -> Path:
        """Return the file whose record lock says that the holder is alive: a sandbox's PID 1 takes it itself."""
        return self.home.locks / holder_id

    def is_alive(self, holder_id: str) -> bool:
        """Tell whether somebody holds the lock of this holder or owner, in this process or any other.

        Raises:
            StoreError: the lock cannot be looked at.
        """
        with typed(f"the lock of {holder_id} cannot be looked at"):
            return locks.is_locked(self.lock_path(holder_id))

    @contextmanager
    def single_flight(self, key: str, *, wait_s: float | None = None) -> Iterator[None]:
        """Let one thread of one process at a time through for each key. Waits; call it in a thread.

        A process that dies inside frees the key; one that stands still does not.

        Args:
            key: any text.
            wait_s: how long to wait for whoever is inside, in seconds; `ttl_s` by default.
        Raises:
            Locked: that was not enough.
            OutOfSpace, StoreError: its lock file cannot be made.
        """
        limit_s = self.ttl_s if wait_s is None else wait_s
        path = self.home.locks / f"flight-{sha256(os.fsencode(key)).hexdigest()[:32]}"
        with _entered(locks.turn(path, wait_s=limit_s), f"{key!r} cannot be locked", limit_s):
            yield

    def trash(self, path: Path) -> None:
        """Move a file or directory out of sight at once; `empty_trash` removes it. One that is gone is fine.

        Raises:
            StoreError: it lies on another file system, or something is mounted on it.
        """
        if self._move_to_trash(path):
            fault("trash:moved")

    def _move_to_trash(self, path: Path) -> bool:
        """Do as `trash`; tell whether there was anything."""
        with typed(f"{path} cannot be moved to the trash"):
            try:
                target = f"{self.home.trash}/{path.name}-{secrets.token_hex(8)}"
                mapped.if_refused(os.rename, path, target)
            except FileNotFoundError:
                return False
        return True

    def empty_trash(self) -> None:
        """Remove what is in the trash, never following a link or crossing a mount.

        Raises:
            StoreError: something could not be removed; all else is gone. `failures` is a list of (path, text).
        """
        failures = self._empty_trash()
        if failures:
            raise StoreError(f"{failures[0][0]} cannot be removed: {failures[0][1]}", failures=failures)

    def _empty_trash(self) -> list[tuple[str, str]]:
        failures = []
        with typed("the trash cannot be read"):
            names = sorted(os.listdir(self.home.trash))
        for name in names:
            path = self.home.trash / name
            try:
                with typed(f"{path} cannot be removed"):
                    remove_tree(path)
                fault("trash:removed")
            except StoreError as error:
                failures.append((str(path), str(error)))
        ballast.lay_in(self.home)
        return failures

    def close(self) -> None:
        """Give up the owner and close the metadata. Idempotent; what was published stays."""
        self._heartbeat.stop()
        with self._owner_mutex:
            owner, self._owner = self._owner, None
            if owner is not None:
                with typed("the lock of this process cannot be removed"):
                    owner[1].release()
            self.database.close()

    def _start_over(self) -> None:
        self.database.start_over()
        self._owner = None
        self._owner_mutex = threading.Lock()
        self._leases = set()
        self._heartbeat = self._new_heartbeat()


def frees_space(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Let an idempotent method that frees space have the ballast when the disk is full."""

    @wraps(method)
    def with_ballast(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(self, *args, **kwargs)
        except OutOfSpace:
            ballast.drop(self.home)
            self.database.reuse_log()
            return method(self, *args, **kwargs)

    return with_ballast


@contextmanager
def _entered(block: AbstractContextManager[None], doing: str, limit_s: float) -> Iterator[None]:
    """Enter a block with typed errors, and leave the errors of its body alone."""
    try:
        with typed(doing):
            block.__enter__()
    except locks.StillLocked as error:
        raise Locked(
            f"{doing}: another process has been at it for {limit_s:g} s",
            remedy="try again; if one of Worldfork's processes was stopped or hangs, continue or end it",
            holders=[],
        ) from error
    try:
        yield
    finally:
        with typed(doing):
            block.__exit__(None, None, None)


_open_stores: weakref.WeakSet[OwnedStore] = weakref.WeakSet()
_at_rest: list[OwnedStore] = []
_hooks = threading.Lock()
_hooked = False


def _follow_forks(store: OwnedStore) -> None:
    global _hooked
    with _hooks:
        if not _hooked:
            os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
            _hooked = True
        _open_stores.add(store)


def _before_fork() -> None:
    _hooks.acquire()
    _at_rest.extend(sorted(_open_stores, key=id))
    for store in _at_rest:
        store.database.hold_still()
    locks.hold_still()


def _after_in_parent() -> None:
    locks.resume()
    for store in reversed(_at_rest):
        store.database.resume()
    _at_rest.clear()
    _hooks.release()


def _after_in_child() -> None:
    global _hooks
    locks.start_over()
    for store in _at_rest:
        store._start_over()
    _at_rest.clear()
    _hooks = threading.Lock()
