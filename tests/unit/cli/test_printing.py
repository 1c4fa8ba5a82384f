from __future__ import annotations

import dataclasses
import json

import pytest

from worldfork.cli import printing
from worldfork.cli.lineage import tree_lines
from worldfork.cli.shapes import when
from worldfork.core.errors import Locked, NotFound
from worldfork.keeping.family import Member


def test_an_error_is_one_sentence_and_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_error(NotFound("there is no\nsnapshot 'sn-x'", remedy="worldfork snapshots"), as_json=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "worldfork: there is no snapshot 'sn-x'.\n  try: worldfork snapshots\n"


def test_an_error_quotes_blanks_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_error(NotFound("line 2 should be '    x',\n  and is '\\tx   '"), as_json=False)
    assert capsys.readouterr().err == "worldfork: line 2 should be '    x', and is '\\tx   '.\n"


def test_an_error_as_json_carries_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_error(Locked("in use", holders=["sb-a"], odd=object), as_json=True)
    out, err = capsys.readouterr()
    assert out == ""
    facts = json.loads(err)["error"]
    assert facts["code"] == "locked"
    assert facts["retryable"] is True
    assert facts["fields"]["holders"] == ["sb-a"]
    assert isinstance(facts["fields"]["odd"], str)


def test_a_table_for_a_pipe_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 500
    printing.print_table(("id", "detail"), [("sb-1", long), ("sb-2", None)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert long in lines[1]
    assert lines[2].split() == ["sb-2", "-"]


def test_square_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_table(("id",), [("rollout[1] [red]x[/red] :smile:",)])
    assert "rollout[1] [red]x[/red] :smile:" in capsys.readouterr().out


def test_an_empty_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_table(("id",), [], empty="Nothing.")
    assert capsys.readouterr().out == "Nothing.\n"


def test_progress_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with printing.progress("working", total=2) as steps:
        steps.advance()
        steps.advance("still")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (300 << 20, "300.0 MiB"), (1 << 50, "1024.0 TiB")],
)
def test_sizes(size_bytes: int | None, text: str) -> None:
    assert printing.human_bytes(size_bytes) == text


@pytest.mark.parametrize(("duration_s", "text"), [(0.00085, "850 us"), (0.0032, "3.2 ms"), (7.2, "7.20 s")])
def test_durations(duration_s: float, text: str) -> None:
    assert printing.human_seconds(duration_s) == text


@pytest.mark.parametrize("moment_s", [1e300, -1e12, 1e17, float("inf"), float("nan"), 253_402_300_800])
def test_a_moment_that_no_calendar_has_is_shown_all_the_same(moment_s: float) -> None:
    assert when(moment_s)


def test_a_moment_is_shown_as_date_and_time() -> None:
    assert len(when(1_700_000_000.5)) == len("2023-11-14 22:13:20")
    assert when(None) == "-"


HOSTILE = "\x1b]0;owned\x07\x9b2J\u202e\udcff\x7f"


def test_no_word_of_others_is_a_command_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    printing.print_line(f"label {HOSTILE}")
    printing.note(f"label {HOSTILE}")
    printing.print_table((f"head {HOSTILE}"[:4], "b"), [("one", HOSTILE), (f"two\n{HOSTILE}", 1)])
    printing.print_error(NotFound(f"no {HOSTILE}", remedy=HOSTILE, path=HOSTILE), as_json=False)
    printing.print_error(NotFound(f"no {HOSTILE}", remedy=HOSTILE, path=HOSTILE), as_json=True)
    printing.print_json({"label": HOSTILE, HOSTILE: [1]})
    out, err = capfd.readouterr()
    for text in (out, err):
        assert all(one.isprintable() or one == "\n" for one in text), text
    assert "\\x1b]0;owned\\x07\\x9b2J\\u202e\\udcff\\x7f" in out
    assert json.loads(out[out.index("{\n") :]) == {"label": HOSTILE, HOSTILE: [1]}
    assert json.loads(err.splitlines()[-1])["error"]["fields"]["path"] == HOSTILE


def test_lines_of_ours_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_line("\none\n  two \u2193 \u00e9")
    assert capsys.readouterr().out == "\none\n  two \u2193 \u00e9\n"


def test_a_tree_has_one_line_for_each_snapshot() -> None:
    facts: dict[str, object] = {field.name: 0 for field in dataclasses.fields(Member)}
    words = {"names": [f"x\n{HOSTILE}"], "label": f"y\n{HOSTILE}", "state": "ready", "level": "local"}
    member = Member(**{**facts, **words})  # type: ignore[arg-type]
    [line] = tree_lines([member])
    assert line.isprintable()
