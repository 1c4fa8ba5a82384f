"""A small root file system, made from this machine's own programs, for figures that compare on one root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench.harness import Options, Skip

_PROGRAMS = (
    "/bin/sh",
    "/bin/bash",
    "/usr/bin/true",
    "/usr/bin/cat",
    "/usr/bin/sleep",
    "/usr/bin/mkdir",
    "/usr/bin/env",
)
_DIRECTORIES = ("etc", "proc", "sys", "dev", "tmp", "run", "root", "var", "workspace", "usr/bin", "bin")


def small_root(options: Options, *, name: str = "rootfs", more: Sequence[str] = ()) -> Path:
    """A directory with a shell, `true`, the programs `more` of /usr/bin and the libraries that they need; made once."""
    root = options.home / name
    if (root / "etc" / "passwd").exists():
        return root
    for directory in _DIRECTORIES:
        (root / directory).mkdir(parents=True, exist_ok=True)
    for program in (*_PROGRAMS, *(f"/usr/bin/{each}" for each in more)):
        _copy(program, root)
        for library in _libraries(program):
            _copy(library, root)
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return root


def _libraries(program: str) -> list[str]:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True)
    return sorted(set(re.findall(r"(/\S+)\s+\(0x", listed.stdout)))


def _copy(source: str, root: Path) -> None:
    real = os.path.realpath(source)
    if not os.path.exists(real):
        raise Skip(f"{source} is missing on this machine")
    target = root / source.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy2(real, target)
