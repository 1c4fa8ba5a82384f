"""Sandboxes of ours with one fault each, as the checks of forks see them: a check that passes all of these is none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace

from worldfork.core.errors import NotFound, SandboxError
from worldfork.testing.adapter import Order, Ran, Wanted
from worldfork.testing.ours import OwnSandboxes
from worldfork.testing.trial import DIRECTORY


class Sound(OwnSandboxes):
    """No fault; knows which sandbox is a fork of which."""

    def __init__(self) -> None:
        super().__init__("namespace")
        self.source_of: dict[str, str] = {}
        self.taken: list[str] = []
        self.forks: list[str] = []

    async def snapshot(self, sandbox: str, *, memory: bool) -> str:
        called = await super().snapshot(sandbox, memory=memory)
        self.source_of[called] = sandbox
        self.taken.append(called)
        return called

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        children = await super().fork(snapshot, n)
        self.forks += children
        return children

    async def sh(self, sandbox: str, line: str) -> bytes:
        """Run a line past the fault."""
        order = Order(("sh", "-c", f"mkdir -p {DIRECTORY}; cd {DIRECTORY}; {line}"))
        return (await OwnSandboxes.run(self, sandbox, order)).stdout


class FirstState(Sound):
    """Every fork is of the first snapshot."""

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        return await super().fork(self.taken[0] if snapshot in self.taken else snapshot, n)


class Once(Sound):
    """A snapshot can be resumed once."""

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        if snapshot in self.taken and self.taken.count(snapshot) == 2:
            raise NotFound("no such row")
        self.taken.append(snapshot)
        return await super().fork(snapshot, n)


class SharedDisk(Sound):
    """All siblings are one."""

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        return list(await super().fork(snapshot, 1)) * n


class LaterFile(Sound):
    """One file of a fork is as it was a moment after the rest."""

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        children = await super().fork(snapshot, n)
        later = int(await self.sh(self.source_of[snapshot], "cat r/7")) + 3
        for child in children:
            await self.sh(child, f"echo {later} > r/7")
        return children


class TemplateDisk(Sound):
    """Forks are of the base, not of the source."""

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        return [await self.create(Wanted()) for _ in range(n)]


class LeftPaused(Sound):
    """A snapshot that was called off leaves its source paused."""

    def __init__(self) -> None:
        super().__init__()
        self.paused: set[str] = set()

    async def snapshot(self, sandbox: str, *, memory: bool) -> str:
        self.paused.add(sandbox)
        called = await super().snapshot(sandbox, memory=memory)
        self.paused.discard(sandbox)
        return called

    async def run(self, sandbox: str, order: Order) -> Ran:
        if sandbox in self.paused:
            await asyncio.Event().wait()
        return await super().run(sandbox, order)


class CannotFail(Sound):
    """A fork of nothing succeeds."""

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        if snapshot not in self.taken:
            return [await self.create(Wanted()) for _ in range(n)]
        return await super().fork(snapshot, n)


class ForkedOnce(Sound):
    """A source can be forked once."""

    async def snapshot(self, sandbox: str, *, memory: bool) -> str:
        if sandbox in self.source_of.values():
            raise SandboxError("the golden one was forked before")
        return await super().snapshot(sandbox, memory=memory)


class Deaf(Sound):
    """The first command in the source after its fourth fork finds a closed connection."""

    async def run(self, sandbox: str, order: Order) -> Ran:
        if len(self.forks) == 4 and sandbox not in self.forks:
            self.forks.append("")
            raise SandboxError("end of file")
        return await super().run(sandbox, order)


class Pinned(Sound):
    """What a source leaves behind at its end lands in its forks."""

    async def end(self, called: str) -> None:
        await super().end(called)
        for child in self.forks:
            if child in self._boxes and called not in self.forks:
                await self.sh(child, "printf damage | dd of=cold conv=notrunc seek=9 2>/dev/null")


class Guarded(Sound):
    """The end of a sandbox takes its snapshots along."""

    async def end(self, called: str) -> None:
        await super().end(called)
        for snapshot in [one for one, source in self.source_of.items() if source == called]:
            del self.source_of[snapshot]
            await super().end(snapshot)


class Sessions(Sound):
    """A snapshot's name begins with the session, which is another in every process."""

    def __init__(self) -> None:
        super().__init__()
        self.session = secrets.token_hex(4)

    async def snapshot(self, sandbox: str, *, memory: bool) -> str:
        return f"{self.session}/{await super().snapshot(sandbox, memory=memory)}"

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        session, _, own = snapshot.partition("/")
        if session != self.session:
            raise NotFound(f"no snapshot {snapshot}")
        return await super().fork(own, n)

    async def end(self, called: str) -> None:
        await super().end(called.partition("/")[2] or called)


class OldestLost(Sound):
    """A fork lacks the oldest of the synced records."""

    lost = "ls -rt w/*.sum | head -1"

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        children = await super().fork(snapshot, n)
        for child in children:
            await self.sh(child, f"rm $({self.lost})")
        return children


class Damaged(OldestLost):
    """In a fork a synced record has another byte."""

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        children = await Sound.fork(self, snapshot, n)
        for child in children:
            await self.sh(child, "printf x | dd of=w/1 bs=1 seek=77 conv=notrunc 2>/dev/null")
        return children


class NewestLost(OldestLost):
    """A fork lacks what was written last."""

    lost = "ls -t f* | head -1"


