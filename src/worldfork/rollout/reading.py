"""Files of a task's directory, read out of snapshots on the host: no sandbox sees hidden tests or a reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, ValuesView

from worldfork.content.stack import Node
from worldfork.core.errors import ConfigError, PathError
from worldfork.keeping.browse import Browsed, browsing
from worldfork.keeping.with_ids import with_ids
from worldfork.records.edits import EditedFile
from worldfork.records.globs import Reach, is_editable, is_literal, taking_in
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.store.store import Store

MAX_FILES = 20_000
MAX_BYTES = 256 << 20
"""What may be read at once; the tests of the largest repositories have a tenth of it."""

MAX_LOOKED = 1_000_000
"""Entries that are looked at for patterns, which mean few of them."""

_AT_ONCE = 64
"""Files of one reading, where all are asked for."""


def read_paths(store: Store, snapshot_id: str, paths: Sequence[str]) -> dict[str, EditedFile]:
    """Return the files at and below some paths of the task's directory. Blocking.

    Links are followed inside the snapshot where they stand for files; anything else is left out, as is a path at
    which nothing is.

    Raises:
        ConfigError: more than `MAX_FILES` files or `MAX_BYTES` bytes.
        NotFound, StoreError: the snapshot cannot be read.
    """
    return with_ids(store, [snapshot_id], _read_paths, snapshot_id, tuple(paths))


def find_editable(store: Store, snapshot_id: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of the regular files that the patterns mean, sorted. Blocking.

    Raises:
        ConfigError: they are more than `MAX_FILES`, or `MAX_LOOKED` entries would have to be looked at.
        NotFound, StoreError: the snapshot cannot be read.
    """
    return with_ids(store, [snapshot_id], _find_editable, snapshot_id, tuple(patterns))


class Originals(Mapping[str, bytes]):
    """The editable files of a starting state; the content of each is read when it is asked for.

    So a state costs the memory of its paths, however much a large repository holds.
    """

    def __init__(self, store: Store, snapshot_id: str, paths: Sequence[str]) -> None:
        self._store = store
        self._snapshot_id = snapshot_id
        self._paths = dict.fromkeys(paths)

    def __getitem__(self, path: str) -> bytes:
        if path not in self._paths:
            raise KeyError(path)
        return read_paths(self._store, self._snapshot_id, [path])[path].content

    def __contains__(self, path: object) -> bool:
        return path in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def values(self) -> ValuesView[bytes]:
        """Return the contents; many are read at once, since each reading opens the snapshot anew."""
        return _Contents(self)

    def only(self, paths: Sequence[str]) -> Originals:
        """Return some of them."""
        return Originals(self._store, self._snapshot_id, [path for path in paths if path in self._paths])

    def read(self, paths: Sequence[str]) -> list[bytes]:
        """Return the contents of some of the files, in their order.

        Raises:
            ConfigError: together they are more than `MAX_BYTES`.
        """
        found = read_paths(self._store, self._snapshot_id, paths)
        return [found[path].content for path in paths]


class _Contents(ValuesView[bytes]):
    def __init__(self, originals: Originals) -> None:
        super().__init__(originals)
        self._originals = originals

    def __iter__(self) -> Iterator[bytes]:
        paths = list(self._originals)
        for start in range(0, len(paths), _AT_ONCE):
            some = paths[start : start + _AT_ONCE]
            try:
                yield from self._originals.read(some)
            except ConfigError:
                yield from (self._originals[path] for path in some)


def _read_paths(store: Store, snapshot_id: str, paths: Sequence[str]) -> dict[str, EditedFile]:
    found: dict[str, EditedFile] = {}
    room_bytes = MAX_BYTES
    with browsing(store, snapshot_id) as snapshot:
        for path in paths:
            for inside, node in _files(snapshot, path):
                content = b"".join(snapshot.view.read(node))
                room_bytes -= len(content)
                if room_bytes < 0 or len(found) >= MAX_FILES:
                    raise _too_much(path)
                info = node.seen.info
                found[inside] = EditedFile(content, bool(info and info.st_mode & 0o111))
    return found


def _files(snapshot: Browsed, path: str) -> Iterator[tuple[str, Node]]:
    """Yield the regular files at and below a path, each with the path that it was found at."""
    top = _led_to(snapshot, path)
    if top is None or top.seen.kind != "d":
        if top is not None and top.seen.kind == "f":
            yield path, top
        return
    for node in _below(snapshot, top, path):
        inside = f"{path}/{node.path[len(top.path) + 1 :]}"
        led = _led_to(snapshot, inside) if node.seen.kind == "l" else node
        if led is not None and led.seen.kind == "f":
            yield inside, led


def _below(snapshot: Browsed, top: Node, path: str) -> Iterator[Node]:
    count, waiting = 0, [top]
    while waiting:
        for node in snapshot.view.children(waiting.pop()):
            count += 1
            if count > MAX_FILES:
                raise _too_much(path)
            if node.seen.kind == "d":
                waiting.append(node)
            else:
                yield node


def _meant_below(snapshot: Browsed, top: Node, patterns: Sequence[str]) -> Iterator[str]:
    """Yield the paths of files below a directory that patterns mean. What none can mean is not looked into."""
    above = TASK_DIRECTORY.strip("/")
    reach = Reach.of(patterns)
    for name in top.path[len(above) + 1 :].split("/"):
        reach = reach.below(name) if name else reach
    waiting, looked, found = [(top, reach)], 0, 0
    while waiting:
        directory, reach = waiting.pop()
        for node in snapshot.view.children(directory):
            looked += 1
            inside = node.path[len(above) + 1 :]
            name = inside.rpartition("/")[2]
            if node.seen.kind == "d":
                beyond = reach.below(name)
                if beyond.leads_on(inside):
                    waiting.append((node, beyond))
            elif node.seen.kind == "f" and reach.means(name, inside):
                found += 1
                yield inside
            if looked > MAX_LOOKED or found > MAX_FILES:
                raise _too_much(directory.path[len(above) + 1 :] or ".")


def _led_to(snapshot: Browsed, path: str) -> Node | None:
    try:
        return snapshot.node(f"{TASK_DIRECTORY}/{path}".rstrip("/"))
    except PathError:
        return None


def _find_editable(store: Store, snapshot_id: str, patterns: Sequence[str]) -> tuple[str, ...]:
    found: set[str] = set()
    with browsing(store, snapshot_id) as snapshot:
        for fixed in {_fixed(pattern): None for pattern in taking_in(patterns)}:
            node = snapshot.view.node(f"{TASK_DIRECTORY.strip('/')}/{fixed}".rstrip("/"))
            if node is not None and node.seen.kind == "f" and is_editable(fixed, patterns):
                found.add(fixed)
            elif node is not None and node.seen.kind == "d":
                found.update(_meant_below(snapshot, node, patterns))
    return tuple(sorted(found))


def _fixed(pattern: str) -> str:
    """Return the part of a pattern that means one path alone: where all that it means lies at or below."""
    if is_literal(pattern):
        return pattern
    names = pattern.split("/")
    first = next(place for place, name in enumerate(names) if not is_literal(name))
    return "/".join(names[:first])


def _too_much(path: str) -> ConfigError:
    return ConfigError(
        f"{path!r} means more than {MAX_FILES} entries or {MAX_BYTES} bytes",
        remedy="name the part of the tree that is needed",
        path=path,
    )
