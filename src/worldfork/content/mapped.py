"""Work of an ordinary user on files of its own that have been closed to it: done as root of a user namespace.

What a sandbox in a user namespace leaves may have no permissions at all. Opening it up for a moment would show in
every sandbox that stands on it, and stay so if this process were killed. Root of a namespace that knows the owner
needs no permissions and changes nothing.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module

from worldfork.core.errors import StoreError, WorldforkError
from worldfork.core.mapped_server import join

NOBODY = 65534
"""How an owner that a user namespace does not know is seen in it."""
_CLONE_NEWUSER = 0x10000000
_PROGRAM = (
    "import json, sys\n"
    "sys.path[:] = json.loads(sys.argv[1])\n"
    "from worldfork.content.mapped import _answer\n"
    "_answer(*sys.argv[2:])\n"
)
_REVISION_2, _REVISION_3 = 0x02000000, 0x03000000  # of a file's capabilities; the third names the namespace's root
_ACL_USER, _ACL_GROUP = 0x02, 0x08


def lines_of(module: str, function: str, *arguments: str, namespace: int | None = None) -> Iterator[bytes]:
    """Call a function in a process that is root over this user's own files, or over its range of ids, and nothing else.

    Args:
        module, function: where it is; it gets `arguments` and yields lines of bytes, each with its newline.
        arguments: texts.
        namespace: descriptor of a user namespace to be root of; by default a new one that knows this user alone.
    Raises:
        WorldforkError: what the function raised.
        StoreError: the process could not become that, or was killed.
    """
    passed = () if namespace is None else (namespace,)
    joined = "-1" if namespace is None else str(namespace)
    command = [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path), joined, module, function, *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=passed) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line == b".\n":
                    return
                if line.startswith(b"!"):
                    raise pickle.loads(base64.b64decode(line[1:]))
                yield line[1:]
        finally:
            child.stdout.close()
            child.kill()
    raise StoreError("the process that reads what is closed to this user ended early", exit_code=child.returncode)


def _answer(joined: str, module: str, function: str, *arguments: str) -> None:
    out = sys.stdout.buffer
    try:
        try:
            if int(joined) < 0:
                become_root()
            else:
                join(int(joined))
        except OSError as error:
            raise StoreError(f"this user cannot have a user namespace: {error.strerror}", errno=error.errno) from error
        for line in getattr(import_module(module), function)(*arguments):
            out.write(b"+" + line)
        out.write(b".\n")
    except WorldforkError as error:
        out.write(b"!" + base64.b64encode(pickle.dumps(error)) + b"\n")
    out.flush()


def become_root() -> None:
    """Put this process, which has one thread, into a user namespace in which its user is root."""
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def value_inside(name: str, value: bytes, uid: int, gid: int) -> bytes:
    """Return an attribute's value as it is seen by root of such a namespace, if it names owners.

    Args:
        name, value: of the attribute, as its owner sees it outside.
        uid, gid: who is root inside.
    Source: linux/posix_acl_xattr.h, linux/capability.h (struct vfs_ns_cap_data).
    """
    if name == "security.capability" and len(value) == 24:
        magic, *sets, root = struct.unpack("<6I", value)
        if magic & 0xFF000000 == _REVISION_3 and root == uid:
            return struct.pack("<5I", _REVISION_2 | magic & 0xFFFFFF, *sets)
    return _with_owners(name, value, lambda kind, owner: 0 if owner == (uid if kind == _ACL_USER else gid) else NOBODY)


def value_outside(name: str, value: bytes, uid: int, gid: int) -> bytes:
    """Return what `value_inside` shows as `value`.

    Raises:
        LookupError: it names an owner that there is not in such a namespace.
    """

    def outside(kind: int, owner: int) -> int:
        if owner:
            raise LookupError(f"it names the {'user' if kind == _ACL_USER else 'group'} {owner}")
        return uid if kind == _ACL_USER else gid

    return _with_owners(name, value, outside)


def _with_owners(name: str, value: bytes, replaced: Callable[[int, int], int]) -> bytes:
    """Exchange the owners that an access control list names."""
    if not name.startswith("system.posix_acl_") or len(value) % 8 != 4:
        return value
    parts = [value[:4]]
    for tag, permissions, owner in struct.iter_unpack("<HHI", value[4:]):
        parts.append(
            struct.pack("<HHI", tag, permissions, replaced(tag, owner) if tag in (_ACL_USER, _ACL_GROUP) else owner)
        )
    return b"".join(parts)
