"""Which layers may hold files of a range of ids, and whether this process sees their owners as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

from worldfork.core import mapped
from worldfork.core.errors import FormatUnsupported
from worldfork.core.idmap import covers, own_map

_P = ParamSpec("_P")
_T = TypeVar("_T")
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


def widest(roots: Iterable[Path]) -> str:
    """Return the map under which all of these layers can be written together; empty if none has a range of ids.

    Raises:
        FormatUnsupported: two were written with ranges of which neither holds the other.
    """
    found = {ids for root in roots if (ids := ids_of(root))}
    for ids in found:
        if all(covers(ids, other) for other in found):
            return ids
    if not found:
        return ""
    one, other, *_ = sorted(found)
    raise FormatUnsupported("layers were written with different ranges of user ids", expected=one, actual=other)


def with_ids(roots: Iterable[Path], function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function of paths here, or in a process that has the ids of all these layers. Blocking.

    Raises:
        DriverUnavailable: this user has no range of ids.
        Whatever the function raises.
    """
    if own_map() or all(is_seen_whole(root) for root in roots):
        return function(*args, **kwargs)
    return mapped.run(function, *args, **kwargs)


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
