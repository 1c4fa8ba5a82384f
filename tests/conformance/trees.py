"""A tree that holds one of everything, what is done to it in steps, and a manifest that tells two trees apart.

`PROGRAM` runs alike in a sandbox and beside it: `plant STEP DIRECTORY` does a step, `tell DIRECTORY` prints the
manifest. A tree that went through checkpoints and restores must have the manifest of the plain directory that went
through the same steps and nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from worldfork import Sandbox
from worldfork.core import mapped
from worldfork.lineage.place import place

PROGRAM = r"""
import hashlib, json, os, shutil, socket, stat, struct, sys

OWNERS = len(sys.argv) > 4 and sys.argv[4] == "owners"
NAMES = [b"plain", b"new\nline", b"bad\xff\xfe\x80", "é😀".encode(), b" space ", b"-dash", b"quo'te\"", b"back\\slash",
         b".wh.not-a-whiteout", b"tab\t", b"*", b"n" * 255, b"trailing."]
MODES = [0o644, 0o000, 0o4755, 0o2755, 0o1777, 0o600, 0o444, 0o777]

def put(path, data, mode=0o644):
    with open(path, "wb") as file:
        file.write(data)
    os.chmod(path, mode)

def stamp(path, number):
    ns = (1_600_000_000_000_000_000 + number, 1_234_567_890_000_000_001 + number * 1_000_003)
    os.utime(path, ns=ns, follow_symlinks=False)

def own(path, uid, gid):
    if OWNERS:
        mode = os.lstat(path).st_mode
        os.chown(path, uid, gid, follow_symlinks=False)
        if not stat.S_ISLNK(mode):
            os.chmod(path, stat.S_IMODE(mode))

def first(top):
    os.makedirs(top, exist_ok=True)
    os.chdir(top)
    for name in ("names", "modes", "links", "kinds", "sparse", "attributes", "closed", "deep", "gone", "replaced",
                 "emptied", "many", "tree/a/b/c"):
        os.makedirs(name)
    for name in NAMES:
        put(b"names/" + name, b"content of " + name)
        os.mkdir(b"names/d" + name[:254])
    for mode in MODES:
        put(f"modes/f{mode:o}", b"%o" % mode, mode)
        os.mkdir(f"modes/d{mode:o}")
        own(f"modes/f{mode:o}", mode + 1, mode + 2)
        os.chmod(f"modes/d{mode:o}", mode)
    put("links/one", b"hard")
    os.link("links/one", "links/two")
    os.link("links/one", "deep/three")
    os.symlink("one", "links/soft")
    os.symlink("/no/such/place\n", "links/dangling")
    os.symlink("x" * 3000, "links/long")
    os.symlink("..", "links/up")
    os.link("links/soft", "links/soft-twin", follow_symlinks=False)
    own("links/soft", 12, 13)
    os.mkfifo("kinds/fifo", 0o620)
    os.link("kinds/fifo", "kinds/fifo-twin")
    one = socket.socket(socket.AF_UNIX)
    one.bind("kinds/socket")
    one.close()
    own("kinds/fifo", 5, 6)
    holes = {"hole": (6 << 20, ()), "ends": (4 << 20, (0, (4 << 20) - 5)), "middle": (5 << 20, (2 << 20,))}
    for name, (size, parts) in holes.items():
        with open(f"sparse/{name}", "wb") as file:
            file.truncate(size)
            for at in parts:
                os.pwrite(file.fileno(), b"data!", at)
    put("attributes/f", b"1")
    os.setxattr("attributes/f", "user.note", b"\0\xff value")
    os.setxattr("attributes/f", "user.empty", b"")
    os.setxattr("attributes", "user.of-the-directory", b"d" * 500)
    if OWNERS:
        # A file capability: version 2, CAP_NET_RAW.
        os.setxattr("attributes/f", "security.capability", struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0))
    # Access list: user::rw-, user:0:r--, group::r--, mask::r--, other::---
    rows = ((1, 6, 0xFFFFFFFF), (2, 4, 0), (4, 4, 0xFFFFFFFF), (16, 4, 0xFFFFFFFF), (32, 0, 0xFFFFFFFF))
    access = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in rows)
    os.setxattr("attributes/f", "system.posix_acl_access", access)
    put("closed/inside", b"hidden", 0o000)
    at = "deep"
    for number in range(60):
        at += f"/level{number}"
        os.mkdir(at)
    put(at + "/bottom", b"deep")
    put("gone/f", b"1")
    put("replaced/old", b"1")
    os.mkdir("replaced/below")
    put("replaced/below/old", b"1")
    put("emptied/f", b"1")
    for number in range(300):
        put(f"many/{number}", b"%d" % number * 50)
    put("tree/a/b/c/f", b"leaf")
    put("becomes-a-directory", b"1")
    os.mkdir("becomes-a-file")
    put("becomes-a-file/f", b"1")
    put("grows", b"short")
    put("shrinks", b"long" * 10000)
    put("same", b"same")

