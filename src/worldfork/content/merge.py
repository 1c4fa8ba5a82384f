"""Merging a run of layers into one layer that does in a stack what they did together, whatever lies below it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from worldfork.content.entry import Entry
from worldfork.content.failures import naming
from worldfork.content.mapped import lines_of
from worldfork.content.merged import Describing
from worldfork.content.stack import LayerStack, Node
from worldfork.content.writing import Writer
from worldfork.core.errors import ConfigError, StoreError
from worldfork.core.remove import remove_tree

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY


def merge_layers(layers: Sequence[Path], target: Path, form: str, *, ends: bool = False) -> None:
    """Write one layer that stands for a run of layers.

    A directory of the run goes on below the run where its layers did, with a redirect if that is another place than
    its own, and is opaque where they let nothing through. Deletions stay, except where nothing below could show.
    Nothing below the run is looked at, so that the outcome holds over any layers. What an ordinary user's sandboxes
    have closed to themselves is read all the same.

    Args:
        layers: the run, top first; nobody may write to them meanwhile.
        target: the directory to make; its parent exists and is trusted.
        form: "trusted" or "user": of the layers and of the outcome.
        ends: whether nothing at all lies below the run. Over nothing a deletion that stayed would be listed, as a
            name that is not there.
    Raises:
        ConfigError: there is no layer, or one holds what the form cannot carry here; `path` is a field.
        Corrupt: a layer holds what no overlay makes.
        OutOfSpace, StoreError: something cannot be read or written; `path` and `errno` are fields.
    """
    if not layers:
        raise ConfigError("there is nothing to merge")
    try:
        _merge(layers, target, form, ends)
        return
    except (StoreError, ConfigError) as error:
        # What is closed to its owner, and what only root of a namespace may set.
        refused = isinstance(error, ConfigError) or error.fields.get("errno") == errno.EACCES
        if form != "user" or os.geteuid() == 0 or not refused:
            raise
    remove_tree(target)
    for _ in lines_of(__name__, "_merge_mapped", form, "ends" * ends, str(target), *map(str, layers)):
        pass


def _merge_mapped(form: str, ends: str, target: str, *layers: str) -> Iterator[bytes]:
    _merge([Path(layer) for layer in layers], Path(target), form, bool(ends))
    yield from ()


def _merge(layers: Sequence[Path], target: Path, form: str, ends: bool) -> None:
    stack = LayerStack(layers, form, ends=ends)
    describing = Describing(form)
    with Writer(target, form, made_here=True) as writer:
        for node, above in _walk(stack):
            entry = _marked(describing.entry(node), node, above)
            if entry.kind != "f" or entry.link:
                writer.add(entry)
            else:
                _copy(writer, entry, stack, node)
        writer.finish()


def _walk(stack: LayerStack) -> Iterator[tuple[Node, Node | None]]:
    """Yield every path of a run that its outcome has, in canonical order, with the directory that holds it."""
    with naming("", "read"):
        root = stack.root()
    waiting: list[tuple[Iterator[Node], Node | None]] = [(iter([root]), None)]
    while waiting:
        nodes, above = waiting[-1]
        node = next(nodes, None)
        if node is None:
            waiting.pop()
            continue
        if node.seen.kind == "w" and node.below is None:
            continue  # nothing is left to be hidden
        yield node, above
        if node.seen.kind == "d":
            with naming(node.path, "read"):
                waiting.append((iter(list(stack.children(node))), node))


def _marked(entry: Entry, node: Node, above: Node | None) -> Entry:
    """Return the entry of a directory with the marks that make lookups go on below as in the run."""
    if node.seen.kind != "d" or above is None:
        return entry
    if node.below is None:
        return entry._replace(opaque=above.below is not None)
    parent, _, name = node.below.rpartition("/")
    beside = above.below is not None and parent == above.below.rstrip("/")
    if beside and name == node.path.rpartition("/")[2]:
        return entry
    return entry._replace(redirect=name if beside else node.below)


def _copy(writer: Writer, entry: Entry, stack: LayerStack, node: Node) -> None:
    with naming(entry.path, "read"):
        try:
            fd = stack.open(node.layer, node.inside, _READ | os.O_NOATIME)
        except PermissionError:  # somebody else's, whose access time is not ours to spare
            fd = stack.open(node.layer, node.inside, _READ)
    try:
        writer.add(entry, fd)
    finally:
        os.close(fd)
