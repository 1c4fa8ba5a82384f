"""Layers with one of everything, and ways to damage them as a disk does."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from tests.stores import record_of

from worldfork.keeping.sealing import seal
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store.store import Store

FORMS = ("trusted", "user") if os.geteuid() == 0 else ("user",)
"""The forms that this user can make."""
OLD_NS = 1_600_000_000_123_456_789
"""The time of everything in them."""


def fill(root: Path, form: str) -> None:
    """Make a tree with one of everything that the form can carry."""
    root.mkdir()
    for directory in ("full/deep", "bare", "hiding"):
        (root / directory).mkdir(parents=True)
    (root / "full" / "text").write_text("some text")
    (root / "full" / "deep" / "more").write_bytes(bytes(range(256)) * 500)
    (root / os.fsdecode(b"full/not-utf8-\xff")).write_text("name")
    (root / "empty").touch()
    with open(root / "holes", "wb") as file:
        file.write(b"begin")
        file.truncate(1 << 20)
    (root / "link").symlink_to("full/text")
    os.link(root / "full" / "text", root / "second-name")
    os.mkfifo(root / "fifo")
    os.mknod(root / "gone", stat.S_IFCHR | 0o600, 0)
    prefix = "trusted" if form == "trusted" else "user"
    os.setxattr(root / "hiding", f"{prefix}.overlay.opaque", b"y")
    os.setxattr(root / "full", "user.note", b"kept")
    if os.geteuid() == 0:
        os.mknod(root / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        os.chown(root / "empty", 1234, 1234)
    if form == "trusted":
        os.setxattr(root / "bare", "trusted.overlay.redirect", b"/elsewhere")
    for path in [*root.rglob("*"), root]:
        os.utime(path, ns=(OLD_NS, OLD_NS), follow_symlinks=False)


def add_full(store: Store, form: str, *, sealed: bool = True, below: tuple[str, ...] = ()) -> SnapshotRecord:
    draft = store.begin_layer(form=form)
    fill(draft.path, form)
    record = record_of((draft.layer_id, *below), form=form)
    store.publish(record, [draft.layer_id])
    if sealed:
        seal(store, draft.layer_id)
    return record


def keeping_times(root: Path, damage: Callable[[Path], object]) -> None:
    """Damage a tree as a disk does: no time tells of it."""
    times = {}
    for path in [root, *root.rglob("*")]:
        with suppress(OSError):
            info = os.lstat(path)
            times[path] = (info.st_atime_ns, info.st_mtime_ns)
    damage(root)
    for path, ns in times.items():
        if os.path.lexists(path):
            os.utime(path, ns=ns, follow_symlinks=False)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with open(path, "r+b") as file:
        file.write(data)


def change(store: Store, statement: str, *values: object) -> None:
    """Change a row behind the back of everybody, against all constraints."""
    with closing(sqlite3.connect(store.home.database, isolation_level=None)) as db:
        db.execute("PRAGMA foreign_keys=OFF")
        db.execute("PRAGMA ignore_check_constraints=ON")
        assert db.execute(statement, values).rowcount > 0
