"""What files of a stored state hold, read once however much is asked of them."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Any

from worldfork.content.stack import Node
from worldfork.keeping.browse import Browsed

MAX_READ_BYTES = 1 << 30
"""Of all files together: sparse ones cost a policy nothing. What is asked of content behind that is not true."""


class Content:
    """What is in a file; each form of it is made once."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @cached_property
    def sha256(self) -> str:
        """In hex."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def text(self) -> str | None:
        """None where it is none in UTF-8."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError:
            return None

    @cached_property
    def trimmed(self) -> str:
        """The text without white space at both ends."""
        return (self.text or "").strip()

    @cached_property
    def json(self) -> tuple[Any, ...]:
        """The value; nothing where it is no JSON."""
        try:
            return (json.loads(self.text or ""),)
        except (ValueError, RecursionError):
            return ()


class Contents:
    """Reads files, the same one once where it is asked for again and again, and not without end."""

    def __init__(self, browsed: Browsed) -> None:
        self.browsed = browsed
        self._left_bytes = MAX_READ_BYTES
        self._last: tuple[int, str] | None = None
        self._content: Content | None = None

    def of(self, node: Node) -> Content | None:
        """Return the content of a file; None where too much has been read already."""
        if self._last != (node.layer, node.inside):
            self._last, self._content = (node.layer, node.inside), None
            self._left_bytes -= node.seen.info.st_size if node.seen.info else 0
            if self._left_bytes >= 0:
                self._content = Content(b"".join(self.browsed.view.read(node)))
        return self._content