def second(top):
    # Deletions, replacements and small changes of what the first step left.
    os.chdir(top)
    os.chmod("closed", 0o700)
    shutil.rmtree("gone")
    shutil.rmtree("replaced")
    os.mkdir("replaced")
    put("replaced/new", b"2")
    os.mkdir("replaced/below")
    put("replaced/below/new", b"2")
    os.unlink("emptied/f")
    os.unlink("becomes-a-directory")
    os.mkdir("becomes-a-directory")
    put("becomes-a-directory/f", b"2")
    shutil.rmtree("becomes-a-file")
    put("becomes-a-file", b"2")
    with open("grows", "ab") as file:
        file.write(b" and longer" * 1000)
    os.truncate("shrinks", 3)
    for number in range(0, 300, 3):
        os.unlink(f"many/{number}")
    for number in range(1, 300, 3):
        put(f"many/{number}", b"changed")
    os.chmod("modes/f4755", 0o711)
    os.setxattr("attributes/f", "user.note", b"second")
    os.removexattr("attributes/f", "user.empty")
    own("same", 77, 78)
    os.unlink("links/dangling")
    os.symlink("elsewhere", "links/dangling")
    os.unlink("kinds/fifo-twin")
    put("kinds/fifo-twin", b"a file now")
    os.pwrite(fd := os.open("sparse/hole", os.O_WRONLY), b"filled", 3 << 20)
    os.close(fd)
    os.rename("tree/a/b/c/f", "tree/moved")
    os.unlink(b"names/bad\xff\xfe\x80")
    os.rmdir(b"names/dnew\nline")
    os.chmod("closed", 0o000)

def third(top):
    # What was deleted comes back, as something else or as it was, beside new links to one new file.
    os.chdir(top)
    os.mkdir("gone")
    put("gone/again", b"3")
    shutil.rmtree("replaced")
    put("replaced", b"3")
    put("emptied/f", b"3")
    for number in range(0, 300, 9):
        put(f"many/{number}", b"back")
    shutil.rmtree("becomes-a-directory")
    os.symlink("same", "becomes-a-directory")
    put("new-one", b"x" * 5000)
    os.link("new-one", "new-two")
    shutil.rmtree("tree/a")
    os.makedirs("tree/a/b")
    put("tree/a/b/f", b"3")

STEPS = {"first": first, "second": second, "third": third}

def opened(top):
    # An ordinary user on the host cannot look into what the tree closes; the root of a sandbox can. Returns true modes.
    modes = {}
    def open_below(path):
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        if mode & 0o700 != 0o700 and os.geteuid():
            modes[path] = mode
            os.chmod(path, mode | 0o700)
        for entry in list(os.scandir(path)):
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                open_below(entry.path)
            elif stat.S_ISREG(info.st_mode) and os.geteuid() and not info.st_mode & 0o400:
                modes[entry.path] = stat.S_IMODE(info.st_mode)
                os.chmod(entry.path, modes[entry.path] | 0o400)
    open_below(top)
    return modes

