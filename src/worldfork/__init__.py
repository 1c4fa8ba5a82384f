"""Build a world once, freeze it, fork it thousands of times.

Nothing happens on import, and names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldfork.core.errors import ConfigError as ConfigError
    from worldfork.core.errors import NotFound as NotFound
    from worldfork.core.errors import SandboxDied as SandboxDied
    from worldfork.core.errors import SandboxError as SandboxError
    from worldfork.core.errors import WorldforkError as WorldforkError
    from worldfork.lineage.asynchronous import AsyncSandbox as AsyncSandbox
    from worldfork.lineage.snapshots import ForkResult as ForkResult
    from worldfork.lineage.snapshots import ForkResults as ForkResults
    from worldfork.lineage.snapshots import SnapshotInfo as SnapshotInfo
    from worldfork.lineage.synchronous import Sandbox as Sandbox
    from worldfork.records.sandbox import SandboxInfo as SandboxInfo
    from worldfork.records.sandbox import SandboxStatus as SandboxStatus
    from worldfork.records.snapshot import CheckpointType as CheckpointType
    from worldfork.records.snapshot import SnapshotStatus as SnapshotStatus
    from worldfork.records.snapshot import SnapshotWaitCondition as SnapshotWaitCondition
    from worldfork.sandbox.command import CommandResult as CommandResult
    from worldfork.sandbox.command import Reason as CommandExitReason
    from worldfork.worlds.world import async_world as async_world
    from worldfork.worlds.world import world as world

__version__ = "0.1.0"

_HOMES = {
    "AsyncSandbox": "lineage.asynchronous",
    "CheckpointType": "records.snapshot",
    "CommandExitReason": "sandbox.command:Reason",
    "CommandResult": "sandbox.command",
    "ConfigError": "core.errors",
    "ForkResult": "lineage.snapshots",
    "ForkResults": "lineage.snapshots",
    "NotFound": "core.errors",
    "Sandbox": "lineage.synchronous",
    "SandboxDied": "core.errors",
    "SandboxError": "core.errors",
    "SandboxInfo": "records.sandbox",
    "SandboxStatus": "records.sandbox",
    "SnapshotInfo": "lineage.snapshots",
    "SnapshotStatus": "records.snapshot",
    "SnapshotWaitCondition": "records.snapshot",
    "WorldforkError": "core.errors",
    "async_world": "worlds.world",
    "world": "worlds.world",
}

__all__ = [*_HOMES]  # the table above is the one place that names them


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'worldfork' has no attribute {name!r}")
    module, _, attribute = home.partition(":")
    value = getattr(import_module(f"worldfork.{module}"), attribute or name)
    globals()[name] = value
    return value
