"""Build a world once, freeze it, fork it thousands of times.

Nothing happens on import, and names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldfork.core.errors import ConfigError, NotFound, SandboxDied, SandboxError, WorldforkError
    from worldfork.lineage.asynchronous import AsyncSandbox
    from worldfork.lineage.keeping import SnapshotStore
    from worldfork.lineage.snapshots import ForkResult, ForkResults, SnapshotInfo
    from worldfork.lineage.synchronous import Sandbox
    from worldfork.records.sandbox import OutputMode, ProcessInfo, ProcessStatus, SandboxInfo, SandboxStatus, StdinMode
    from worldfork.records.snapshot import CheckpointType, SnapshotLevel, SnapshotStatus, SnapshotWaitCondition
    from worldfork.sandbox.command import CommandResult
    from worldfork.sandbox.command import Reason as CommandExitReason
    from worldfork.worlds.world import async_world, world

__version__ = "0.1.0"

# fmt: off
__all__ = [
    "AsyncSandbox", "CheckpointType", "CommandExitReason", "CommandResult", "ConfigError", "ForkResult", "ForkResults",
    "NotFound", "OutputMode", "ProcessInfo", "ProcessStatus", "Sandbox", "SandboxDied", "SandboxError", "SandboxInfo",
    "SandboxStatus", "SnapshotInfo", "SnapshotLevel", "SnapshotStatus", "SnapshotStore", "SnapshotWaitCondition",
    "StdinMode", "WorldforkError", "async_world", "world",
]

_ROOMS = {
    "core.errors": ("ConfigError", "NotFound", "SandboxDied", "SandboxError", "WorldforkError"),
    "lineage.asynchronous": ("AsyncSandbox",),
    "lineage.keeping": ("SnapshotStore",),
    "lineage.snapshots": ("ForkResult", "ForkResults", "SnapshotInfo"),
    "lineage.synchronous": ("Sandbox",),
    "records.sandbox": ("OutputMode", "ProcessInfo", "ProcessStatus", "SandboxInfo", "SandboxStatus", "StdinMode"),
    "records.snapshot": ("CheckpointType", "SnapshotLevel", "SnapshotStatus", "SnapshotWaitCondition"),
    "sandbox.command": ("CommandResult", "CommandExitReason"),
    "worlds.world": ("async_world", "world"),
}
# fmt: on


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            own_name = "Reason" if name == "CommandExitReason" else name
            value = getattr(import_module(f"worldfork.{room}"), own_name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'worldfork' has no attribute {name!r}")
