"""The five methods through which the checks see a sandbox system, and what it says that it can do.

To put a system of your own through the checks, write a class with the methods of `Adapter` and run

    worldfork verify --adapter my_module:MyAdapter

The object named is the adapter, or is called to get one: without arguments, or with TEXT of `module:object:TEXT`. The
checks know nothing else of your system. Sandboxes and snapshots are strings of your choosing, so that another process
can be told of them. A method that cannot do what it was asked raises: silence is what the checks look for. Calls come
from one event loop, several at a time. A sandbox needs `sh`, the usual small programs (`cat`, `find`, `grep`, `ls`,
`mkdir`, `mv`, `rm`, `seq`, `sha256sum`, `sleep`, `timeout` and their like) and a writable `/var/tmp`; checks that need
`python3` inside do not apply where there is none.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from worldfork.core.errors import ConfigError


@dataclass(frozen=True)
class Abilities:
    """What a system can do. A check that needs what is False here does not apply; it is neither passed nor failed."""

    memory: bool = False
    """A snapshot can carry the running processes and their memory."""
    network: bool = False
    """A fork has a network besides its loopback, and name servers."""
    detached: bool = False
    """A snapshot outlives the process that took it, and its string means the same to another process."""
    processes: bool = True
    """What a command leaves in the background lives on after it, and a snapshot can be taken meanwhile."""
    limits: bool = False
    """`Wanted.disk_mb` is kept."""
    hook: str = ""
    """Path of a program inside that every fork with memory runs before it is handed out, so that programs which ran at
    the snapshot can renew what only they know of, such as their random state; empty where there is no such thing."""


@dataclass(frozen=True)
class Wanted:
    """What a fresh sandbox should be like."""

    name: str = ""
    """A name to find it by, free again once the sandbox is ended; empty for any."""
    disk_mb: int | None = None
    """What it may write at most, in MiB; None for no limit. Asked for only where `limits` is told."""


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    exit_code: int
    """Its own; anything but 0 where it was killed or not started."""
    stdout: bytes = b""
    stderr: bytes = b""


@dataclass(frozen=True)
class Order:
    """A command to run."""

    argv: Sequence[str]
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict)
    """Laid over the sandbox's own variables, for this command alone."""


class Adapter(Protocol):
    """A sandbox system, as the checks see it."""

    @property
    def abilities(self) -> Abilities:
        """What the system can do, on this machine."""
        ...

    async def create(self, wanted: Wanted) -> str:
        """Start a fresh sandbox from the system's usual base and return what it is called."""
        ...

    async def run(self, sandbox: str, order: Order) -> Ran:
        """Run a command to its end in a sandbox. A background child that holds its output must not hold this up."""
        ...

    async def snapshot(self, sandbox: str, *, memory: bool) -> str:
        """Freeze a live sandbox, which goes on, and return what the snapshot is called.

        With `memory` processes and RAM are in it, and a fork goes on with them; without, the disk alone.
        """
        ...

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        """Start `n` sandboxes from a snapshot, and return what they are called."""
        ...

    async def end(self, called: str) -> None:
        """End a sandbox, or delete a snapshot, with all that belongs to it alone. Raises where that is refused."""
        ...


def load_adapter(named: str) -> Adapter:
    """Return the adapter that `module:object` or `module:object:TEXT` names; a class or a function is called.

    Raises:
        ConfigError: there is no such thing, or it is no adapter.
    """
    module, _, rest = named.partition(":")
    name, colon, text = rest.partition(":")
    if not (module and name):
        raise ConfigError(f"{named!r} names no adapter", remedy="name it as module:object")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{named} cannot be loaded: {error}", remedy="is its directory on PYTHONPATH?") from error
    called = colon or isinstance(found, type) or not hasattr(found, "abilities")
    if called and not callable(found):
        raise ConfigError(f"{named} is no adapter, and cannot be called to get one")
    adapter = (found(text) if colon else found()) if called else found
    lacking = [one for one in ("abilities", "create", "run", "snapshot", "fork", "end") if not hasattr(adapter, one)]
    if lacking:
        raise ConfigError(f"{named} is no adapter: it has no {', '.join(lacking)}")
    return cast(Adapter, adapter)
