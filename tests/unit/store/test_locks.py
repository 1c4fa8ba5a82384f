"""Record locks: what POSIX takes away on every close must not be taken away here."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from tests.stores import exit_code_of, in_child, start_child

from worldfork.store import locks


def free(path: Path) -> bool:
    """Ask another process, which alone can tell."""
    return in_child(lambda: os._exit(7 if locks.is_locked(path) else 8)) == 8


def test_a_lock_is_seen_across_processes_and_ends_with_release(tmp_path: Path) -> None:
    lock = locks.take(tmp_path / "lock")
    assert lock is not None
    assert not free(tmp_path / "lock")
    lock.release()
    lock.release()
    assert not (tmp_path / "lock").exists()
    assert free(tmp_path / "lock")


def test_looking_at_our_own_lock_does_not_drop_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    lock = locks.take(path)
    assert lock is not None
    for _ in range(3):
        assert locks.is_locked(path)
        assert locks.take(path) is None
        assert locks.is_locked(tmp_path / "elsewhere" / "lock"), "by another path to the same file"
        assert not locks.remove_if_free(path)
    assert not free(path)
    lock.release()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    ready, told = os.pipe()
    stop, go = os.pipe()

    def hold() -> None:
        os.close(go)
        assert locks.take(path)
        os.write(told, b"x")
        os.read(stop, 1)

    child = start_child(hold)
    os.close(told)
    os.read(ready, 1)
    assert locks.is_locked(path)
    assert locks.take(path) is None
    assert not locks.remove_if_free(path)
    os.kill(child, 9)
    exit_code_of(child)
    assert path.exists()
    assert not locks.is_locked(path)
    assert locks.remove_if_free(path)
    assert not path.exists()
    for fd in (ready, stop, go):
        os.close(fd)


def test_a_forked_child_has_none_of_our_locks_and_cannot_release_them(tmp_path: Path) -> None:
    lock = locks.take(tmp_path / "lock")
    assert lock is not None

    def try_it() -> None:
        assert locks.is_locked(tmp_path / "lock")
        assert locks.take(tmp_path / "lock") is None
        lock.release()
        assert (tmp_path / "lock").exists()

    assert in_child(try_it) == 0
    assert not free(tmp_path / "lock")
    lock.release()


def test_a_file_that_is_not_there_is_not_locked(tmp_path: Path) -> None:
    assert not locks.is_locked(tmp_path / "none")
    assert locks.remove_if_free(tmp_path / "none")


def test_a_fork_while_a_thread_waits_hangs_nobody(tmp_path: Path) -> None:
    ready, told = os.pipe()
    stop, go = os.pipe()

    def hold() -> None:
        os.close(go)
        with locks.turn(tmp_path / "lock"):
            os.write(told, b"x")
            os.read(stop, 1)

    child = start_child(hold)
    os.read(ready, 1)
    entered = threading.Event()

    def enter() -> None:
        with locks.turn(tmp_path / "lock"):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert locks.is_locked(tmp_path / "lock")
    assert not entered.wait(0.05)
    os.write(go, b"x")
    os.close(go)
    assert exit_code_of(child) == 0
    thread.join()
    assert entered.is_set()
    assert list(tmp_path.iterdir()) == []
    for fd in (ready, told, stop):
        os.close(fd)


def test_threads_that_wait_for_each_other_crosswise_are_no_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = locks.fcntl.lockf
    refusals = [OSError(errno.EDEADLK, "deadlock"), OSError(errno.EAGAIN, "busy")]

    def refuse_first(fd: int, kind: int) -> None:
        if refusals:
            raise refusals.pop(0)
        real(fd, kind)

    monkeypatch.setattr(locks.fcntl, "lockf", refuse_first)
    with locks.turn(tmp_path / "lock"):
        assert not refusals
