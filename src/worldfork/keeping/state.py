"""The digest of a snapshot's whole state: the same for the same tree, however it came about."""

from __future__ import annotations

from worldfork.content.merged import state_digest
from worldfork.keeping.browse import browsing
from worldfork.store.store import Store


def digest_of(store: Store, snapshot_id: str) -> str:
    """Return the digest of what a snapshot looks like from inside, `b3:` and 64 hex digits. Slow the first time.

    It is kept with the snapshot from then on.

    Raises:
        NotFound: there is no such snapshot.
        ConfigError: its base's directory is gone.
        OutOfSpace, StoreError: something in it cannot be read, named by `path`.
    """
    known = store.snapshot(snapshot_id).digest
    if known is not None:
        return known
    with browsing(store, snapshot_id) as snapshot:
        digest = state_digest(snapshot.view, str(snapshot.record.base.get("fingerprint") or ""))
    store.set_digest(snapshot_id, digest)
    return digest
