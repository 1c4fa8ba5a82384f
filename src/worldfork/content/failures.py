"""What goes wrong with one path of a tree, as errors of the house that name it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from worldfork.core.errors import OutOfSpace, StoreError, WorldforkError

_REMEDIES = {
    errno.EXDEV: "something is mounted there; unmount it first",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOSPC: "delete snapshots or free disk space; deletion works on a full disk",
    errno.EDQUOT: "delete snapshots or free disk space; deletion works on a full disk",
}


def failed(error: OSError, path: str, doing: str) -> WorldforkError:
    """Turn an OSError into `OutOfSpace` (full disk or quota) or `StoreError`, with `path` and `errno` as fields.

    Args:
        error: what the system reported.
        path: of the tree, the root empty.
        doing: what could not be done with it, as in "read".
    """
    text = f"{path or 'the root of the tree'!r} cannot be {doing}: {error.strerror or error}"
    remedy = _REMEDIES.get(error.errno or 0, "")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpace(text, remedy=remedy, scope="host", path=path, errno=error.errno)
    return StoreError(text, remedy=remedy, path=path, errno=error.errno)


@contextmanager
def naming(path: str, doing: str) -> Iterator[None]:
    """Let no OSError of the block out that does not name the path."""
    try:
        yield
    except WorldforkError:
        raise
    except OSError as error:
        raise failed(error, path, doing) from error
