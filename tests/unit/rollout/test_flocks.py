from __future__ import annotations

import os
from pathlib import Path

import pytest

from worldfork.rollout.flocks import close_lock, open_lock, try_lock


def test_one_at_a_time(tmp_path: Path) -> None:
    one, other = (open_lock(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert try_lock(one)
    assert not try_lock(other)
    close_lock(one)
    assert try_lock(other)
    close_lock(other)
    # Idempotent.
    close_lock(other)


def test_a_copy_keeps_nothing_locked(tmp_path: Path) -> None:
    """As a child has it that was forked by something else than Python."""
    one, other = (open_lock(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    copy = os.dup(one)
    assert try_lock(one)
    close_lock(one)
    assert try_lock(other)
    os.close(copy)
    close_lock(other)


def test_a_forked_child_has_no_copy(tmp_path: Path) -> None:
    lock = open_lock(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    assert try_lock(lock)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            close_lock(lock)
            os.fstat(lock)
        except OSError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    other = open_lock(tmp_path / "lock", os.O_RDWR)
    assert not try_lock(other)
    close_lock(lock)
    close_lock(other)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(lock)