def closed_again(modes):
    for path, mode in reversed(modes.items()):
        os.chmod(path, mode)

def stamp_all(top):
    # Only what has a time of today was changed by the step: a new time is a write too, and a write splits hard links.
    # Directories last: what is made in them changes their times.
    os.chdir(top)
    modes = opened(b".")
    paths = [b"."]
    for parent, directories, files in os.walk(b"."):
        paths += [os.path.join(parent, name) for name in directories + files]
    for number, path in enumerate(sorted(paths, key=lambda p: (-p.count(b"/"), p))):
        if os.lstat(path).st_mtime_ns > 1_500_000_000_000_000_000:
            stamp(path, number)
    closed_again(modes)

def manifest(top):
    os.chdir(top)
    modes = opened(b".")
    rows, twins = {}, {}
    def look(path):
        info = os.lstat(path)
        row = {"mode": oct(stat.S_IFMT(info.st_mode) | modes.get(path, stat.S_IMODE(info.st_mode)))}
        row["mtime_ns"] = info.st_mtime_ns
        row["owner"] = [0 if i == me else i for i, me in ((info.st_uid, os.geteuid()), (info.st_gid, os.getegid()))]
        row["xattrs"] = {n: os.getxattr(path, n, follow_symlinks=False).hex()
                         for n in sorted(os.listxattr(path, follow_symlinks=False))}
        rows[os.fsdecode(path)] = row
        if stat.S_ISDIR(info.st_mode):
            for name in sorted(os.listdir(path)):
                look(os.path.join(path, name))
            return
        if stat.S_ISLNK(info.st_mode):
            row["target"] = os.fsdecode(os.readlink(path))
        elif stat.S_ISREG(info.st_mode):
            with open(path, "rb") as file:
                row["content"] = hashlib.sha256(file.read()).hexdigest()
            row["size"] = info.st_size
            row["sparse"] = info.st_blocks * 512 < info.st_size // 2
        if info.st_nlink > 1:
            twins.setdefault((info.st_dev, info.st_ino), []).append(os.fsdecode(path))
    look(b".")
    # Not the count: an overlay goes on counting names that were deleted from a lower layer.
    for names in twins.values():
        for name in names:
            if len(names) > 1:
                rows[name]["one file with"] = sorted(names)
    closed_again(modes)
    return rows

if sys.argv[1] == "plant":
    STEPS[sys.argv[2]](sys.argv[3])
    stamp_all(sys.argv[3])
elif sys.argv[1] == "tell":
    print(json.dumps(manifest(sys.argv[3])))
"""

Manifest = dict[str, dict[str, Any]]


def plant_here(step: str, top: Path, owners: bool) -> None:
    """Do a step in a directory of the host."""
    _here("plant", step, str(top), "owners" if owners else "-")


def plant_inside(step: str, box: Sandbox, top: str, owners: bool) -> None:
    """Do a step inside a sandbox."""
    result = box.run("python", ["-c", PROGRAM, "plant", step, top, "owners" if owners else "-"])
    assert result.exit_code == 0, result.stderr


def tell_here(top: Path) -> Manifest:
    """Return the manifest of a directory of the host."""
    return dict(json.loads(_here("tell", "-", str(top), "-")))


def tell_inside(box: Sandbox, top: str) -> Manifest:
    """Return the manifest of a directory inside a sandbox."""
    result = box.run("python", ["-c", PROGRAM, "tell", "-", top, "-"])
    assert result.exit_code == 0, result.stderr
    return dict(json.loads(result.stdout))


def differences(one: Manifest, other: Manifest) -> list[str]:
    """Return a line for each path on which two manifests disagree."""
    lines = []
    for path in sorted(one.keys() | other.keys()):
        if one.get(path) != other.get(path):
            lines.append(f"{path!r}: {one.get(path)} != {other.get(path)}")
    return lines


def _here(*arguments: str) -> str:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    # As inside: whoever has a range of ids there needs it here.
    done = mapped.run(_done, command) if place().driver.ids else _done(command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _done(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
