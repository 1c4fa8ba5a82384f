"""The verb verify: are forks right, here and now?"""

from __future__ import annotations

from typing import Annotated

import typer

from worldfork.cli.boundary import FAILED, OK, verb
from worldfork.cli.printing import note, print_json, print_line, print_table, progress
from worldfork.cli.sandboxes import AsJson
from worldfork.core.errors import ConfigError
from worldfork.testing.adapter import load_adapter
from worldfork.testing.ours import name_of, usual_patience
from worldfork.testing.runner import chosen_checks, run_checks
from worldfork.testing.table import COLUMNS, failed, row, shape, summary


@verb
def verify(
    driver: Annotated[str, typer.Option(help="The driver whose forks are checked.")] = "namespace",
    base: Annotated[
        str, typer.Option(help="What sandboxes start from: host, or dir:PATH. Default: WORLDFORK_BASE.")
    ] = "",
    adapter: Annotated[
        str | None, typer.Option(metavar="MODULE:OBJECT", help="Check another system, through this adapter.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Run these checks alone, such as 3,19.")] = None,
    patience: Annotated[
        float | None,
        typer.Option(help="Multiplies the time limits. Default: 1, and 4 for guests that QEMU interprets."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Put forks through the numbered checks of docs/verify.md; end with 1 if one of them fails."""
    numbers = _numbers(only)
    named = adapter or name_of(driver, base)
    if patience is None:
        patience = 1.0 if adapter else usual_patience(driver, base)
    total = len(chosen_checks(numbers))
    with progress("checking", total=total, quiet=as_json) as steps:
        found = run_checks(
            load_adapter(named),
            numbers,
            named=named,
            patience=patience,
            told=lambda each: steps.advance(f"check {each.number}"),
        )
    if as_json:
        print_json({"adapter": named, "checks": shape(found)})
    else:
        print_table(COLUMNS, [row(each) for each in found])
        print_line(f"\n{summary(found)}")
        if failed(found):
            note("worldfork: a check that fails is described in docs/verify.md.")
    return FAILED if failed(found) else OK


def _numbers(text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"{text!r} are no numbers of checks", remedy="write them as 3,19") from None
