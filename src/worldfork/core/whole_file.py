"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Give the path of an empty file beside another, whose place it takes at the end of the block.

    If the block raises, the other stays as it is, and nothing is left beside it. Who needs it to survive a crash of the
    machine brings it to the disk within the block, and the directory after it.

    Args:
        target: replaced if it is there; readable by all.

    Raises:
        OSError: it cannot be written.
    """
    handle, name = tempfile.mkstemp(prefix=".part-", dir=target.parent)
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