class Reused(Sound):
    """A name used again begins with what its former owner left."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, str] = {}
        self.names: dict[str, str] = {}

    async def create(self, wanted: Wanted) -> str:
        box = await super().create(wanted)
        self.names[box] = wanted.name
        if wanted.name in self.left:
            await self.sh(box, f"touch {self.left[wanted.name]}")
        return box

    async def end(self, called: str) -> None:
        if self.names.get(called):
            self.left[self.names[called]] = (await self.sh(called, "ls -A | head -1")).decode().strip()
        await super().end(called)


class OldSize(Sound):
    """A name used again keeps the size of its former owner's disk."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int | None] = {}

    async def create(self, wanted: Wanted) -> str:
        size_mb = self.sizes.setdefault(wanted.name, wanted.disk_mb) if wanted.disk_mb else None
        return await super().create(Wanted(wanted.name, size_mb))


class Mended(Sound):
    """A fork is given a small difference that is not in its snapshot."""

    line = "true"

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        children = await super().fork(snapshot, n)
        for child in children:
            await self.sh(child, self.line)
        return children


class Short(Sound):
    """What is sent in is cut after 18 KiB, and that is called a success."""

    async def run(self, sandbox: str, order: Order) -> Ran:
        return await super().run(sandbox, Order(order.argv, order.stdin[: 18 << 10], order.env))


class WorkersImage(Sound):
    """The snapshot of a worker takes the place of the first one."""

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        return await super().fork(self.taken[-1], n)


class Deeper(Sound):
    """Every fork takes longer than the one before."""

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        await asyncio.sleep(0.03 * len(self.taken) ** 2)
        return await super().fork(snapshot, n)


class Twins(Sound):
    """Siblings answer alike."""

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[object, asyncio.Future[Ran]] = {}

    async def run(self, sandbox: str, order: Order) -> Ran:
        key = (tuple(order.argv), order.stdin)
        if sandbox not in self.forks:
            return await super().run(sandbox, order)
        if key not in self.said:
            self.said[key] = asyncio.ensure_future(super().run(sandbox, order))
        return await self.said[key]


class Stalled(Sound):
    """The first command in a fork takes seconds."""

    async def run(self, sandbox: str, order: Order) -> Ran:
        if sandbox in self.forks:
            self.forks.remove(sandbox)
            await asyncio.sleep(6)
        return await super().run(sandbox, order)


class Rewritten(Sound):
    """Programs of a fork are altered on their way, to show what a fault of its network or clock would."""

    old = new = b""
    after_n = 0

    async def run(self, sandbox: str, order: Order) -> Ran:
        stdin, argv = order.stdin, order.argv
        if sandbox in self.forks[self.after_n :]:
            stdin = stdin.replace(self.old, self.new)
            argv = [word.replace(self.old.decode(), self.new.decode()) for word in argv]
        return await super().run(sandbox, Order(argv, stdin, order.env))


class BrokenTalk(Sound):
    """A fork hurts the connections of its source."""

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        line = "for p in /proc/[0-9]*; do grep -qs talkers $p/cmdline && kill -9 ${p#/proc/}; done"
        await self.sh(self.source_of[snapshot], line)
        return await super().fork(snapshot, n)


class HungTalk(Sound):
    """Whoever connects in a fork to what served in the source waits for ever."""

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        children = await super().fork(snapshot, n)
        serve = (
            "import socket, time; s = socket.create_server(('127.0.0.1', int(open('port').read()))); open('up', 'w')"
        )
        for child in children:
            line = f'(python3 -c "{serve}; time.sleep(99)") >/dev/null 2>&1 & until [ -e up ]; do sleep 0.02; done'
            await self.sh(child, line)
        return children


class HostVariables(Sound):
    """Commands get the variables of whoever asks."""

    async def run(self, sandbox: str, order: Order) -> Ran:
        return await super().run(sandbox, Order(order.argv, order.stdin, {**os.environ, **order.env, "PATH": "/bin"}))


class KeptVariables(Sound):
    """What a command is given stays on the disk."""

    async def run(self, sandbox: str, order: Order) -> Ran:
        for value in order.env.values():
            await self.sh(sandbox, f"echo export T={value} >> /root/.profile")
        return await super().run(sandbox, order)


class InPlace(Sound):
    """A stand-in for memory snapshots: the one fork of a snapshot is its live source under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.abilities = replace(self.abilities, memory=True)

    async def snapshot(self, sandbox: str, *, memory: bool) -> str:
        return f"memory:{sandbox}" if memory else await super().snapshot(sandbox, memory=memory)

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        if not snapshot.startswith("memory:"):
            return await super().fork(snapshot, n)
        source = self._boxes[snapshot.removeprefix("memory:")]
        names = [f"{source.sandbox_id}~{secrets.token_hex(4)}" for _ in range(n)]
        self._boxes.update(dict.fromkeys(names, source))
        self.forks += names
        return names

    async def end(self, called: str) -> None:
        if called.startswith("memory:"):
            return
        box = self._boxes.get(called)
        if box is not None and list(self._boxes.values()).count(box) > 1:
            del self._boxes[called]
        else:
            await super().end(called)


class Holey(InPlace):
    """Some pages of a fork are of another time."""

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        children = await super().fork(snapshot, n)
        with contextlib.suppress(IndexError):
            await self.sh(children[0], "printf %s '[\"fill\", 999]' > ask; cat answer")
        return children


class MemoryTwins(InPlace):
    """The random numbers of a program that ran at the snapshot are the same in every fork."""

    said = Ran(0, b'[0.5, "0000", "11"]')

    async def run(self, sandbox: str, order: Order) -> Ran:
        if any("random" in word and "tee ask" in word for word in order.argv):
            return self.said
        return await super().run(sandbox, order)
