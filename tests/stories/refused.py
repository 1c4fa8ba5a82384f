"""A create where the kernel refuses something, as a container's filter or a host's setting does.

Arguments: a base, what is refused (`userns`, `namespaces`, `mounts`, `locks`, `none`), and the class of the error that
is expected. The settings come from the process environment. The last line of output is the remedy.
"""

from __future__ import annotations

import ctypes
import errno
import struct
import sys
import warnings

import pytest

from worldfork import Sandbox
from worldfork.core import errors
from worldfork.lineage import place as places

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_LOAD, _EQUAL, _AND_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _FIRST, _SECOND = 0, 16, 24
"""Offsets in struct seccomp_data."""
_FCNTL, _MOUNT, _UNSHARE, _FSOPEN = 72, 165, 272, 430
_CLONE_NEWUSER = 0x10000000


def refuse(call: int, error: int, *, where: tuple[int, int, int] | None = None) -> None:
    """Answer a system call with an error from now on, in this process and all that it starts.

    Args:
        where: (kind of jump, offset of an argument, value): only if the argument is like that.
    """
    answer = _ERRNO | error
    body = [(_LOAD, 0, 0, where[1]), (where[0], 0, 1, where[2])] if where else []
    program = [
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, len(body) + 1, call),
        *body,
        (_RETURN, 0, 0, answer),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter_ = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, filter_, 0, 0) == 0, ctypes.get_errno()


def main() -> None:
    base, refused, expected = sys.argv[1:]
    if refused == "userns":
        refuse(_UNSHARE, errno.EPERM, where=(_AND_SET, _FIRST, _CLONE_NEWUSER))
    elif refused == "namespaces":
        refuse(_UNSHARE, errno.EPERM)
    elif refused == "mounts":
        refuse(_FSOPEN, errno.EPERM)
        refuse(_MOUNT, errno.EPERM)
    elif refused == "locks":
        for command in (5, 6, 7, 36, 37, 38):
            refuse(_FCNTL, errno.ENOLCK, where=(_EQUAL, _SECOND, command))
    warnings.simplefilter("ignore")
    with pytest.raises(errors.WorldforkError) as caught:
        Sandbox.create(base=base, network="none")
    places.close_places()
    assert type(caught.value).__name__ == expected, repr(caught.value)
    print(caught.value.message)
    print(caught.value.remedy)


if __name__ == "__main__":
    main()
