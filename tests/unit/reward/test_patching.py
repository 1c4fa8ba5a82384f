"""Edits as diffs, which give them back."""

from __future__ import annotations

from typing import Any

from worldfork.content.patches import PatchFile, apply_patch, parse_patch
from worldfork.content.patches.model import EXECUTABLE
from worldfork.records.edits import EditedFile, Edits
from worldfork.reward.patching import diff_of

ORIGINALS = {"a.py": b"one\ntwo\n", "b.py": b"x", "pkg/c.py": b"c\n", "data.bin": b"\0\1"}


def test_there_and_back() -> None:
    edits = Edits(
        {
            "a.py": EditedFile(b"one\nthree\n"),
            "new/run": EditedFile(b"#!/bin/sh\n", executable=True),
            "data.bin": EditedFile(b"\0\2"),
            "moved.py": EditedFile(b"c\n"),
        },
        ("b.py", "pkg/c.py"),
    )
    diff = diff_of(ORIGINALS, edits)
    assert b"-two\n+three\n" in diff
    assert b"rename from pkg/c.py\nrename to moved.py\n" in diff
    old = {path: PatchFile(content) for path, content in ORIGINALS.items()}
    made = apply_patch(parse_patch(diff), old.get)
    files = {path: EditedFile(file.content, file.mode == EXECUTABLE) for path, file in made.items() if file is not None}
    assert Edits(files, tuple(path for path, file in made.items() if file is None)) == edits


def test_nothing() -> None:
    assert diff_of(ORIGINALS, Edits()) == b""


def test_what_was_dropped_or_is_not_known_makes_no_change() -> None:
    assert diff_of(ORIGINALS, Edits({"a.py": EditedFile(b"one\ntwo\n", executable=True)}, ("gone.py",))) == b""


def test_no_file_is_read_but_those_that_were_touched() -> None:
    class Counted(dict[str, bytes]):
        def __init__(self) -> None:
            super().__init__(ORIGINALS)
            self.read: list[str] = []

        def __getitem__(self, path: str) -> bytes:
            self.read.append(path)
            return super().__getitem__(path)

        def items(self) -> Any:
            raise AssertionError

    originals = Counted()
    edits = Edits({"a.py": EditedFile(b"mine"), "new.py": EditedFile(b"")}, ("b.py",))
    assert b"+mine" in diff_of(originals, edits)
    assert sorted(originals.read) == ["a.py", "b.py"]
