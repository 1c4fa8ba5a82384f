"""Build a world once, freeze it, fork it thousands of times. Names are loaded when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldfork.core.errors import ConfigError, NotFound, SandboxDied, SandboxError, WorldforkError
    from worldfork.lineage.asynchronous import AsyncSandbox
    from worldfork.lineage.keeping import SnapshotStore
    from worldfork.lineage.snapshots import ForkResult, ForkResults, SnapshotInfo
    from worldfork.lineage.synchronous import Sandbox
    from worldfork.records.episode import Episode, FailureKind
    from worldfork.records.sandbox import OutputMode, ProcessInfo, ProcessStatus, SandboxInfo, SandboxStatus, StdinMode
    from worldfork.records.snapshot import CheckpointType, SnapshotLevel, SnapshotStatus, SnapshotWaitCondition
    from worldfork.records.task import Task
    from worldfork.records.task_limits import TaskLimits
    from worldfork.rollout.group import Group
    from worldfork.rollout.group import run_group as async_run_group
    from worldfork.rollout.loading import load_tasks
    from worldfork.rollout.opened import AsyncRollout
    from worldfork.rollout.opened import open_rollout as async_open_rollout
    from worldfork.rollout.synchronous import Rollout, open_rollout, run_group
    from worldfork.sandbox.command import CommandResult
    from worldfork.sandbox.command import Reason as CommandExitReason
    from worldfork.worlds.world import async_world, world

__version__ = "0.1.0"

# fmt: off
__all__ = [
    "AsyncRollout", "AsyncSandbox", "CheckpointType", "CommandExitReason", "CommandResult", "ConfigError", "Episode",
    "FailureKind", "ForkResult", "ForkResults", "Group", "NotFound", "OutputMode", "ProcessInfo", "ProcessStatus",
    "Rollout", "Sandbox", "SandboxDied", "SandboxError", "SandboxInfo", "SandboxStatus", "SnapshotInfo",
    "SnapshotLevel", "SnapshotStatus", "SnapshotStore", "SnapshotWaitCondition", "StdinMode", "Task", "TaskLimits",
    "WorldforkError", "async_open_rollout", "async_run_group", "async_world", "load_tasks", "open_rollout", "run_group",
    "world",
]
_ROOMS = {
    "core.errors": "ConfigError NotFound SandboxDied SandboxError WorldforkError",
    "lineage.asynchronous": "AsyncSandbox", "lineage.keeping": "SnapshotStore", "lineage.synchronous": "Sandbox",
    "lineage.snapshots": "ForkResult ForkResults SnapshotInfo", "records.episode": "Episode FailureKind",
    "records.sandbox": "OutputMode ProcessInfo ProcessStatus SandboxInfo SandboxStatus StdinMode",
    "records.snapshot": "CheckpointType SnapshotLevel SnapshotStatus SnapshotWaitCondition",
    "records.task": "Task", "records.task_limits": "TaskLimits", "rollout.loading": "load_tasks",
    "rollout.group": "Group async_run_group=run_group", "rollout.synchronous": "Rollout open_rollout run_group",
    "rollout.opened": "AsyncRollout async_open_rollout=open_rollout", "worlds.world": "async_world world",
    "sandbox.command": "CommandResult CommandExitReason=Reason",
}
# fmt: on


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        for public, _, own in (each.partition("=") for each in names.split()):
            if public == name:
                value = globals()[name] = getattr(import_module(f"worldfork.{room}"), own or public)
                return value
    raise AttributeError(f"module 'worldfork' has no attribute {name!r}")
