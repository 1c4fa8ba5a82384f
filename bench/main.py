"""`python -m bench`: takes figures, one process each, and tells which bars are met."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import CHECKOUT, Options, Skip, host_facts, say, write_json

FIGURES = (
    "import_time",
    "fork_latency",
    "roundtrip",
    "bursts",
    "depth",
    "checkpoint_idle",
    "checkpoint_busy",
    "density",
    "resident",
    "versus_runc",
    "versus_nitrobox",
    "versus_build",
    "world_size",
    "sealing",
    "snapshots_1000",
    "prune",
    "deep_chain",
    "export_import",
    "rollouts_178",
    "rollouts_cpu",
    "repositories",
    "mutate",
    "split",
    "grading",
    "oversubscribed",
)
MACHINE_FIGURES = (
    "machine_fork",
    "machine_burst",
    "machine_pause",
    "machine_memory",
    "machine_hundred",
    "machine_disk",
)
"""Of virtual machines; each takes the namespace driver's value beside its own where that means something."""
COLUMNS = ("bar", "microvm", "namespace")
UNITS = {"ms": "ms", "s": "s", "mib": "MiB", "mb": "MB", "n": ""}
DRIVER_FIGURES = {"namespace": FIGURES, "microvm": MACHINE_FIGURES}
LIMIT_S = 3 * 3600


def take(name: str, options: Options) -> dict[str, Any]:
    """Take one figure in this process; what goes wrong becomes its status."""
    options.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    host = host_facts(options.home)
    try:
        result: dict[str, Any] = importlib.import_module(f"bench.{name}").run(options)
    except Skip as reason:
        result = {"figure": name, "status": "skip", "reason": str(reason)}
    except Exception as error:
        traceback.print_exc()
        result = {"figure": name, "status": "error", "reason": f"{type(error).__name__}: {error}"}
    return {**result, "quick": options.quick, "host": host}


def _take_apart(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Take one figure in a process of its own, so that none measures what another left in memory."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "bench", name, "--json", file.name, *arguments]
        subprocess.run(command, cwd=CHECKOUT, check=False, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
        text = Path(file.name).read_text()
    if not text:
        return {"figure": name, "status": "error", "reason": "its process ended without a result"}
    taken: list[dict[str, Any]] = json.loads(text)
    return taken[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description="Take the figures of SPEC.md.")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"figures, or how their names begin; by default all of the driver: {', '.join(FIGURES)};"
        f" of microvm {', '.join(MACHINE_FIGURES)}",
    )
    parser.add_argument(
        "--driver",
        choices=("namespace", "microvm"),
        default="namespace",
        help="whose figures to take; those of microvm end with a table that has namespace beside it",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write all results as JSON (to standard output without FILE)",
    )
    parser.add_argument("--quick", action="store_true", help="few samples, to see that a bench works; not to be quoted")
    parser.add_argument(
        "--home", type=Path, default=Options.home, help=f"store of the benches, kept between runs ({Options.home})"
    )
    parser.add_argument("--data", type=Path, default=Options.data, help=f"task sets ({Options.data})")
    parser.add_argument(
        "--set-up",
        action="store_true",
        help="may fetch what a comparison needs, or the guests' kernel, into the benches' own place",
    )
    return parser


def _line(result: dict[str, Any]) -> str:
    told = [f"{result['figure']:<17}{result['status']:<6}"]
    for each in result.get("bars", ()):
        value = next((f"{v} {k[6:]}" for k, v in each.items() if k.startswith("value_")), "")
        limit = next((f"(bar {v})" for k, v in each.items() if k.startswith("bar_")), "")
        told.append(f"{'' if each['passed'] else 'MISSED '}{each['what']} {value} {limit}".strip())
    return told[0] + ("; ".join(told[1:]) or result.get("reason", ""))


def _print_table(results: Sequence[dict[str, Any]]) -> None:
    """Print the rows that have a column for each driver, where there are any."""
    rows = [row for result in results for row in result.get("rows", ())]
    if not rows:
        return
    lines = [("", "bar", "microvm", "namespace", "")]
    for row in rows:
        told = ["" if row[key] is None else f"{row[key]:g} {UNITS[row['unit']]}".rstrip() for key in COLUMNS]
        lines.append((row["what"], *told, {True: "pass", False: "MISSED", None: "reported"}[row["passed"]]))
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    print()
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for note in dict.fromkeys(note for result in results if "rows" in result for note in result["notes"]):
        print(note)


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the named figures. Returns 0, 1 when a bar was missed, 2 when a bench broke or was asked wrongly."""
    asked = _parser().parse_args(arguments)
    known = (*FIGURES, *MACHINE_FIGURES) if asked.names else DRIVER_FIGURES[asked.driver]
    names = list(dict.fromkeys(figure for name in asked.names or [""] for figure in known if figure.startswith(name)))
    unknown = [name for name in asked.names if not any(figure.startswith(name) for figure in known)]
    if unknown:
        say(f"bench: no figure {unknown[0]!r}; there are {', '.join(known)}")
        return 2
    options = Options(quick=asked.quick, home=asked.home.absolute(), data=asked.data.absolute(), set_up=asked.set_up)
    passed_on = ["--home", str(options.home), "--data", str(options.data)]
    passed_on += ["--quick"] * options.quick + ["--set-up"] * options.set_up
    results = []
    for name in names:
        say(f"{name} ...")
        results.append(take(name, options) if len(names) == 1 else _take_apart(name, passed_on))
        if asked.json != "-":
            print(_line(results[-1]), flush=True)
    if asked.json != "-":
        _print_table(results)
    if asked.json == "-":
        print(json.dumps(results, indent=2))
    elif asked.json:
        write_json(Path(asked.json), results)
    states = {result["status"] for result in results}
    return 2 if "error" in states else 1 if "fail" in states else 0
