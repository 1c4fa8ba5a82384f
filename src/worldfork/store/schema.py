"""The tables of the store."""

from __future__ import annotations

APPLICATION = 0x57464B31
"""SQLite's application_id of our databases: "WFK1"."""
FORMAT = 2
"""SQLite's user_version: the format of the store. A newer one is refused, an older one is brought up to this."""

SCHEMA = (
    # boot_id: what is ready but not durable is worth nothing after the machine has crashed.
    # renewed_s: of the machine's monotonic clock, when the owner of a draft last said that it goes on. Below 0 where
    # that owner is a process of format 1, which never says so: its lock alone tells.
    # covers: a JSON array of the layers that a merged layer stands for, top first.
    """
    CREATE TABLE layers (
        layer_id TEXT PRIMARY KEY,
        form TEXT NOT NULL CHECK (form IN ('trusted', 'user')),
        state TEXT NOT NULL CHECK (state IN ('building', 'ready', 'durable', 'condemned')),
        owner_id TEXT NOT NULL,
        boot_id TEXT NOT NULL,
        size_bytes INTEGER,
        digest TEXT,
        created_s REAL NOT NULL,
        renewed_s REAL NOT NULL DEFAULT -1,
        entries INTEGER,
        logical_bytes INTEGER,
        stored_bytes INTEGER,
        covers TEXT,
        level INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID
    """,
    "CREATE INDEX layers_unsettled ON layers (state) WHERE state IN ('building', 'condemned')",
    "CREATE INDEX layers_unsealed ON layers (state) WHERE digest IS NULL",
    "CREATE INDEX layers_by_digest ON layers (digest) WHERE digest IS NOT NULL",
    "CREATE INDEX layers_covering ON layers (json_extract(covers, '$[0]')) WHERE covers IS NOT NULL",
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
        record TEXT NOT NULL,
        level TEXT NOT NULL DEFAULT 'local',
        digest TEXT,
        exported TEXT
    )
    """,
    "CREATE INDEX snapshots_pending ON snapshots (state) WHERE state != 'durable'",
    "CREATE INDEX snapshots_to_export ON snapshots (level) WHERE level = 'exported' AND exported IS NULL",
    """
    CREATE TABLE names (
        name TEXT PRIMARY KEY,
        snapshot_id TEXT NOT NULL REFERENCES snapshots (snapshot_id) ON DELETE CASCADE
    ) WITHOUT ROWID
    """,
    "CREATE INDEX names_by_snapshot ON names (snapshot_id)",
    # layers: a JSON array. renewed_s: as of a draft, for readings.
    """
    CREATE TABLE holders (
        holder_id TEXT PRIMARY KEY,
        kind TEXT NOT NULL,
        owner_id TEXT NOT NULL,
        snapshot_id TEXT,
        layers TEXT NOT NULL,
        facts TEXT NOT NULL,
        created_s REAL NOT NULL,
        renewed_s REAL NOT NULL DEFAULT -1
    ) WITHOUT ROWID
    """,
    "CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "INSERT INTO counters VALUES ('checkpoints', 0), ('collections', 0), ('rewrites', 0)",
)

UPGRADES: dict[int, tuple[str, ...]] = {
    1: (
        "ALTER TABLE layers ADD COLUMN renewed_s REAL NOT NULL DEFAULT -1",
        "ALTER TABLE layers ADD COLUMN entries INTEGER",
        "ALTER TABLE layers ADD COLUMN logical_bytes INTEGER",
        "ALTER TABLE layers ADD COLUMN stored_bytes INTEGER",
        "ALTER TABLE layers ADD COLUMN covers TEXT",
        "ALTER TABLE layers ADD COLUMN level INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE snapshots ADD COLUMN level TEXT NOT NULL DEFAULT 'local'",
        "ALTER TABLE snapshots ADD COLUMN digest TEXT",
        "ALTER TABLE snapshots ADD COLUMN exported TEXT",
        "ALTER TABLE holders ADD COLUMN renewed_s REAL NOT NULL DEFAULT -1",
        "CREATE INDEX layers_unsealed ON layers (state) WHERE digest IS NULL",
        "CREATE INDEX layers_by_digest ON layers (digest) WHERE digest IS NOT NULL",
        "CREATE INDEX layers_covering ON layers (json_extract(covers, '$[0]')) WHERE covers IS NOT NULL",
        "CREATE INDEX snapshots_to_export ON snapshots (level) WHERE level = 'exported' AND exported IS NULL",
        "INSERT OR IGNORE INTO counters VALUES ('rewrites', 0)",
    ),
}
"""For each older format, the statements that make the next one of it."""
