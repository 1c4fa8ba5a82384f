"""Plain `runc` with copies of directories, as somebody would begin who has no more than that. It fails some checks.

A sandbox is a bundle: a small root directory, this machine's `/usr` mounted read-only, `sleep` as its first process.
A snapshot is `cp -a` of the root while it is in use, a fork `cp -a` back. Needs root and `runc`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worldfork.core.errors import ConfigError, SandboxError
from worldfork.testing.adapter import Abilities, Order, Ran, Wanted

_LINKS = ("bin", "sbin", "lib", "lib32", "lib64")
_DIRECTORIES = ("dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "usr", "var/tmp", "workspace")
_NAMESPACES = ("pid", "network", "ipc", "uts", "mount")
_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "group": "root:x:0:\n",
    "hostname": "runc\n",
    "hosts": "127.0.0.1\tlocalhost runc\n",
    "machine-id": "0123456789abcdef0123456789abcdef\n",
    "resolv.conf": "",
}
_CAPABILITIES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID")


class PlainRunc:
    """Bundles below one directory, which is removed when the last of them is ended."""

    abilities = Abilities(detached=True)

    def __init__(self, directory: Path | None = None) -> None:
        if shutil.which("runc") is None:
            raise ConfigError("runc is not installed", remedy="apt-get install runc")
        if os.geteuid() != 0:
            raise ConfigError("this adapter of runc needs root", remedy="run it with sudo")
        self._home = directory or Path(tempfile.gettempdir(), "worldfork-runc")
        self._state = str(self._home / "state")

    async def create(self, wanted: Wanted) -> str:
        """Make a fresh root and start a bundle on it."""
        bundle = self._bundle(wanted.name)
        await asyncio.to_thread(_fill, bundle / "rootfs")
        return await self._start(bundle)

    async def run(self, sandbox: str, order: Order) -> Ran:
        """Run a command with `runc exec`."""
        settings = [word for name, value in order.env.items() for word in ("--env", f"{name}={value}")]
        # Files, not pipes: a background child holds them open, and nobody has to wait for that.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as given:
            given.write(order.stdin)
            given.seek(0)
            words = [*self._runc(), "exec", *settings, sandbox, *order.argv]
            process = await asyncio.create_subprocess_exec(*words, stdin=given, stdout=out, stderr=err)
            code = await _ended(process)
            out.seek(0)
            err.seek(0)
            return Ran(code, out.read(), err.read())

    async def snapshot(self, sandbox: str, *, memory: bool) -> str:
        """Copy the root as it is."""
        if memory:
            raise SandboxError("directory copies hold no memory")
        called = f"copy-{secrets.token_hex(6)}"
        await self._copy(self._home / sandbox / "rootfs", self._home / called)
        return called

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        """Copy the copy `n` times, one after the other."""
        started = []
        for _ in range(n):
            bundle = self._bundle("")
            try:
                await self._copy(self._home / snapshot, bundle / "rootfs")
                started.append(await self._start(bundle))
            except BaseException:
                await _do("rm", "-rf", "--one-file-system", str(bundle))
                raise
        return started

    async def end(self, called: str) -> None:
        """Delete a bundle with its processes, or a copy."""
        if (self._home / called / "config.json").exists():
            await _do(*self._runc(), "delete", "--force", called)
        await _do("rm", "-rf", "--one-file-system", str(self._home / called))
        for empty in (self._state, self._home):
            with contextlib.suppress(OSError):
                Path(empty).rmdir()

    async def _copy(self, source: Path, target: Path) -> None:
        try:
            await _do("cp", "-a", str(source), str(target))
        except BaseException:
            await _do("rm", "-rf", "--one-file-system", str(target))
            raise

    def _runc(self) -> tuple[str, ...]:
        return ("runc", "--root", self._state)

    def _bundle(self, name: str) -> Path:
        bundle = self._home / (name or f"box-{secrets.token_hex(6)}")
        bundle.mkdir(parents=True)
        return bundle

    async def _start(self, bundle: Path) -> str:
        (bundle / "config.json").write_text(json.dumps(_config()))
        await _do(*self._runc(), "run", "--detach", "--bundle", str(bundle), bundle.name)
        return bundle.name


def _fill(root: Path) -> None:
    for name in _DIRECTORIES:
        (root / name).mkdir(parents=True)
    for name in _LINKS:
        if Path("/usr", name).exists():
            (root / name).symlink_to(f"usr/{name}")
    for name, text in _FILES.items():
        (root / "etc" / name).write_text(text)
    for name in ("ld.so.cache", "nsswitch.conf"):
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), root / "etc" / name)
    (root / "tmp").chmod(0o1777)
    (root / "var" / "tmp").chmod(0o1777)


def _config() -> dict[str, Any]:
    capabilities = {kind: list(_CAPABILITIES) for kind in ("bounding", "effective", "permitted")}
    return {
        "ociVersion": "1.0.2",
        "hostname": "runc",
        "root": {"path": "rootfs", "readonly": False},
        "process": {
            "args": ["sleep", "infinity"],
            "cwd": "/",
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"],
            "user": {"uid": 0, "gid": 0},
            "capabilities": capabilities,
            "noNewPrivileges": True,
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro", "nosuid", "nodev"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755", "size=64m"]},
            {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]},
        ],
        "linux": {"namespaces": [{"type": kind} for kind in _NAMESPACES]},
    }


async def _do(*words: str) -> None:
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(*words, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        code = await _ended(process)
        if code != 0:
            said.seek(0)
            raise SandboxError(f"{words[0]} ended with {code}: {said.read()[-300:].decode('utf-8', 'replace')}")


async def _ended(process: asyncio.subprocess.Process) -> int:
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
