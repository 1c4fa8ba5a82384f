"""Names that were moved and moved back: copied up by the overlay, and yet the same state."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.overlays import Stack, mounting
from tests.trees import Operation, Program

from worldfork.content.layer import walk
from worldfork.content.merged import MergedView, state_digest

FORMS = ("trusted", "user") if os.geteuid() == 0 else ("user",)


@pytest.fixture(scope="module")
def mounts() -> Iterator[Program]:
    with mounting() as running:
        yield running


def digests(stack: Stack, *moved: Operation) -> tuple[str, str]:
    """The digests of the state before and after some moves that are frozen as a layer."""
    before = state_digest(MergedView(stack.layers, stack.form))
    stack.do(*moved)
    stack.take()
    return before, state_digest(MergedView(stack.layers, stack.form))


@pytest.mark.parametrize("form", FORMS)
def test_moving_there_and_back_is_the_same_state(mounts: Program, tmp_path: Path, form: str) -> None:
    stack = Stack(mounts, Path(tempfile.mkdtemp(dir=tmp_path)), form)
    try:
        moves: list[Operation] = [("rename", "base/sub/deep", "x"), ("rename", "x", "base/sub/deep")]
        moves += [("rename", "base/link", "base/l"), ("rename", "base/l", "base/link")]
        if form == "trusted":
            moves += [("rename", "base", "moved"), ("rename", "moved", "base")]
        before, after = digests(stack, *moves)
        assert after == before
        copied = {found.entry.path for found in walk(stack.layers[0], form, hashed=False)}
        assert "base/sub/deep" in copied, "the layer holds the file, although nothing changed"
        changed = digests(stack, ("chmod", "base/sub/deep", 0o600))
        assert changed[0] != changed[1]
    finally:
        stack.end()


@pytest.mark.parametrize("form", FORMS)
def test_a_hard_link_that_a_move_split_is_another_state(mounts: Program, tmp_path: Path, form: str) -> None:
    stack = Stack(mounts, Path(tempfile.mkdtemp(dir=tmp_path)), form)
    try:
        before, after = digests(stack, ("rename", "other/file", "x"), ("rename", "x", "other/file"))
        assert after != before
    finally:
        stack.end()
