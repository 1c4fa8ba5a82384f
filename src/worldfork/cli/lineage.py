"""The verbs that show what there is: tree, show."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer

from worldfork.cli.boundary import verb
from worldfork.cli.lookup import open_store, snapshot_id_of
from worldfork.cli.printing import (
    human_bytes,
    human_seconds,
    one_line,
    print_json,
    print_line,
    print_table,
    progress,
)
from worldfork.cli.sandboxes import AsJson
from worldfork.cli.shapes import when
from worldfork.core.errors import NotFound
from worldfork.keeping.family import Member, family, state_of
from worldfork.keeping.state import digest_of
from worldfork.records.snapshot import LayerRecord, SnapshotRecord
from worldfork.store.store import Store

_NEAREST = 4
"""So many ancestors are shown in text."""


@verb
def tree(as_json: AsJson = False) -> None:
    """Show which snapshot came from which, with sizes, names and live forks."""
    with open_store() as store:
        members = family(store)
    if as_json:
        print_json([dataclasses.asdict(member) for member in members])
        return
    if not members:
        print_line("There is no snapshot.")
    for line in tree_lines(members):
        print_line(line)


class _Glyphs(NamedTuple):
    """What branches are drawn with. An only child stands below its parent without a step to the right."""

    only: str
    more: str
    last: str
    beside: str
    nothing: str = "   "


_LINES = _Glyphs("\u2193 ", "\u251c\u2500 ", "\u2514\u2500 ", "\u2502  ")
_ASCII = _Glyphs("| ", "|- ", "`- ", "|  ")


def _glyphs(encoding: str) -> _Glyphs:
    try:
        "".join(_LINES).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return _ASCII
    return _LINES


def tree_lines(members: list[Member], encoding: str | None = None) -> Iterator[str]:
    """Draw the lineage, one line for each snapshot. A chain of only children does not grow to the right."""
    glyphs = _glyphs(encoding or sys.stdout.encoding or "ascii")
    # Of each level on the way down: what stands before those below it, and how many of them are still to come.
    levels: list[tuple[str, int, int]] = []
    for member in members:
        del levels[member.depth :]
        before = mark = ""
        if levels:
            before, siblings, left = levels[-1]
            levels[-1] = (before, siblings, left - 1)
            mark = glyphs.only if siblings == 1 else glyphs.last if left == 1 else glyphs.more
        inner = before + {glyphs.more: glyphs.beside, glyphs.last: glyphs.nothing}.get(mark, "")
        levels.append((inner, member.children, member.children))
        yield f"{before}{mark}{member.snapshot_id}  {_facts(member)}"


def _facts(member: Member) -> str:
    forks = member.live_forks
    words = [
        *(f"[{one_line(name)}]" for name in member.names),
        member.state if member.level == "local" else f"{member.state} ({member.level})",
        f"+{human_bytes(member.added_bytes)} of {human_bytes(member.stored_bytes)}",
        *(["with memory"] if member.kind == "memory" else []),
        *([f"{forks} live fork{'' if forks == 1 else 's'}"] if forks else []),
        *([one_line(member.label)] if member.label else []),
        *([f"(its parent {member.parent_id} is gone)"] if member.parent_is_gone else []),
    ]
    return "  ".join(words)


@verb
def show(
    snapshot: Annotated[str, typer.Argument(metavar="SNAP", help="Id or name of a snapshot.")],
    digest: Annotated[bool, typer.Option("--digest", help="Find the digest of its state first; slow once.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show all that is known of a snapshot."""
    with open_store() as store:
        snapshot_id = snapshot_id_of(store, snapshot)
        if digest:
            with progress("reading", quiet=as_json):
                digest_of(store, snapshot_id)
        facts = describe(store, store.snapshot(snapshot_id))
    if as_json:
        print_json(facts)
        return
    for key, value in facts.items():
        if key not in ("layers", "facts", "ancestors", "memory", "connections", "suspended"):
            print_line(f"{key:<16}{one_line(_shown(key, value))}")
    for line in memory_lines(facts):
        print_line(one_line(line))
    nearest, count = facts["ancestors"][:_NEAREST], len(facts["ancestors"])
    more = f" and {count - _NEAREST} more" if count > _NEAREST else ""
    print_line(f"{'ancestors':<16}{', '.join(nearest) or '-'}{more}")
    print_line(f"{'kept with it':<16}{', '.join(sorted(facts['facts'])) or '-'}")
    print_line()
    columns = ("layer", "form", "state", "digest", "logical", "stored")
    rows = [
        (
            *(each[name] for name in ("layer_id", "form", "state", "digest")),
            *(human_bytes(each[name]) for name in ("logical_bytes", "stored_bytes")),
        )
        for each in facts["layers"]
    ]
    print_table(columns, rows)


