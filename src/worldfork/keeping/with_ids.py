"""Work on snapshots whose files belong to a range of ids, by a process that has these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec, TypeVar, cast

from worldfork.content.ids import is_seen_whole
from worldfork.core import mapped
from worldfork.core.idmap import own_map
from worldfork.store.home import Home
from worldfork.store.store import Store

_P = ParamSpec("_P")
_T = TypeVar("_T")


def with_ids(
    store: Store,
    snapshot_ids: Iterable[str],
    function: Callable[Concatenate[Store, _P], _T],
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> _T:
    """Call `function(store, ...)` here, or in a process that has the ids of all layers of these snapshots. Blocking.

    Args:
        store: whose snapshots.
        snapshot_ids: which.
        function: of a module; it may be given another store of the same home.
        args, kwargs: as its result, what can be pickled.
    Raises:
        NotFound: there is no such snapshot.
        DriverUnavailable: some are of a range of ids, and this user has none; the remedy says what is missing.
        Whatever the function raises.
    """
    layers = {layer_id for snapshot_id in snapshot_ids for layer_id in store.snapshot(snapshot_id).layers}
    if own_map() or all(is_seen_whole(store.layer_path(layer_id)) for layer_id in layers):
        return function(store, *args, **kwargs)
    return with_range(store, function, *args, **kwargs)


def with_range(store: Store, function: Callable[Concatenate[Store, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call `function(store, ...)` in a process that has this user's range of ids, to write what may have them.

    Args and errors: as `with_ids`.
    """
    return cast(_T, mapped.run(_in_home, store.home, store.ttl_s, function, args, kwargs))


def _in_home(
    home: Home, ttl_s: float, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    store = Store.open(home, ttl_s=ttl_s)
    try:
        return function(store, *args, **kwargs)
    finally:
        store.close()
