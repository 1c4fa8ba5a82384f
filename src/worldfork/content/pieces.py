"""Reading a file to its end, piece by piece."""

from __future__ import annotations

import os
from collections.abc import Iterator

_PIECE_BYTES = 1 << 20
_SMALL_BYTES = 4096


def read_pieces(fd: int) -> Iterator[bytes]:
    """Yield what an open file holds from where it stands to its end.

    A piece is made with room for all that was asked for. So no more is asked for than a file has: small ones read by
    many threads would else leave each thread's heap a piece larger for good.

    Raises:
        OSError: it cannot be read.
    """
    asked = min(os.fstat(fd).st_size or _SMALL_BYTES, _PIECE_BYTES)
    while data := os.read(fd, asked):
        yield data
