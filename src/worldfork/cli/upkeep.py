"""The verbs for the machine and the store: doctor, sweep, bench."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import worldfork
from worldfork.cli.boundary import OK, exit_code, verb
from worldfork.cli.places import this_place
from worldfork.cli.printing import print_json, print_line, print_table, progress
from worldfork.cli.sandboxes import AsJson
from worldfork.core.errors import ConfigError, DriverUnavailable
from worldfork.core.settings import load_settings
from worldfork.sandbox.probe import ProbeResult, probe


@verb
def doctor(as_json: AsJson = False) -> int:
    """Start real sandboxes in each way this machine offers; say what works and what mends the rest."""
    with progress("starting sandboxes", quiet=as_json):
        results = asyncio.run(probe(load_settings()))
    cure = this_place().cure
    remedies = [result.remedy or cure if not result.ok else "" for result in results]
    if as_json:
        print_json(
            [
                {"name": result.name, "ok": result.ok, "detail": result.detail, "remedy": remedy}
                for result, remedy in zip(results, remedies, strict=True)
            ]
        )
    else:
        rows = [("works" if result.ok else "NOT", result.name, result.detail) for result in results]
        print_table(("", "way", "detail"), rows)
        for remedy in dict.fromkeys(filter(None, remedies)):
            names = [result.name for result, its in zip(results, remedies, strict=True) if its == remedy]
            print_line(f"\nFor {', '.join(names)}, try:\n  {remedy}")
    return OK if _starts(results) else exit_code(DriverUnavailable(""))


def _starts(results: list[ProbeResult]) -> bool:
    return any(result.ok for result in results)


@verb
def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="Figures; by default all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure. From a checkout: the programs lie in its bench/ directory, one for each figure of SPEC.md."""
    checkout = Path(worldfork.__file__).resolve().parents[2]
    if not (checkout / "bench" / "__main__.py").is_file():
        raise ConfigError("the benches are not part of the installed package", remedy="run this from a checkout")
    arguments = [*(names or []), *(["--json"] if as_json else [])]
    # The bench takes this process over, so that nothing of the command line is in what it measures.
    os.chdir(checkout)
    os.execv(sys.executable, [sys.executable, "-m", "bench", *arguments])
