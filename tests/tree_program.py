"""File operations on a tree and a description of it, as a program that runs alike in a sandbox and beside it.

Every line of its input is a request in JSON, and for every one it prints a line: what came of each operation, and
the manifest of the tree. Run with `hold NAME` it is a process that keeps files open and writes to them when told.

Where an operation says on what it acts, a text is a path, a number picks one of the paths that exist, and a pair of
number and name is that name in one of the directories that exist. Both sides pick alike, for their trees are alike.
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import mmap
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys

KINDS = {
    stat.S_IFREG: "f",
    stat.S_IFDIR: "d",
    stat.S_IFLNK: "l",
    stat.S_IFIFO: "p",
    stat.S_IFSOCK: "s",
    stat.S_IFCHR: "c",
    stat.S_IFBLK: "b",
}
CAPABILITY = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)
EXCHANGE = 2
AT_FDCWD = -100
PINS = []
"""Descriptors of files with several names, so that no new file gets the number of one that is gone."""
CLONE_NEWUSER = 0x10000000


class NotDone(Exception):
    """An operation that does not fit what is there."""


def acl(perm):
    """A list with one named user, who is root."""
    entries = [(1, 7, -1), (2, perm, 0), (4, 5, -1), (16, 7, -1), (32, 5, -1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)


def kind_of(path):
    try:
        return KINDS[stat.S_IFMT(os.lstat(path).st_mode)]
    except FileNotFoundError:
        return ""


def names_below(root):
    """All paths below a directory, sorted, with their kinds."""
    found = []
    waiting = [""]
    while waiting:
        top = waiting.pop()
        for entry in os.scandir(os.path.join(root, top)):
            path = os.path.join(top, entry.name)
            found.append((path, entry))
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)
    return sorted(found, key=lambda pair: pair[0])


class Tree:
    """One tree. In a plain one hard links split where they would on an overlay: see `seal`."""

    def __init__(self, root, sealed, holder):
        self.root = root
        self.sealed = set(sealed)
        self.holder = holder

    def at(self, path):
        return os.path.join(self.root, path) if path else self.root

    def pick(self, what):
        if isinstance(what, str):
            return what
        if isinstance(what, int):
            paths = [path for path, _ in names_below(self.root)]
            if not paths:
                raise NotDone
            return paths[what % len(paths)]
        number, name = what
        paths = ["", *(path for path, entry in names_below(self.root) if entry.is_dir(follow_symlinks=False))]
        return os.path.join(paths[number % len(paths)], name)

    def seal(self):
        """From now on the hard links that exist lie in a lower layer: each is copied by itself when it changes."""
        sealed = set()
        for path, _ in names_below(self.root):
            info = os.lstat(self.at(path))
            if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
                PINS.append(os.open(self.at(path), os.O_PATH | os.O_NOFOLLOW))
                sealed.add(info.st_ino)
        return sorted(sealed)

    def split(self, path):
        info = os.lstat(path)
        if stat.S_ISDIR(info.st_mode) or info.st_ino not in self.sealed:
            return
        parent = os.path.dirname(path)
        before = os.stat(parent)
        copy = path + ".split"
        subprocess.run(["cp", "-a", "--", path, copy], check=True)
        os.rename(copy, path)
        os.utime(parent, ns=(before.st_atime_ns, before.st_mtime_ns))

    def write(self, path, seed, size, how):
        if kind_of(path) not in ("", "f"):
            raise NotDone
        if kind_of(path):
            self.split(path)
        flags = {"create": os.O_TRUNC, "append": os.O_APPEND, "patch": 0}[how]
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flags, 0o644)
        with open(fd, "wb") as file:
            file.write(bytes([seed % 251, (seed + 1) % 256]) * size)

    def sparse(self, path, seed, offset):
        if kind_of(path) not in ("", "f"):
            raise NotDone
        if kind_of(path):
            self.split(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.seek(offset)
            file.write(bytes([seed % 256]) * 10)

    def truncate(self, path, size):
        if kind_of(path) != "f":
            raise NotDone
        self.split(path)
        os.truncate(path, size)

    def mkdir(self, path, mode):
        os.mkdir(path)
        os.chmod(path, mode)

    def symlink(self, path, target):
        os.symlink(target, path)

    def fifo(self, path):
        os.mkfifo(path, 0o640)

    def socket(self, path):
        os.mknod(path, stat.S_IFSOCK | 0o755)

    def remove(self, path):
        os.rmdir(path) if kind_of(path) == "d" else os.unlink(path)

    def remove_all(self, path):
        shutil.rmtree(path) if kind_of(path) == "d" else os.unlink(path)

    def remake(self, path):
        """Another one of its kind: what was in the directory must not come back."""
        if kind_of(path) not in ("d", "f"):
            raise NotDone
        if kind_of(path) == "d":
            shutil.rmtree(path)
            os.mkdir(path)
        else:
            os.unlink(path)
            self.write(path, 7, 3, "create")

    def turn(self, path):
        """A directory into a file, anything else into a directory."""
        if kind_of(path) == "d":
            shutil.rmtree(path)
            self.write(path, 9, 9, "create")
        else:
            os.unlink(path)
            os.mkdir(path)
            self.write(os.path.join(path, "in"), 1, 2, "create")

    def rename(self, path, target):
        if path != target and kind_of(path) not in ("", "d") and kind_of(target) != "d":
            self.split(path)
        os.rename(path, target)

    def exchange(self, path, target):
        apart = not (path + "/").startswith(target + "/") and not (target + "/").startswith(path + "/")
        if apart and kind_of(path) and kind_of(target):
            self.split(path)
            self.split(target)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(AT_FDCWD, os.fsencode(path), AT_FDCWD, os.fsencode(target), EXCHANGE) < 0:
            raise OSError(ctypes.get_errno(), "renameat2")

    def link(self, path, target):
        if kind_of(path) not in ("", "d") and not kind_of(target):
            self.split(path)
        os.link(path, target, follow_symlinks=False)

    def chmod(self, path, mode):
        if kind_of(path) == "l":
            raise NotDone
        self.split(path)
        os.chmod(path, mode)

    def chown(self, path, uid, gid):
        self.split(path)
        os.lchown(path, uid, gid)

    def set_xattr(self, path, name, value):
        if kind_of(path) not in ("f", "d"):
            raise NotDone
        self.split(path)
        os.setxattr(path, name, value.encode(), follow_symlinks=False)

    def remove_xattr(self, path, name):
        if kind_of(path) not in ("f", "d") or name not in os.listxattr(path, follow_symlinks=False):
            raise NotDone
        self.split(path)
        os.removexattr(path, name, follow_symlinks=False)

    def acl(self, path, which, perm):
        if kind_of(path) not in (("d",) if which == "default" else ("f", "d")):
            raise NotDone
        self.split(path)
        os.setxattr(path, f"system.posix_acl_{which}", acl(perm), follow_symlinks=False)

    def capability(self, path):
        if kind_of(path) != "f":
            raise NotDone
        self.split(path)
        os.setxattr(path, "security.capability", CAPABILITY, follow_symlinks=False)

    def utime(self, path, mtime_ns):
        self.split(path)
        os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)

    def hold(self, path):
        if not self.holder or kind_of(path) != "f":
            raise NotDone
        self.split(path)
        self.ask(["open", path])

    def poke(self, number, seed):
        if not self.holder:
            raise NotDone
        self.ask(["poke", number, seed])

    def ask(self, words):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect("\0" + self.holder)
            with sock.makefile("rw") as file:
                print(json.dumps(words), file=file, flush=True)
                answer = file.readline()
        if answer != "done\n":
            raise NotDone

    def apply(self, operation):
        """Do one operation; return its outcome, and the paths that it was about."""
        name, *arguments = operation
        picked = []
        try:
            count = 2 if name in ("rename", "exchange", "link") else 1
            if name == "poke":
                count = 0
            picked = [self.pick(what) for what in arguments[:count]]
            kinds = "".join(kind_of(self.at(path)) or "-" for path in picked)
            getattr(self, name)(*(self.at(path) for path in picked), *arguments[count:])
        except NotDone:
            return ["not done", picked, ""]
        except OSError as error:
            return [errno.errorcode.get(error.errno or 0, str(error)), picked, kinds]
        return ["done", picked, kinds]


def xattrs_of(path):
    return {
        name: os.getxattr(path, name, follow_symlinks=False).hex()
        for name in os.listxattr(path, follow_symlinks=False)
        if name not in ("security.selinux", "security.ima", "security.evm")
    }


def digest_of(path):
    with open(path, "rb") as file:
        return hashlib.md5(file.read(), usedforsecurity=False).hexdigest()


def manifest_of(root):
    """Path -> all that must survive. Holes and counts of links are left out; which names are one file is not."""
    manifest = {}
    first_names = {}
    for path, _ in [("", None), *names_below(root)]:
        full = os.path.join(root, path) if path else root
        try:
            info = os.lstat(full)
        except FileNotFoundError:
            manifest[path] = {"kind": "listed, but not there"}
            continue
        kind = KINDS[stat.S_IFMT(info.st_mode)]
        manifest[path] = {
            "kind": kind,
            "mode": oct(stat.S_IMODE(info.st_mode)),
            "owner": [info.st_uid, info.st_gid],
            "size": info.st_size if kind in "fl" else None,
            "mtime_ns": info.st_mtime_ns,
            "xattrs": xattrs_of(full),
            "target": os.readlink(full) if kind == "l" else None,
            "same_as": path if kind == "d" else first_names.setdefault(info.st_ino, path),
            "content": digest_of(full) if kind == "f" else None,
        }
    return manifest


def answer(request):
    root = request["root"]
    tree = Tree(root, request.get("sealed", ()), request.get("holder"))
    if "clone" in request:
        subprocess.run(["cp", "-a", "--", root, request["clone"]], check=True)
        root = request["clone"]
    if "mount" in request:
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", request["mount"], root], check=True)
    outcomes = [
        ["skipped", [], ""] if number in request.get("skip", ()) else tree.apply(operation)
        for number, operation in enumerate(request.get("operations", ()))
    ]
    described = {
        "outcomes": outcomes,
        "manifest": manifest_of(root) if request.get("describe", True) else None,
        "sealed": Tree(root, (), None).seal() if request.get("seal") else sorted(tree.sealed),
    }
    if request.get("forget"):
        while PINS:
            os.close(PINS.pop())
    if "unmount" in request:
        subprocess.run(["umount", root], check=True)
    return described


def serve():
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


class Held:
    """A file that is open for writing, and mapped if it had any content."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        size = os.fstat(self.fd).st_size
        self.map = mmap.mmap(self.fd, size) if size else None

    def poke(self, seed):
        size = os.fstat(self.fd).st_size
        # Writing to a mapping beyond the end of its file kills.
        if self.map and size >= len(self.map):
            self.map[seed % len(self.map)] = seed % 256
        if seed % 3 == 0:
            os.pwrite(self.fd, b"held", size)


def hold(name):
    """Serve `open PATH` and `poke NUMBER SEED`, one connection each, until killed."""
    held = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind("\0" + name)
        server.listen()
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile("rw") as file:
                words = json.loads(file.readline())
                done = False
                with contextlib.suppress(OSError):
                    if words[0] == "open":
                        held.append(Held(words[1]))
                        done = True
                    elif held:
                        held[words[1] % len(held)].poke(words[2])
                        done = True
                print("done" if done else "not done", file=file, flush=True)


def become_root():
    """In a user namespace of its own, as in a sandbox of an ordinary user."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        return
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER) < 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


if __name__ == "__main__":
    os.umask(0o022)
    become_root()
    if sys.argv[1:2] == ["hold"]:
        hold(sys.argv[2])
    else:
        serve()
