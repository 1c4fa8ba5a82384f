"""The verbs for what is kept, and what goes: prune, tag, df."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from worldfork.cli.boundary import OK, PARTIAL, verb
from worldfork.cli.lookup import is_snapshot_id, open_store, snapshot_id_of
from worldfork.cli.printing import human_bytes, note, print_json, print_line, print_table, progress
from worldfork.cli.sandboxes import AsJson
from worldfork.core.errors import ConfigError, NotFound
from worldfork.core.settings import load_settings
from worldfork.keeping.keep_rules import OWN_NAMES, KeepRules
from worldfork.keeping.prune import PruneReport
from worldfork.keeping.prune import prune as prune_store
from worldfork.keeping.usage import Usage
from worldfork.keeping.usage import usage as usage_of
from worldfork.store.store import Store

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def duration_s(text: str) -> float:
    """Read an age such as `90s`, `12h`, `7d` or `1.5w` into seconds.

    Raises:
        ConfigError: it is none.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is not an age", remedy="give a number and s, m, h, d or w, such as 7d", text=text)
    return float(found[1]) * _UNITS_S[found[2]]


Measure = Annotated[bool, typer.Option("--measure", help="Walk layers whose size is not known yet.")]


@verb
def prune(
    keep_last: Annotated[int | None, typer.Option(min=0, metavar="N", help="Keep the last N published.")] = None,
    keep_within: Annotated[str | None, typer.Option(metavar="AGE", help="Keep those not older: 12h, 7d, 2w.")] = None,
    keep_label: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Keep those labelled so.")] = None,
    keep_name: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Keep those named so. Without it, all that have a name.")
    ] = None,
    keep_ancestors: Annotated[bool, typer.Option("--keep-ancestors", help="Keep what the kept came from.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Change nothing; say what would go.")] = False,
    measure: Measure = False,
    as_json: AsJson = False,
) -> int:
    """Remove the snapshots that no option keeps, and what nothing uses any more. Without a rule no snapshot goes."""
    rules = KeepRules(
        last=keep_last,
        within_s=None if keep_within is None else duration_s(keep_within),
        labels=tuple(keep_label or ()),
        names=tuple(keep_name) if keep_name else None,
        ancestors=keep_ancestors,
    )
    with progress("pruning", quiet=as_json), open_store() if dry_run else _swept_store() as store:
        report = prune_store(store, rules, dry_run=dry_run, measure=measure)
    if as_json:
        print_json(_prune_shape(report))
    else:
        _tell_prune(report, rules)
    return PARTIAL if report.failures else OK


@contextmanager
def _swept_store() -> Iterator[Store]:
    """Open the store, without what dead sandboxes and readers left in it: that would keep layers."""
    with open_store() as store:
        if all(store.is_living(holder) for holder in store.holders()):
            yield store
            return
    from worldfork.lineage.place import place

    here = place()
    for what, why in here.sweep().failures:
        note(f"worldfork: {what} stays: {why}")
    yield here.store


def _prune_shape(report: PruneReport) -> dict[str, Any]:
    return {
        **{
            name: getattr(report, name)
            for name in ("dry_run", "deleted", "layers", "freed_bytes", "unmeasured_layers", "memory_bytes")
        },
        "kept": [{"snapshot_id": one, "reasons": list(why)} for one, why in report.kept.items()],
        "in_use": [{"snapshot_id": one, "sandboxes": users} for one, users in report.in_use.items()],
        "failures": [{"what": what, "why": why} for what, why in report.failures],
    }


def _tell_prune(report: PruneReport, rules: KeepRules) -> None:
    if report.dry_run:
        rows = [(one, "goes", "") for one in report.deleted]
        rows += [(one, "in use", ", ".join(users)) for one, users in report.in_use.items()]
        rows += [(one, "stays", ", ".join(why)) for one, why in report.kept.items()]
        print_table(("snapshot", "", "why"), rows, empty="There is no snapshot.")
    else:
        for one in report.deleted:
            print_line(one)
        for one, users in report.in_use.items():
            note(f"worldfork: {one} stays: in use by {', '.join(users)}")
    for what, why in report.failures:
        note(f"worldfork: {what} stays: {why}")
    went, stay, freed = ("would go", "would stay", "would be free") if report.dry_run else ("went", "stay", "freed")
    unknown = report.unmeasured_layers
    more = f", and {_count(unknown, 'layer')} of unknown size" if unknown else ""
    more += f", and {human_bytes(report.memory_bytes)} of memory" if report.memory_bytes else ""
    in_use = f"{len(report.in_use)} {'is' if len(report.in_use) == 1 else 'are'} in use"
    note(
        f"{_count(len(report.deleted), 'snapshot')} {went}, {len(report.kept)} {stay}, {in_use}; "
        f"{_count(len(report.layers), 'layer')}: {human_bytes(report.freed_bytes)} {freed}{more}"
    )
    if not rules.any:
        note("There was no rule, so no snapshot goes; see `worldfork prune --help`.")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


