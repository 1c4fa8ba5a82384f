"""Finding what an argument means in the store, without starting anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from worldfork.core.errors import ConfigError, NotFound
from worldfork.core.ids import check_id
from worldfork.core.settings import load_settings
from worldfork.store.home import open_home
from worldfork.store.store import Store


@contextmanager
def open_store() -> Iterator[Store]:
    """Open the store of the settings in force for the length of a block: nothing is swept, and no sandbox started.

    Raises:
        StoreError, ConfigError: the home cannot be used; with the remedy.
    """
    store = Store.open(open_home(load_settings()))
    try:
        yield store
    finally:
        store.close()


def is_snapshot_id(text: str) -> bool:
    """Tell whether a text has the form of a snapshot's id."""
    try:
        check_id("sn", text)
    except ConfigError:
        return False
    return True


def snapshot_id_of(store: Store, text: str) -> str:
    """Return the id of the snapshot that an argument means: an id, or a name given with `worldfork tag`.

    Raises:
        NotFound: there is none.
    """
    if is_snapshot_id(text):
        return store.snapshot(text).snapshot_id
    found = store.named(text)
    if found is None:
        raise NotFound(f"there is no snapshot {text!r}, neither an id nor a name", remedy="worldfork snapshots")
    return found
