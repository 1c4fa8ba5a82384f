"""Saved memories that a process holds: one for all who ask, let go of when nobody does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.unit.sandbox.microvm.test_manifest import SAVED

from worldfork.core.errors import NotFound
from worldfork.sandbox.microvm import memories as module
from worldfork.sandbox.microvm.manifest import Saved, write_saved
from worldfork.sandbox.microvm.memories import Memories


class Assembler:
    """In place of the real one: counts, and waits where it is told to."""

    def __init__(self) -> None:
        self.calls: list[list[Path]] = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, files: list[Path], ram_bytes: int) -> int:
        self.calls.append(files)
        assert self.go.wait(20)
        if not files[0].exists():
            raise NotFound("gone")
        fd = os.memfd_create("memory")
        os.ftruncate(fd, ram_bytes)
        return fd


@pytest.fixture
def assembler(monkeypatch: pytest.MonkeyPatch) -> Assembler:
    found = Assembler()
    monkeypatch.setattr(module, "assemble", found)
    return found


@pytest.fixture
def memories() -> Iterator[Memories]:
    found = Memories()
    yield found
    found.drop(0.0)


def make(directory: Path) -> Saved:
    directory.mkdir()
    (directory / "ram.0").touch()
    write_saved(directory, SAVED)
    return SAVED


def inode(fd: int) -> int:
    try:
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)


def test_many_at_once_get_one(tmp_path: Path, assembler: Assembler, memories: Memories) -> None:
    saved = make(tmp_path / "one")
    assembler.go.clear()
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(memories.lend, tmp_path / "one", saved) for _ in range(8)]
        assembler.go.set()
        assert len({inode(one.result(20)) for one in asked}) == 1
    assert assembler.calls == [[tmp_path / "one" / "ram.0", tmp_path / "one" / "ram.1"]]


def test_a_directory_made_again_is_another(tmp_path: Path, assembler: Assembler, memories: Memories) -> None:
    saved = make(tmp_path / "one")
    first = memories.lend(tmp_path / "one", saved)
    (tmp_path / "one").rename(tmp_path / "old")
    make(tmp_path / "one")
    assert inode(memories.lend(tmp_path / "one", saved)) != inode(first)
    assert len(assembler.calls) == 2


def test_one_that_fails_is_tried_again(tmp_path: Path, assembler: Assembler, memories: Memories) -> None:
    saved = make(tmp_path / "one")
    (tmp_path / "one" / "ram.0").unlink()
    for _ in range(2):
        with pytest.raises(NotFound):
            memories.lend(tmp_path / "one", saved)
    (tmp_path / "one" / "ram.0").touch()
    os.close(memories.lend(tmp_path / "one", saved))
    assert len(assembler.calls) == 3


def test_what_is_lent_outlives_what_is_let_go(tmp_path: Path, assembler: Assembler, memories: Memories) -> None:
    saved = make(tmp_path / "one")
    assert not memories.holds(tmp_path / "one")
    lent = memories.lend(tmp_path / "one", saved)
    assert memories.holds(tmp_path / "one")
    assert not memories.holds(tmp_path / "two")
    assert memories.drop(1.0), "it was used just before"
    assert not memories.drop(0.0)
    assert not memories.holds(tmp_path / "one")
    again = memories.lend(tmp_path / "one", saved)
    assert inode(again) != inode(lent)
    assert len(assembler.calls) == 2


def test_only_so_many_are_held(tmp_path: Path, assembler: Assembler, memories: Memories) -> None:
    places = [tmp_path / str(number) for number in range(6)]
    for place in places:
        os.close(memories.lend(place, make(place)))
    os.close(memories.lend(places[-1], SAVED))
    assert len(assembler.calls) == 6
    os.close(memories.lend(places[0], SAVED))
    assert len(assembler.calls) == 7, "the first was let go of"


def test_a_forked_child_holds_nothing(tmp_path: Path, assembler: Assembler, memories: Memories) -> None:
    saved = make(tmp_path / "one")
    os.close(memories.lend(tmp_path / "one", saved))
    memories.forget()
    os.close(memories.lend(tmp_path / "one", saved))
    assert len(assembler.calls) == 2