@verb
def tag(
    snapshot: Annotated[str | None, typer.Argument(metavar="SNAP", help="Id or name of a snapshot.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="What it is to be called.")] = None,
    remove: Annotated[str | None, typer.Option(metavar="NAME", help="Take a name away; its snapshot stays.")] = None,
    as_json: AsJson = False,
) -> None:
    """Give a snapshot a name, which stands for its id and keeps it from being pruned. Without arguments list all."""
    if (snapshot is None) != (name is None) or (snapshot is not None and remove is not None):
        raise ConfigError("give a snapshot and a name, or --remove and a name, or nothing")
    with open_store() as store:
        if remove is not None:
            if store.named(remove) is None:
                raise NotFound(f"there is no name {remove!r}", remedy="worldfork tag", name=remove)
            store.set_name(remove, None)
        elif snapshot is not None and name is not None:
            store.set_name(_fit(name), snapshot_id_of(store, snapshot))
        names = store.names()
    if as_json:
        print_json([{"name": one, "snapshot_id": snapshot_id} for one, snapshot_id in names.items()])
    elif snapshot is None and remove is None:
        print_table(("name", "snapshot"), list(names.items()), empty="There is no name.")


def _fit(name: str) -> str:
    if is_snapshot_id(name):
        raise ConfigError(f"{name!r} has the form of an id", remedy="choose another name", name=name)
    own = tuple(pattern.rstrip("*") for pattern in OWN_NAMES)
    if name.startswith(own):
        raise ConfigError(
            f"{name!r} is a name that Worldfork gives itself",
            remedy=f"do not begin it with {' or '.join(own)}",
            name=name,
        )
    return name


@verb
def df(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for each snapshot too.")] = False,
    measure: Measure = False,
    as_json: AsJson = False,
) -> None:
    """Show what the snapshots would take, what they do take, what they share and what is of no use any more."""
    settings = load_settings()
    with progress("adding up", quiet=as_json), open_store() as store:
        found = usage_of(store, measure=measure)
    limits = {"reserve_bytes": settings.reserve_bytes, "quota_bytes": settings.quota_bytes}
    if as_json:
        print_json({**_usage_shape(found), **limits})
        return
    if verbose:
        rows = [
            (
                one.snapshot_id,
                *map(human_bytes, (one.logical_bytes, one.stored_bytes, one.own_bytes, one.memory_bytes)),
            )
            for one in found.snapshots
        ]
        print_table(("snapshot", "logical", "stored", "its own", "memory"), rows)
        print_line()
    print_table(("", "size", ""), _usage_rows(found, **limits))
    if found.unmeasured_layers:
        count = _count(found.unmeasured_layers, "layer")
        note(f"worldfork: {count} without a known size yet; --measure walks them")


def _usage_rows(found: Usage, reserve_bytes: int, quota_bytes: int) -> list[tuple[str, str, str]]:
    waste = found.reclaimable
    snapshots = len(found.snapshots)
    rows = [
        ("logical", found.logical_bytes, f"{_count(snapshots, 'snapshot')}, each kept whole"),
        ("stored", found.stored_bytes, f"{_count(found.layers, 'layer')} in use, each once"),
        ("shared", found.shared_bytes, "of it, used by more than one snapshot"),
        ("held", found.held_bytes, "of it, used by live sandboxes alone"),
        ("memory", found.memory_bytes, "of snapshots with memory, each file once; not in stored"),
        ("reclaimable", waste.total_bytes, "unused layers, trash, drafts of the dead: `worldfork prune`"),
        ("ballast", found.ballast_bytes, "kept back so that deletion works on a full disk"),
        ("free", found.free_bytes, f"on this disk; sandboxes leave {human_bytes(reserve_bytes)} of it"),
    ]
    if quota_bytes:
        rows.append(("quota", quota_bytes, "for stored and memory; WORLDFORK_QUOTA_BYTES"))
    return [(what, human_bytes(size_bytes), why) for what, size_bytes, why in rows]


def _usage_shape(found: Usage) -> dict[str, Any]:
    shape = dataclasses.asdict(found)
    for one in shape["snapshots"]:
        one["shared_bytes"] = one["stored_bytes"] - one["own_bytes"]
    shape["reclaimable"]["total_bytes"] = found.reclaimable.total_bytes
    return shape
