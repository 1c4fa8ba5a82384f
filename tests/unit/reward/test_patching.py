"""Edits as diffs, and diffs as edits."""

from __future__ import annotations

from typing import Any

import pytest

from worldfork.core.errors import ConfigError
from worldfork.records.edits import EditedFile, Edits
from worldfork.reward.patching import diff_of, edits_of

ORIGINALS = {"a.py": b"one\ntwo\n", "b.py": b"x", "pkg/c.py": b"c\n", "data.bin": b"\0\1"}
EDITABLE = ("**",)


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
    assert edits_of(diff, ORIGINALS, EDITABLE) == edits


def test_nothing() -> None:
    assert diff_of(ORIGINALS, Edits()) == b""
    assert edits_of(b"", ORIGINALS, EDITABLE).empty


def test_what_was_dropped_or_is_not_known_makes_no_change() -> None:
    assert diff_of(ORIGINALS, Edits({"a.py": EditedFile(b"one\ntwo\n", executable=True)}, ("gone.py",))) == b""


def test_a_patch_reaches_editable_files_alone_and_makes_no_links() -> None:
    patch = "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1 @@\n one\n-two\n"
    assert edits_of(patch, ORIGINALS, ("a.py",)) == Edits({"a.py": EditedFile(b"one\n")})
    with pytest.raises(ConfigError, match="not editable"):
        edits_of(patch, ORIGINALS, ("pkg/**",))
    link = "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n"
    with pytest.raises(ConfigError, match="becomes a link"):
        edits_of(link, ORIGINALS, EDITABLE)
    with pytest.raises(ConfigError, match="hunk 1"):
        edits_of(patch, {"a.py": b"two\none\n"}, EDITABLE)


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
