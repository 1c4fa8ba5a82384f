"""The verbs for the machine and the store: doctor, sweep, bench."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from pathlib import Path

import typer

import worldfork
from worldfork.cli.boundary import OK, PARTIAL, exit_code, verb
from worldfork.cli.printing import note, print_json, print_line, print_table, progress
from worldfork.cli.sandboxes import AsJson
from worldfork.core.errors import ConfigError, DriverUnavailable
from worldfork.core.settings import load_settings
from worldfork.lineage.place import place
from worldfork.rollout.leftovers import sweep_ends
from worldfork.sandbox.microvm.probe import probe_machines
from worldfork.sandbox.probe import probe


@verb
def doctor(as_json: AsJson = False) -> int:
    """Start real sandboxes in each way this machine offers; say what works and what mends the rest."""
    settings = load_settings()
    with progress("starting sandboxes", total=2, quiet=as_json) as steps:
        ways = asyncio.run(probe(settings))
        steps.advance("looking for what virtual machines need")
        machines = probe_machines(settings.home / "images", allow_tcg=settings.allow_tcg)
    results = [*ways, *machines]
    if as_json:
        print_json([dataclasses.asdict(result) for result in results])
    else:
        print_table(
            ("", "way", "detail"),
            [("works" if result.ok else "NOT", result.name, result.detail) for result in results],
        )
        broken = [result for result in results if not result.ok]
        for remedy in dict.fromkeys(result.remedy for result in broken if result.remedy):
            names = ", ".join(result.name for result in broken if result.remedy == remedy)
            print_line(f"\nFor {names}:\n  {remedy}")
    # A sandbox that shares this kernel has several ways to start; a machine needs each of its things.
    starts = any(way.ok for way in ways) or all(thing.ok for thing in machines)
    return OK if starts else exit_code(DriverUnavailable(""))


@verb
def sweep(as_json: AsJson = False) -> int:
    """Remove what dead owners left and what nothing uses any more. It also happens by itself at each start."""
    with progress("sweeping", quiet=as_json):
        here = place()
        swept = here.sweep()
        ends = sweep_ends(here)
        collected = here.store.collect()
    failures = [*swept.failures, *collected.failures]
    removed = {
        "sandboxes": swept.holders,
        "snapshots": [*swept.lost_snapshots, *ends],
        "layers": [*swept.drafts, *collected.layers],
        "leftovers": [*swept.leftovers, *collected.memories],
    }
    if as_json:
        print_json({**removed, "failures": [{"what": what, "why": why} for what, why in failures]})
    else:
        print_table(("removed", "count"), [(kind, len(found)) for kind, found in removed.items()])
        for what, why in failures:
            note(f"worldfork: {what} stays: {why}")
    return PARTIAL if failures else OK


@verb
def bench(context: typer.Context) -> None:
    """Measure. From a checkout: each figure of SPEC.md has a program in bench/; it gets the arguments as they are."""
    checkout = Path(worldfork.__file__).resolve().parents[2]
    if not (checkout / "bench" / "__main__.py").is_file():
        raise ConfigError("the benches are not part of the installed package", remedy="run this from a checkout")
    # The bench takes this process over, so that nothing of the command line is in what it measures.
    os.chdir(checkout)
    os.execv(sys.executable, [sys.executable, "-m", "bench", *context.args])
