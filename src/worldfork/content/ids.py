"""Which layers may hold files of a range of ids, and whether this process sees their owners as they are."""

from __future__ import annotations

from pathlib import Path

from worldfork.core.errors import FormatUnsupported
from worldfork.core.idmap import covers, own_map

_NAME = "ids"
"""Of the file beside a layer's tree that holds the map of the sandboxes that wrote it."""
_TREE = "fs"


def write_ids(layer: Path, ids: str) -> None:
    """Say in a layer's directory, before it has any content, which map its content will be written under.

    Args:
        layer: the directory.
        ids: the map, as `core.idmap` writes it; that of this process by default, and nothing where there is none.
    """
    if text := ids or own_map():
        (layer / _NAME).write_text(text)


def ids_of(root: Path) -> str:
    """Return the map that a layer was written under; empty for root alone, and for a tree that is no layer.

    Args:
        root: the tree, `layers/<id>/fs`.
    """
    if root.name != _TREE:
        return ""
    try:
        return (root.parent / _NAME).read_text()
    except FileNotFoundError:
        return ""


def is_seen_whole(root: Path) -> bool:
    """Whether this process sees each owner in a tree as it is inside, and may read what is closed to it."""
    return covers(own_map(), ids_of(root))


def expect_seen_whole(root: Path) -> None:
    """Refuse a tree whose owners this process would see as nobody.

    Raises:
        FormatUnsupported: it holds files of a range of ids, and this process is not in a namespace that has them.
    """
    if not is_seen_whole(root):
        raise FormatUnsupported(
            f"{root.parent.name} was written with a range of user ids, which this process has not got",
            remedy="run it by `python -m worldfork.core.mapped MODULE ARGUMENT...`; `worldfork doctor` says whether "
            "this user has a range",
            expected=ids_of(root),
            actual=own_map(),
            needs_ids=True,
        )
