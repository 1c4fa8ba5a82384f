"""The verbs that look into snapshots without starting a sandbox: diff, cat, files."""

from __future__ import annotations

import base64
import datetime
import stat
from typing import Annotated, Any

import typer

from worldfork.cli.boundary import verb
from worldfork.cli.lookup import open_store, snapshot_id_of
from worldfork.cli.printing import human_bytes, print_bytes, print_json, print_line, print_table
from worldfork.cli.sandboxes import AsJson
from worldfork.content.compare import Change, patch, shown_path
from worldfork.content.entry import Entry
from worldfork.keeping.browse import browsing, compared, comparing

_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_KINDS = {"f": "-", "d": "d", "l": "l", "c": "c", "b": "b", "p": "p", "s": "s"}

_Old = Annotated[str, typer.Argument(metavar="A", help="Id or name of a snapshot.")]
_New = Annotated[str, typer.Argument(metavar="B", help="Id or name of the one to compare it with.")]
_Paths = Annotated[list[str] | None, typer.Argument(metavar="[PATH]...", help="Only what lies there.")]
_Snapshot = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Id or name of a snapshot.")]


@verb
def diff(
    old: _Old,
    new: _New,
    paths: _Paths = None,
    patches: Annotated[bool, typer.Option("--patch", "-p", help="Show how texts changed.")] = False,
    times: Annotated[bool, typer.Option("--times", help="Tell files too of which only the time changed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what was added, changed and removed from one snapshot to another."""
    found: list[dict[str, Any]] = []
    with open_store() as store:
        pair = snapshot_id_of(store, old), snapshot_id_of(store, new)
        with comparing(store, *pair) as (before, after):
            for path in dict.fromkeys(paths or [""]):
                for change in compared(before, after, path, times=times):
                    text = patch(before.view, after.view, change) if patches else b""
                    if as_json:
                        found.append(_shape(change, text if patches else None))
                    else:
                        _print_change(change, text, patches)
    if as_json:
        print_json(found)


@verb
def cat(
    snapshot: _Snapshot,
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file; links are followed inside the snapshot.")],
    as_json: AsJson = False,
) -> None:
    """Print a file of a snapshot, byte for byte. With --json as one object, in base64."""
    with open_store() as store, browsing(store, snapshot_id_of(store, snapshot)) as opened:
        if as_json:
            data = b"".join(opened.chunks(path))
            print_json({"path": path, "size_bytes": len(data), "content_base64": base64.b64encode(data).decode()})
            return
        for chunk in opened.chunks(path):
            print_bytes(chunk)


@verb
def files(
    snapshot: _Snapshot,
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="A directory, or one file.")] = "/",
    as_json: AsJson = False,
) -> None:
    """List a directory of a snapshot."""
    with open_store() as store, browsing(store, snapshot_id_of(store, snapshot)) as opened:
        entries = opened.list(path)
    if as_json:
        print_json([_entry_shape(entry) for entry in entries])
        return
    rows = [
        (
            _KINDS[entry.kind] + stat.filemode(entry.mode)[1:],
            f"{entry.uid}:{entry.gid}",
            human_bytes(entry.size_bytes) if entry.kind == "f" else None,
            _when(entry.mtime_ns),
            _name(entry),
        )
        for entry in entries
    ]
    print_table(("mode", "owner", "size", "changed", "name"), rows, empty="It is empty.")


def _print_change(change: Change, text: bytes, patches: bool) -> None:
    line = f"{_SIGNS[change.how]} {_shown('/' + change.path)}"
    node = change.new or change.old
    if node is not None and node.seen.kind == "d":
        line += "" if line.endswith("/") else "/"
    facts = _sizes(change)
    if change.what:
        facts = [*change.what, *facts]
    print_line(line + (f"  ({', '.join(facts)})" if facts else ""))
    if patches and text:
        print_bytes(text)


def _sizes(change: Change) -> list[str]:
    old, new = change.old_bytes, change.new_bytes
    if old is not None and new is not None:
        return [f"{human_bytes(old)} -> {human_bytes(new)}"] if "content" in change.what else []
    size = old if new is None else new
    return [] if size is None else [human_bytes(size)]


def _shape(change: Change, text: bytes | None) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "path": _plain("/" + change.path),
        "change": change.how,
        "what": list(change.what),
        "old_kind": None if change.old is None else change.old.seen.kind,
        "new_kind": None if change.new is None else change.new.seen.kind,
        "old_bytes": change.old_bytes,
        "new_bytes": change.new_bytes,
    }
    if text is not None:
        shape["patch"] = text.decode(errors="replace")
    return shape


def _entry_shape(entry: Entry) -> dict[str, Any]:
    return {
        "path": _plain("/" + entry.path),
        "kind": entry.kind,
        "mode": f"{entry.mode:04o}",
        "uid": entry.uid,
        "gid": entry.gid,
        "size_bytes": entry.size_bytes if entry.kind == "f" else None,
        "modified_at": entry.mtime_ns / 1e9,
        "target": _plain(entry.target) if entry.kind == "l" else None,
    }


def _name(entry: Entry) -> str:
    name = _shown(entry.path.rpartition("/")[2])
    return f"{name} -> {_shown(entry.target)}" if entry.kind == "l" else name


def _shown(path: str) -> str:
    return shown_path(path).decode()


def _plain(text: str) -> str:
    """Return text that is UTF-8: bytes of a name that are not become escapes, which JSON can carry."""
    return text.encode("utf-8", "backslashreplace").decode()


def _when(moment_ns: int) -> str:
    try:
        return datetime.datetime.fromtimestamp(moment_ns // 10**9).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{moment_ns // 10**9} s"
