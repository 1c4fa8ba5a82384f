"""Space kept back so that a deletion on a full disk, which must write before it can free, can do so."""

from __future__ import annotations

import os

from worldfork.core.errors import StoreError
from worldfork.core.remove import remove_tree
from worldfork.store.home import Home

_BALLAST_BYTES = 2 << 20


def lay_in(home: Home) -> None:
    """Set the space apart, or leave it if the disk is full or cannot do that."""
    path = home.scratch / "ballast"
    try:
        if path.exists() and path.stat().st_size >= _BALLAST_BYTES:
            return
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _BALLAST_BYTES)
        finally:
            os.close(fd)
    except OSError:
        pass


def drop(home: Home) -> None:
    """Give the disk that space, and what is in the trash."""
    try:
        os.truncate(home.scratch / "ballast", 0)
    except OSError:
        pass
    for name in os.listdir(home.trash):
        try:
            remove_tree(home.trash / name)
        except (StoreError, OSError):
            pass  # whoever empties the trash next will say so
