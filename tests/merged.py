"""Merged views of layers beside the kernel's: both as manifests of `tree_program`."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.trees import Manifest, Program

from worldfork.content.entry import Entry
from worldfork.content.merged import MergedView

_LEFT_OUT = ("security.selinux", "security.ima", "security.evm")


def seen_by_kernel(mounts: Program, point: Path, layers: Sequence[Path], form: str) -> Manifest:
    """What an overlay over these layers, top first, shows."""
    point.mkdir(exist_ok=True)
    below = [*layers]
    if len(below) == 1:  # the kernel wants two, where there is no upper
        empty = point.with_name(point.name + ".empty")
        empty.mkdir(exist_ok=True)
        below.append(empty)
    kind = "redirect_dir=on" if form == "trusted" else "userxattr"
    options = f"lowerdir={':'.join(map(str, below))},index=off,metacopy=off,{kind}"
    found: Manifest = mounts.ask(point, mount=options, unmount=True)["manifest"]
    return found


def seen_by_us(layers: Sequence[Path], form: str) -> Manifest:
    """What our own lookup over these layers shows."""
    view = MergedView(layers, form)
    entries = list(view.walk())
    group: dict[str, str] = {}
    for entry in entries:
        first = entry.link or entry.path
        group[first] = min(group.get(first, entry.path), entry.path)
    return {entry.path: _facts(view, entry, group[entry.link or entry.path]) for entry in entries}


def _facts(view: MergedView, entry: Entry, same_as: str) -> dict[str, object]:
    target = entry.target if entry.kind == "l" else None
    size = {"f": entry.size_bytes, "l": len(os.fsencode(entry.target))}.get(entry.kind)
    return {
        "kind": entry.kind,
        "mode": oct(entry.mode),
        "owner": [entry.uid, entry.gid],
        "size": size,
        "mtime_ns": entry.mtime_ns,
        "xattrs": {name: value.hex() for name, value in entry.xattrs if name not in _LEFT_OUT},
        "target": target,
        "same_as": same_as,
        "content": _md5(view, entry.path) if entry.kind == "f" else None,
    }


def _md5(view: MergedView, path: str) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for data in read(view, path):
        digest.update(data)
    return digest.hexdigest()


def read(view: MergedView, path: str) -> Iterator[bytes]:
    """The content of a file, also in a directory that is closed to this user."""
    try:
        node = view.node(path)
        assert node is not None
        yield from view.read(node)
    except PermissionError:
        for line in view._mapped("_content", path):
            yield base64.b64decode(line)
