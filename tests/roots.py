"""A small root file system for `dir:` bases, made of this machine's own programs and their libraries."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

PROGRAMS = (
    "bash", "cat", "chmod", "chown", "cp", "dd", "df", "echo", "env", "false", "head", "id", "kill", "ln", "ls",
    "mkdir", "mkfifo", "mknod", "mv", "nproc", "ps", "rm", "seq", "setsid", "sh", "sleep", "stat", "tail", "touch",
    "tr", "true", "truncate", "wc", "yes",
)  # fmt: skip
DIRECTORIES = ("bin", "etc", "proc", "sys", "dev", "tmp", "run", "root", "usr/bin", "var", "workspace")


def make_small_root(root: Path) -> Path:
    """Fill `root`, which must not exist, with a shell and what a test of a sandbox calls."""
    for name in DIRECTORIES:
        (root / name).mkdir(parents=True)
    found = [path for path in (shutil.which(name) for name in PROGRAMS) if path]
    for program in found:
        _copy(program, root / "bin" / Path(program).name)
    listed = subprocess.run(["ldd", *found], capture_output=True, text=True, check=False).stdout
    for library in sorted(set(re.findall(r"(/\S+)\s+\(0x", listed))):
        _copy(library, root / library.lstrip("/"))
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\nuser:x:1000:\n")
    return root


def _copy(source: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(os.path.realpath(source), target)
