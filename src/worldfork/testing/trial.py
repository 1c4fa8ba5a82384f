"""What a check works with: boxes and snapshots of one adapter, all of them ended afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from worldfork.testing.adapter import Adapter, Order, Ran, Wanted
from worldfork.testing.checks import NotApplicable, Wrong, expect

DIRECTORY = "/var/tmp/fork-check"
"""Where checks write inside a sandbox."""


class Box:
    """One sandbox of the system under test."""

    def __init__(self, adapter: Adapter, called: str, patience: float = 1.0) -> None:
        self._adapter = adapter
        self.called = called
        self._patience = patience

    async def run(self, argv: Sequence[str], stdin: bytes = b"", env: Mapping[str, str] | None = None) -> Ran:
        """Run a program, whatever it ends with."""
        return await self._adapter.run(self.called, Order(tuple(argv), stdin, dict(env or {})))

    async def sh(self, line: str, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> str:
        """Run lines of `sh` in the checks' directory that must succeed; return what they print, without blank ends."""
        line = f"mkdir -p {DIRECTORY} && cd {DIRECTORY} || exit 9\n{line}"
        ran = await self.run(["sh", "-c", line], stdin, env)
        if ran.exit_code != 0:
            said = (ran.stderr or ran.stdout)[-300:].decode("utf-8", "replace").strip()
            raise Wrong(f"a command that must work ended with {ran.exit_code} in {self.called}: {said}")
        return ran.stdout.decode("utf-8", "replace").strip()

    async def python(self, code: str, *arguments: str) -> Any:
        """Run a program in Python that prints JSON; return that.

        Raises:
            NotApplicable: there is no Python in the sandbox.
        """
        if not await self.sh("command -v python3 || true"):
            raise NotApplicable("there is no python3 in its sandboxes")
        text = await self.sh(f"exec python3 - {shlex.join(arguments)}", code.encode())
        try:
            return json.loads(text)
        except ValueError:
            raise Wrong(f"a program in {self.called} should print JSON, and printed {text[-200:]!r}") from None

    async def write(self, path: str, content: str) -> None:
        """Write a file, relative to the checks' directory."""
        await self.sh(f"cat > {shlex.quote(path)}", content.encode())

    async def read(self, path: str) -> str:
        """Read a file; empty where it is missing."""
        return await self.sh(f"cat {shlex.quote(path)} 2>/dev/null || true")

    async def background(self, line: str, ready: str, wait_s: float = 10) -> None:
        """Leave lines of `sh` running, and return once they have made the file `ready`."""
        await self.sh(f"( {line} ) >/dev/null 2>&1 </dev/null &\n")
        await self.appears(ready, wait_s)

    async def appears(self, path: str, wait_s: float = 10) -> None:
        """Return once a file is there.

        Raises:
            NotApplicable: it never comes, so nothing that was left in the background runs.
        """
        end_s = time.monotonic() + wait_s * self._patience
        while not await self.sh(f"test -e {shlex.quote(path)} && echo yes || true"):
            if time.monotonic() > end_s:
                raise NotApplicable("what a command leaves in the background does not run on")
            await asyncio.sleep(0.02)


class Trial:
    """One run of one check with one kind of snapshot."""

    def __init__(self, adapter: Adapter, named: str = "", *, memory: bool = False, patience: float = 1.0) -> None:
        self.adapter = adapter
        self._patience = patience
        self.named = named
        """What `load_adapter` finds the adapter by, in this process and in another; empty for nothing."""
        self.memory = memory
        self._alive: list[str] = []
        self._snapshots: list[str] = []

    async def create(self, name: str = "", disk_mb: int | None = None) -> Box:
        """Start a fresh sandbox."""
        return self._box(await self.adapter.create(Wanted(name, disk_mb)))

    async def snapshot(self, box: Box) -> str:
        """Freeze a sandbox."""
        called = await self.adapter.snapshot(box.called, memory=self.memory)
        self._snapshots.append(called)
        return called

    async def fork(self, snapshot: str, n: int = 1) -> list[Box]:
        """Start `n` sandboxes from a snapshot."""
        found = [self._box(called) for called in await self.adapter.fork(snapshot, n)]
        expect(len(found) == n, f"{n} forks were asked for, {len(found)} came")
        return found

    async def one(self, snapshot: str) -> Box:
        """Start one sandbox from a snapshot."""
        return (await self.fork(snapshot))[0]

    async def child_of(self, box: Box) -> Box:
        """Fork a live sandbox."""
        return await self.one(await self.snapshot(box))

    async def end(self, box: Box) -> None:
        """End a sandbox."""
        self._alive.remove(box.called)
        await self.adapter.end(box.called)

    async def delete(self, snapshot: str) -> bool:
        """Delete a snapshot; False where that is refused, as it may be while somebody stands on it."""
        try:
            await self.adapter.end(snapshot)
        except Exception:
            return False
        self._snapshots.remove(snapshot)
        return True

    async def elsewhere(self, what: str, *arguments: str) -> str:
        """Let another process make the adapter anew and do one thing with it; see `elsewhere.py`.

        Raises:
            NotApplicable: another process cannot make the adapter.
        """
        if not self.named:
            raise NotApplicable("another process cannot be told how to make this adapter")
        words = [sys.executable, "-m", "worldfork.testing.elsewhere", self.named, what, *arguments]
        none, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*words, stdin=none, stdout=pipe, stderr=pipe)
        try:
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        said = err.decode("utf-8", "replace").strip()[-300:]
        expect(process.returncode == 0, f"another process could not {what}: {said}")
        return out.decode().strip()

    def keep(self, snapshot: str) -> str:
        """Have a snapshot deleted at the end that another process took."""
        self._snapshots.append(snapshot)
        return snapshot

    async def close(self) -> None:
        """End everything, children before what they stand on; the first failure is raised once all were tried."""
        failures = []
        for called in [*reversed(self._alive), *reversed(self._snapshots)]:
            try:
                await self.adapter.end(called)
            except Exception as error:
                failures.append(f"{called}: {error}")
        self._alive.clear()
        self._snapshots.clear()
        expect(not failures, f"not everything could be ended: {'; '.join(failures)[:300]}")

    def _box(self, called: str) -> Box:
        # Two boxes under one name is what some checks look for; it is still ended once.
        if called not in self._alive:
            self._alive.append(called)
        return Box(self.adapter, called, self._patience)


async def gather(*work: Any) -> list[Any]:
    """Await all at once; where one fails the rest is cancelled and awaited before the failure comes out."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        raise
