"""Space kept back so that a deletion on a full disk, which must write before it can free, can do so."""

from __future__ import annotations

import os

from worldfork.core.errors import StoreError
from worldfork.core.remove import remove_tree
from worldfork.store.home import Home

_SIZES_BYTES = (2 << 20, 1 << 20, 512 << 10, 256 << 10, 128 << 10)


def lay_in(home: Home) -> None:
    """Set the space apart, or as much of it as there is; nothing if the disk is full or cannot do that."""
    try:
        fd = os.open(home.scratch / "ballast", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return
    try:
        for size_bytes in _SIZES_BYTES:
            try:
                if os.fstat(fd).st_size < size_bytes:
                    os.posix_fallocate(fd, 0, size_bytes)
                return
            except OSError:
                pass  # try less
    finally:
        os.close(fd)


def drop(home: Home) -> None:
    """Give the disk that space, and what is in the trash."""
    try:
        os.truncate(home.scratch / "ballast", 0)
    except OSError:
        pass
    try:
        names = os.listdir(home.trash)
    except OSError:
        return
    for name in names:
        try:
            remove_tree(home.trash / name)
        except (StoreError, OSError):
            pass  # whoever empties the trash next will say so
