"""The extended attributes by which an overlay reads a layer, told apart from those that hold data."""

from __future__ import annotations

import os

PREFIX = {"trusted": "trusted.overlay.", "user": "user.overlay."}
"""What the names of the overlay's own attributes begin with, by the form of a layer."""
_TIES = ("origin", "impure", "nlink", "uuid", "upper")
"""Marks that tie an upper to inodes of its lowers; a copy has other inodes."""
_MARKS = (*_TIES, "opaque", "redirect", "metacopy", "protattr", "whiteout", "verity")
_ESCAPE = "overlay."
"""What the overlay puts behind its prefix when somebody inside sets an attribute that has the prefix (kernel 6.7)."""


def is_mark(name: str, form: str) -> bool:
    """Whether an extended attribute is the overlay's own; one that a user gave a like name is not."""
    return name.startswith(PREFIX[form]) and name.removeprefix(PREFIX[form]) in _MARKS


def is_tie(name: str, form: str) -> bool:
    """Whether an extended attribute holds only for this very upper, so that no copy may carry it."""
    return name.startswith(PREFIX[form]) and name.removeprefix(PREFIX[form]) in _TIES


def mark(name: str, form: str) -> str:
    """Return the full name of one of the overlay's own attributes."""
    return PREFIX[form] + name


def data_xattrs(path: str | int, form: str) -> dict[str, bytes]:
    """Return the extended attributes of a path (itself, if it is a link) or descriptor, less the overlay's own."""
    follow = isinstance(path, int)
    return {
        name: os.getxattr(path, name, follow_symlinks=follow)
        for name in os.listxattr(path, follow_symlinks=follow)
        if not is_mark(name, form)
    }


def name_inside(name: str, form: str) -> str:
    """Return how an attribute of a layer that holds data is called inside a sandbox."""
    escaped = PREFIX[form] + _ESCAPE
    return PREFIX[form] + name.removeprefix(escaped) if name.startswith(escaped) else name


def name_in_layer(name: str, form: str) -> str:
    """Return how an attribute that is called `name` inside a sandbox is called in a layer."""
    return PREFIX[form] + _ESCAPE + name.removeprefix(PREFIX[form]) if name.startswith(PREFIX[form]) else name
