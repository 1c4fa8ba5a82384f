"""The verbs for the store itself: check, upkeep."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated, Any

import typer

from worldfork.cli.boundary import OK, PARTIAL, exit_code, use_id_range, verb
from worldfork.cli.printing import human_bytes, note, one_line, print_json, print_line, print_table, progress
from worldfork.cli.sandboxes import AsJson
from worldfork.core.errors import Corrupt, OutOfSpace
from worldfork.core.settings import load_settings
from worldfork.exchange.exchange import fetch_layer
from worldfork.keeping.check import CheckReport, check
from worldfork.keeping.repair import RepairReport, repair
from worldfork.keeping.upkeep import keep_up
from worldfork.store.home import open_home
from worldfork.store.store import Store

store = typer.Typer(help="Check what the store holds, repair it, keep it small.", no_args_is_help=True)


@contextmanager
def _as_it_is() -> Iterator[Store]:
    """Open the store without forgetting what a crash of the machine made worthless: that, too, is to be seen."""
    settings = load_settings()
    home = open_home(settings)
    try:
        found = Store(home, ttl_s=settings.lease_ttl_s)
    except OutOfSpace:
        found = Store.open(home, ttl_s=settings.lease_ttl_s)  # takes the space that is kept back for this
    with closing(found) as opened:
        yield opened


@store.command("check")
@verb
def check_store(
    read_data: Annotated[bool, typer.Option("--read-data", help="Read the content of all files too.")] = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--repair", metavar="SOURCE", help="Repair from here: a directory, s3://bucket/prefix or an exported file."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Compare all that the store says with what is there. Changes nothing, unless --repair is given."""
    use_id_range()
    with _as_it_is() as opened:
        report = _checked(opened, read_data, as_json)
        if source is None or report.sound:
            _show(report, None, None, as_json=as_json)
            return _code(report)
        fetch = functools.partial(fetch_layer, source)
        with progress("repairing", total=len(report.damaged_layers), quiet=as_json) as steps:
            done = repair(opened, report, fetch, step=lambda layer_id: steps.advance(f"repairing {layer_id}"))
        after = _checked(opened, read_data, as_json)
        _show(report, done, after, as_json=as_json)
        return _code(after)


def _checked(opened: Store, read_data: bool, as_json: bool) -> CheckReport:
    with progress("checking", quiet=as_json) as steps:
        return check(opened, read_data, step=lambda layer_id: steps.advance(f"checking {layer_id}"))


def _code(report: CheckReport) -> int:
    return OK if report.sound else exit_code(Corrupt(""))


def _show(report: CheckReport, done: RepairReport | None, after: CheckReport | None, *, as_json: bool) -> None:
    if as_json:
        print_json(_shape(report, done, after))
        return
    _show_report(report)
    if done is not None and after is not None:
        _show_repair(done)
        print_line(f"After the repair: {_verdict(after)}")
        _show_findings(after)


def _shape(report: CheckReport, done: RepairReport | None, after: CheckReport | None) -> dict[str, Any]:
    if done is None or after is None:
        return {**report.to_json(), "repair": None}
    return {**after.to_json(), "repair": {**done.to_json(), "before": report.to_json()}}


def _show_report(report: CheckReport) -> None:
    content = human_bytes(report.read_bytes) if report.read_data else "not read; --read-data does"
    rows: list[tuple[str, object]] = [
        ("snapshots", report.snapshots),
        ("names", report.names),
        ("holders", report.holders),
        ("layers", report.layers),
        ("  sealed", report.sealed),
        ("  not sealed yet", report.unsealed),
        ("  being made or removed", report.moving + report.gone),
        ("memories", report.memories),
        ("paths", report.entries),
        ("content", content),
    ]
    print_table(("looked at", "count"), rows)
    _show_findings(report)
    for text in report.notes:
        note(f"worldfork: {one_line(text)}")
    print_line(_verdict(report))


def _show_findings(report: CheckReport) -> None:
    for finding in report.findings:
        print_line(one_line(str(finding)))
    for (kind, subject), count in report.counts.items():
        shown = sum((one.kind, one.subject) == (kind, subject) for one in report.findings)
        if count > shown:
            print_line(one_line(f"{kind} {subject}: and {count - shown} more"))


def _show_repair(done: RepairReport) -> None:
    for one in done.repaired:
        by = f" by {one.by}, for {one.snapshots} snapshot{'' if one.snapshots == 1 else 's'}" if one.by else ""
        print_line(f"layer {one.layer_id}: {one.how}{by}")
    for what, why in done.left:
        print_line(one_line(f"{what}: stays damaged: {why}"))
    for text in done.notes:
        note(f"worldfork: {one_line(text)}")


def _verdict(report: CheckReport) -> str:
    if report.sound:
        return "The store is sound."
    findings = "1 finding" if report.total == 1 else f"{report.total} findings"
    return f"The store is damaged: {findings} in {len(report.counts)}."


@store.command()
@verb
def upkeep(as_json: AsJson = False) -> int:
    """Seal, share, squash, keep the quota and collect, now and here. It also happens by itself in the background."""
    use_id_range()
    settings = load_settings()
    with progress("at upkeep", quiet=as_json):
        with closing(Store.open(open_home(settings), ttl_s=settings.lease_ttl_s)) as opened:
            report = keep_up(opened, settings)
    facts = dataclasses.asdict(report)
    failures = facts.pop("failures")
    if as_json:
        print_json({**facts, "failures": [{"what": what, "why": why} for what, why in failures]})
    else:
        rows = [
            (what.replace("_", " "), len(found) if isinstance(found, list) else found) for what, found in facts.items()
        ]
        print_table(("done", "count"), rows)
        for what, why in failures:
            note(f"worldfork: {one_line(f'{what}: {why}')}")
    return PARTIAL if failures else OK