def memory_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield what there is to say of a snapshot with memory, of `describe`."""
    memory, connections = facts["memory"], facts["connections"]
    if not memory:
        return
    yield f"{'memory':<16}{human_bytes(memory.get('stored_bytes'))} of {human_bytes(memory.get('ram_bytes'))}, " + (
        f"devices {human_bytes(memory.get('state_bytes'))}, disk {human_bytes(memory.get('disk_bytes'))}"
    )
    yield f"{'added':<16}{human_bytes(memory.get('added_bytes'))} that no earlier snapshot has"
    yield f"{'pause':<16}{human_seconds(memory.get('pause_s', 0.0))}"
    yield f"{'machine':<16}{memory.get('driver')}, QEMU {memory.get('qemu')}, {memory.get('accel')}, " + (
        f"{memory.get('vcpus')} CPUs, image {memory.get('image')}"
    )
    found = connections.get("found", [])
    yield f"{'connections':<16}{connections.get('decided', 'none left the sandbox')}"
    for one in found:
        yield f"{'':<16}{one.get('protocol')} {one.get('local')} to {one.get('remote')} {one.get('state', '')}"
    if facts["suspended"]:
        yield f"{'suspended':<16}{facts['suspended']} rests in it; `worldfork resume` lets it go on"


def describe(store: Store, record: SnapshotRecord) -> dict[str, Any]:
    """Return all that is known of a snapshot, as plain data for `--json`.

    Raises:
        StoreError: the metadata failed.
    """
    layers = [_layer(store, layer_id) for layer_id in record.layers]
    ancestors = _ancestors(store, record)
    return {
        "snapshot_id": record.snapshot_id,
        "names": [name for name, snapshot_id in store.names().items() if snapshot_id == record.snapshot_id],
        "label": record.label,
        "state": state_of(record.state, record.exported),
        "level": record.level,
        "exported_to": record.exported,
        "digest": record.digest,
        "kind": record.kind,
        "form": record.form,
        "base": record.base,
        "made_by": record.made_by,
        "sandbox_id": record.sandbox_id,
        "created_at": record.created_s,
        "parent_id": record.parent_id,
        "parent_is_gone": record.parent_id is not None and record.parent_id not in ancestors,
        "ancestors": ancestors,
        "size_bytes": record.size_bytes,
        "logical_bytes": _total(layers, "logical_bytes"),
        "stored_bytes": _total(layers, "stored_bytes"),
        "memory": record.facts.get("memory", {}),
        "connections": record.facts.get("connections", {}),
        "suspended": record.facts.get("suspended", {}).get("sandbox_id"),
        "layers": layers,
        "facts": record.facts,
    }


def _layer(store: Store, layer_id: str) -> dict[str, Any]:
    try:
        found = store.layer(layer_id)
    except NotFound:
        found = LayerRecord(layer_id, "", "missing", None, None, 0.0)
    return dataclasses.asdict(found)


def _total(layers: list[dict[str, Any]], what: str) -> int | None:
    """Return the sum over the layers; None where one of them has not been measured."""
    sizes = [each[what] for each in layers]
    return None if None in sizes else sum(sizes)


def _ancestors(store: Store, record: SnapshotRecord) -> list[str]:
    """Return the ids of what it came from, the nearest first, as far as those are there."""
    found: list[str] = []
    parent_id = record.parent_id
    while parent_id is not None and parent_id not in found and parent_id != record.snapshot_id:
        try:
            parent = store.snapshot(parent_id)
        except NotFound:
            break
        found.append(parent_id)
        parent_id = parent.parent_id
    return found


def _shown(key: str, value: object) -> str:
    if value is None or value in ([], ""):
        return "-"
    if key.endswith("_bytes") and isinstance(value, int):
        return human_bytes(value)
    if key == "created_at" and isinstance(value, float):
        return when(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return " ".join(f"{name}={text}" for name, text in value.items())
    return str(value)
