"""Making snapshots durable in the background: all that are waiting share one synchronisation of the disk."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from worldfork.core.errors import ConfigError, OutOfSpace
from worldfork.keeping.with_ids import with_ids
from worldfork.store.store import Store

_log = logging.getLogger("worldfork")


@dataclass(eq=False)
class _Waiting:
    snapshot_id: str
    exported: bool
    sync_fd: int | None
    future: Future[None] = field(default_factory=Future)


class Synchroniser:
    """What one process has promised to bring to disk, and from there to the remote."""

    def __init__(self, store: Store, remote: str, done: Callable[[], None]) -> None:
        """Take where to work.

        Args:
            store: whose snapshots.
            remote: where those of level `exported` go.
            done: called after each round.
        """
        self._store = store
        self._remote = remote
        self._done = done
        # Of its own: a removal that takes minutes must not keep a snapshot from the disk.
        self._syncing = ThreadPoolExecutor(1, thread_name_prefix="worldfork-sync")
        # A copy to the other end of the world must not keep the disk waiting.
        self._pushing = ThreadPoolExecutor(1, thread_name_prefix="worldfork-push")
        self._mutex = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._under_way: dict[str, Future[None]] = {}
        self._later: set[str] = set()
        """Ids of snapshots that could not be copied."""

    def begin(self, snapshot_id: str, level: str, sync_fd: int | None) -> Future[None]:
        """Begin to bring a snapshot to where its level says; the descriptor is closed afterwards.

        A throw-away snapshot is where it belongs at once.
        """
        if level == "volatile":
            if sync_fd is not None:
                os.close(sync_fd)
            settled: Future[None] = Future()
            settled.set_result(None)
            return settled
        one = _Waiting(snapshot_id, level == "exported", sync_fd)
        # Whoever stops waiting for it must not be able to call it off: others wait as well.
        one.future.set_running_or_notify_cancel()
        with self._mutex:
            self._waiting.append(one)
            self._under_way[snapshot_id] = one.future
        _submit(self._syncing, self._round)
        return one.future

    def under_way(self, snapshot_id: str) -> Future[None] | None:
        """Return what a snapshot's way to the disk, or to the remote, will end with, if it is on it."""
        return self._under_way.get(snapshot_id)

    def _round(self) -> None:
        with self._mutex:
            many, self._waiting = self._waiting, []
        if not many:
            return  # an earlier round took this one along
        try:
            fds = [one.sync_fd for one in many if one.sync_fd is not None]
            errors = self._store.make_all_durable([one.snapshot_id for one in many], fds)
        except BaseException as error:
            for one in many:
                self._settle(one, error)
            raise
        finally:
            for one in many:
                if one.sync_fd is not None:
                    os.close(one.sync_fd)
        for one in many:
            failed = errors.get(one.snapshot_id)
            if failed is None and one.exported:
                _submit(self._pushing, lambda one=one: self._push(one))  # type: ignore[misc]  # binds the loop's value
            else:
                self._settle(one, failed)
        self._done()

    def _push(self, one: _Waiting) -> None:
        try:
            push_one(self._store, one.snapshot_id, self._remote)
        except BaseException as error:
            _log.warning("%s could not be copied to %s: %s", one.snapshot_id, self._remote, error)
            self._later.add(one.snapshot_id)
            self._settle(one, error)
        else:
            self._settle(one, None)
            self._push_again()

    def _push_again(self) -> None:
        """Now that the remote is there: what could not be copied before."""
        while self._later:
            snapshot_id = self._later.pop()
            try:
                push_one(self._store, snapshot_id, self._remote)
            except Exception as error:
                _log.warning("%s could not be copied to %s: %s", snapshot_id, self._remote, error)

    def _settle(self, one: _Waiting, error: BaseException | None) -> None:
        with self._mutex:
            self._under_way.pop(one.snapshot_id, None)
        if error is None:
            one.future.set_result(None)
        else:
            one.future.set_exception(error)

    def finish_for_others(self) -> None:
        """Bring to disk, and to the remote, what dead processes had promised. Blocking."""
        errors = self._store.make_all_durable(self._store.pending_durability())
        for snapshot_id, error in errors.items():
            _log.warning("%s could not be brought to disk: %s", snapshot_id, error)
        if self._remote:
            for snapshot_id in self._store.pending_export():
                one = _Waiting(snapshot_id, exported=True, sync_fd=None)
                _submit(self._pushing, lambda one=one: self._push(one))  # type: ignore[misc]  # binds the loop's value

    def close(self) -> None:
        """Wait until all that was begun is done. Idempotent."""
        self._syncing.shutdown(wait=True)
        self._pushing.shutdown(wait=True)


def _submit(threads: ThreadPoolExecutor, work: Callable[[], None]) -> None:
    """Have a thread do it; at the end of the interpreter, when no thread takes anything any more, do it here."""
    try:
        threads.submit(work)
    except RuntimeError:
        work()


def push_one(store: Store, snapshot_id: str, remote: str) -> None:
    """Copy a snapshot to the remote, and write down that it is there.

    Raises:
        WorldforkError: it could not be copied, or the remote cannot be used.
    """
    from worldfork.exchange.exchange import push

    with_ids(store, [snapshot_id], push, [snapshot_id], remote)


def check_level(level: str, remote: str) -> None:
    """Refuse a level that cannot be kept.

    Raises:
        ConfigError: `exported` without a remote.
    """
    if level == "exported" and not remote:
        raise ConfigError(
            "a snapshot of level 'exported' needs somewhere to go",
            remedy="set WORLDFORK_REMOTE to a directory or to s3://bucket/prefix",
        )


def expect_quota(store: Store, quota_bytes: int) -> None:
    """Refuse to store more than the quota lets.

    Raises:
        OutOfSpace: the layers take more already; scope "quota".
    """
    from worldfork.keeping.quota import over_quota

    over_bytes = over_quota(store, quota_bytes) if quota_bytes else 0
    if over_bytes:
        raise OutOfSpace(
            f"the layers of {store.home.root} exceed their quota of {quota_bytes} bytes by {over_bytes}",
            remedy="run `worldfork prune`, or raise WORLDFORK_QUOTA_BYTES",
            scope="quota",
            quota_bytes=quota_bytes,
            over_bytes=over_bytes,
        )
