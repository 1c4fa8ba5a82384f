from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from worldfork.cli.boundary import CANCELLED, PARTIAL, PIPE_CLOSED, verb
from worldfork.core.errors import ERROR_TABLE, WorldforkError

ROOT = Path(__file__).parents[3]


def run(function: object, *arguments: str) -> tuple[int, str, str]:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(verb(function))  # type: ignore[type-var,arg-type]
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def every_error(kind: type[WorldforkError] = WorldforkError) -> list[type[WorldforkError]]:
    return [kind, *(found for sub in kind.__subclasses__() for found in every_error(sub))]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.code)
def test_each_error_ends_with_its_exit_code(kind: type[WorldforkError]) -> None:
    def fail() -> None:
        raise kind("it broke", remedy="mend it")

    code, out, err = run(fail)
    assert code == ERROR_TABLE[kind.code][1]
    assert (out, err) == ("", "worldfork: it broke.\n  try: mend it\n")


def test_errors_are_json_where_facts_are() -> None:
    def fail(as_json: bool = typer.Option(False, "--json")) -> None:
        raise WorldforkError("it broke")

    code, out, err = run(fail, "--json")
    assert code == 1
    assert out == ""
    assert json.loads(err)["error"]["code"] == "worldfork"


def test_a_verb_that_returns_a_code_ends_with_it() -> None:
    assert run(lambda: PARTIAL)[0] == PARTIAL
    assert run(lambda: None)[0] == 0


def test_an_interrupt_ends_with_130() -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    assert run(fail)[0] == CANCELLED


def test_a_defect_keeps_its_traceback() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(verb(fail))
    assert isinstance(CliRunner().invoke(app).exception, ZeroDivisionError)


def test_the_page_of_exit_codes_is_the_table() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    rows = {
        code: (int(status), int(number))
        for number, code, status in re.findall(r"^\| (\d+) \| `(\w+)` \| .* \| (\d+) \|$", page, re.MULTILINE)
    }
    assert rows == ERROR_TABLE
    for number in (0, PARTIAL, CANCELLED, PIPE_CLOSED):
        assert f"\n| {number} |" in page
