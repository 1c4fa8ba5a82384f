"""Programs of the distribution: what they print, why they fail, and that nothing of them stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worldfork.core.errors import DriverUnavailable, OutOfSpace
from worldfork.sandbox.microvm.programs import run_program


def test_what_it_prints_is_returned(tmp_path: Path) -> None:
    script = "pwd; echo $WORD $LC_ALL; echo noise >&2"
    out = run_program(["sh", "-c", script], tmp_path, 10, "none", variables={"WORD": "here"})
    assert out == f"{tmp_path}\nhere C\n"


def test_its_last_words_and_the_remedy_are_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(DriverUnavailable, match=r"sh -c failed: second; third; fourth") as caught:
        run_program(
            ["sh", "-c", "for w in first second third fourth; do\necho $w >&2; done; exit 3"], tmp_path, 10, "mend"
        )
    assert caught.value.remedy == "mend"


def test_a_full_disk_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(OutOfSpace) as caught:
        run_program(["sh", "-c", "echo 'x: No space left on device' >&2; exit 1"], tmp_path, 10, "mend")
    assert caught.value.scope == "host"


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DriverUnavailable, match="could not be started"):
        run_program(["no-such-program"], tmp_path, 10, "mend")


def test_at_its_limit_all_that_it_started_ends(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(DriverUnavailable, match=r"within 0\.5 s"):
            run_program(["sh", "-c", "sleep 1000 & wait"], tmp_path, 0.5, "mend", pass_fds=(writing,))
        os.close(writing)
        # The end of the pipe is seen once nobody has its other end.
        assert os.read(reading, 1) == b""
    finally:
        os.close(reading)
