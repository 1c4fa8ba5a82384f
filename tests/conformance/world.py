"""A root file system for drivers that cannot start from the host's: this machine's own programs, with a Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
PROGRAMS = (
    "awk", "basename", "bash", "cat", "chgrp", "chmod", "chown", "chroot", "cmp", "cp", "cut", "date", "dd", "df",
    "diff", "dirname", "du", "echo", "env", "expr", "fallocate", "false", "find", "flock", "getent", "grep", "gzip",
    "head", "hostname", "id", "ip", "ipcmk", "ipcs", "kill", "ln", "ls", "mkdir", "mkfifo", "mknod", "mktemp", "mount",
    "mv", "nice", "nohup", "nproc", "od", "pgrep", "pkill", "printenv", "printf", "ps", "pwd", "readlink", "realpath",
    "rm", "rmdir", "sed", "seq", "setsid", "sh", "sha256sum", "sleep", "sort", "split", "stat", "stty", "sync", "tail",
    "tar", "tee", "test", "timeout", "touch", "tr", "true", "truncate", "tty", "umount", "uname", "uniq", "unshare",
    "wc", "which", "xargs", "yes",
)  # fmt: skip
DIRECTORIES = (
    "dev", "etc/alternatives", "etc/default", "etc/skel", "home", "opt", "proc", "root", "run", "srv", "sys", "tmp",
    "usr/bin", "usr/lib", "usr/lib64", "usr/sbin", "var/log", "var/tmp", "workspace",
)  # fmt: skip
MERGED = ("bin", "lib", "lib64", "sbin")
"""Links to the directories of the same name in /usr, as distributions have them."""
UNLISTED = "libgcc_s.so.1"
UNUSED = shutil.ignore_patterns(
    "test", "tests", "idlelib", "lib2to3", "turtledemo", "config-*", "site-packages", "EXTERNALLY-MANAGED"
)
FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home:/bin/sh\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "skel/.profile": "umask 022\n",
    "default/locale": "LANG=C.UTF-8\n",
    # Without it names are looked for in the network first.
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


def make_world(root: Path) -> Path:
    """Fill `root`, which must not exist, with what the tests of this directory call inside a sandbox."""
    for name in DIRECTORIES:
        (root / name).mkdir(parents=True)
    for name in MERGED:
        (root / name).symlink_to(f"usr/{name}")
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    (root / "root").chmod(0o700)
    for name, text in FILES.items():
        (root / "etc" / name).write_text(text, encoding="utf-8")
    for program in PROGRAMS:
        found = shutil.which(program, path=PATH)
        if found is not None:
            shutil.copy2(os.path.realpath(found), root / "usr" / "bin" / program)
    _add_python(root)
    _add_libraries(root)
    return root


def _add_python(root: Path) -> None:
    """Copy a Python to where it is on this host, so that it finds its library, with `pip` where it has one."""
    system = shutil.which("python3", path=PATH)
    program = Path(os.path.realpath(system or Path(sys.base_prefix, "bin", "python3")))
    ask = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    library = Path(
        subprocess.run([program, "-I", "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    )
    target = root / program.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(program, target)
    shutil.copytree(library, root / library.relative_to("/"), ignore=UNUSED, symlinks=False, dirs_exist_ok=True)
    packages = next((path for path in (Path("/usr/lib/python3/dist-packages/pip"), library / "site-packages/pip")
                     if path.is_dir()), None)  # fmt: skip
    if packages is not None:
        shutil.copytree(packages, root / library.relative_to("/") / "pip")
    for name in ("python", "python3"):
        (root / "usr" / "bin" / name).unlink(missing_ok=True)
        (root / "usr" / "bin" / name).symlink_to(program)
    pip = root / "usr" / "bin" / "pip"
    pip.write_text('#!/bin/sh\nexec python3 -m pip "$@"\n', encoding="utf-8")
    pip.chmod(0o755)


def _add_libraries(root: Path) -> None:
    programs = [str(path) for path in root.rglob("*") if path.is_file() and _is_elf(path)]
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    found = set(re.findall(r"(/\S+)\s+\(0x", listed))
    # A thread that ends loads it by name; no program lists it.
    found |= {str(Path(each).with_name(UNLISTED)) for each in found if Path(each).with_name(UNLISTED).exists()}
    for library in sorted(found):
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy2(os.path.realpath(library), target)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
