"""The hazard of restores that copy over what is there: every kind of file, added, changed and removed."""

from __future__ import annotations

from typing import Any

from worldfork.testing.checks import check, expect
from worldfork.testing.trial import DIRECTORY, Box, Trial

_FIRST = f"""
import json, os, socket
os.chdir({DIRECTORY!r})
put = lambda path, text: open(path, "w").write(text)
os.makedirs("d/deep"); put("d/deep/file", "deep"); put("plain", "plain"); put("becomes-dir", "x")
os.mkdir("becomes-file"); put("becomes-file/in", "in"); put("gone", "gone"); put("mode", "m"); os.chmod("mode", 0o640)
os.symlink("nowhere", "dangling"); os.symlink("plain", "link"); os.mkfifo("fifo")
put("hard", "hard"); os.link("hard", "hard-too")
server = socket.socket(socket.AF_UNIX); server.bind("socket"); server.close()
with open("sparse", "wb") as f: f.seek(5 << 20); f.write(b"end")
put("times", "t"); os.utime("times", ns=(10**18 + 7, 10**18 + 9))
put("odd \\n name \\u00e9", "odd"); os.mkdir("empty"); os.chmod("empty", 0o1777)
try: put("attribute", "a"); os.setxattr("attribute", "user.check", b"first")
except OSError: pass
print(json.dumps(True))
"""
_SECOND = f"""
import json, os, shutil
os.chdir({DIRECTORY!r})
put = lambda path, text: open(path, "w").write(text)
os.remove("gone"); os.remove("becomes-dir"); os.mkdir("becomes-dir"); put("becomes-dir/in", "in")
shutil.rmtree("becomes-file"); put("becomes-file", "file"); os.chmod("mode", 0o751)
os.remove("dangling"); put("dangling", "no link any more"); os.remove("link"); os.symlink("elsewhere", "link")
os.remove("fifo"); os.remove("socket"); os.remove("hard"); put("added", "added")
shutil.rmtree("d"); os.mkdir("d"); put("d/other", "other"); os.rmdir("empty"); os.mkfifo("empty")
with open("sparse", "r+b") as f: f.truncate(4 << 20)
try: os.setxattr("attribute", "user.check", b"second")
except OSError: pass
print(json.dumps(True))
"""
_LIST = f"""
import hashlib, json, os, stat
os.chdir({DIRECTORY!r})
found, groups = {{}}, {{}}
for parent, directories, files in os.walk("."):
    for name in directories + files:
        path = os.path.join(parent, name); at = os.lstat(path); kind = stat.S_IFMT(at.st_mode)
        row = [kind, stat.S_IMODE(at.st_mode), at.st_uid, at.st_gid]
        if kind != stat.S_IFDIR: row.append(at.st_mtime_ns)
        if kind == stat.S_IFREG:
            row += [at.st_size, hashlib.sha256(open(path, "rb").read()).hexdigest()]
            if at.st_nlink > 1: groups.setdefault(at.st_ino, []).append(path)
        if kind == stat.S_IFLNK: row.append(os.readlink(path))
        if kind in (stat.S_IFREG, stat.S_IFDIR):
            try: row.append([(n, os.getxattr(path, n).hex()) for n in sorted(os.listxattr(path)) if n[:5] == "user."])
            except OSError: pass
        found[path] = row
found["hard links"] = sorted(sorted(group) for group in groups.values() if len(group) > 1)
print(json.dumps(found))
"""


@check(13, "a restore is the snapshot in every kind of file, and nothing else", "NVIDIA/NemoClaw#6454, #10756")
async def _every_kind(trial: Trial) -> None:
    box = await trial.create()
    await box.python(_FIRST)
    first = await box.python(_LIST)
    one = await trial.snapshot(box)
    await box.python(_SECOND)
    second = await box.python(_LIST)
    two = await trial.snapshot(box)
    for snapshot, expected, which in ((one, first, "first"), (two, second, "second"), (one, first, "first, once more")):
        await _same(await trial.one(snapshot), expected, which)


async def _same(child: Box, expected: dict[str, Any], which: str) -> None:
    found = await child.python(_LIST)
    for path in sorted({*expected, *found}):
        told = f"{path!r} is {found.get(path)} instead of {expected.get(path)}"
        expect(found.get(path) == expected.get(path), f"in a fork of the {which} snapshot {told}")
