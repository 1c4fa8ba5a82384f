"""The tables of the store."""

from __future__ import annotations

APPLICATION = 0x57464B31
"""SQLite's application_id of our databases: "WFK1"."""
FORMAT = 1
"""SQLite's user_version: the format of the store. A newer one is refused, an older one is read."""

SCHEMA = (
    # boot_id: what is ready but not durable is worth nothing after the machine has crashed.
    """
    CREATE TABLE layers (
        layer_id TEXT PRIMARY KEY,
        form TEXT NOT NULL CHECK (form IN ('trusted', 'user')),
        state TEXT NOT NULL CHECK (state IN ('building', 'ready', 'durable', 'condemned')),
        owner_id TEXT NOT NULL,
        boot_id TEXT NOT NULL,
        size_bytes INTEGER,
        digest TEXT,
        created_s REAL NOT NULL
    ) WITHOUT ROWID
    """,
    "CREATE INDEX layers_unsettled ON layers (state) WHERE state IN ('building', 'condemned')",
    # record: the whole SnapshotRecord, whose `layers` are the only word on which layers a snapshot uses. One row per
    # layer would make a checkpoint's cost grow with the depth of its chain. number: never used twice.
    # synced: its bytes are on disk, but this word may not be yet, so readers see it as ready.
    """
    CREATE TABLE snapshots (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        snapshot_id TEXT NOT NULL UNIQUE,
        state TEXT NOT NULL CHECK (state IN ('ready', 'synced', 'durable')),
        owner_id TEXT NOT NULL,
        boot_id TEXT NOT NULL,
        created_s REAL NOT NULL,
        record TEXT NOT NULL
    )
    """,
    "CREATE INDEX snapshots_pending ON snapshots (state) WHERE state != 'durable'",
    """
    CREATE TABLE names (
        name TEXT PRIMARY KEY,
        snapshot_id TEXT NOT NULL REFERENCES snapshots (snapshot_id) ON DELETE CASCADE
    ) WITHOUT ROWID
    """,
    "CREATE INDEX names_by_snapshot ON names (snapshot_id)",
    # layers: a JSON array.
    """
    CREATE TABLE holders (
        holder_id TEXT PRIMARY KEY,
        kind TEXT NOT NULL,
        owner_id TEXT NOT NULL,
        snapshot_id TEXT,
        layers TEXT NOT NULL,
        facts TEXT NOT NULL,
        created_s REAL NOT NULL
    ) WITHOUT ROWID
    """,
    "CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "INSERT INTO counters VALUES ('checkpoints', 0), ('collections', 0)",
)
