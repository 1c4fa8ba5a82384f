"""Our own sandboxes as the checks see them, by driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worldfork.core.errors import ConfigError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.place import place
from worldfork.records.snapshot import CheckpointType
from worldfork.testing.adapter import Abilities, Order, Ran, Wanted

OUTPUT_BYTES = 64 << 20
_SNAPSHOT = "sn-"


class OwnSandboxes:
    """Sandboxes of one driver."""

    def __init__(self, driver: str, **options: Any) -> None:
        self._options = options if driver == "namespace" else {**options, "driver": driver}
        able = place().driver.capabilities()
        self.abilities = Abilities(
            memory=able.memory_checkpoint, network=False, detached=True, processes=True, limits=able.limits
        )
        self._boxes: dict[str, AsyncSandbox] = {}

    async def create(self, wanted: Wanted) -> str:
        """Start a sandbox without a network, as every fork of it will be."""
        box = await AsyncSandbox.create(
            name=wanted.name or None, disk_mb=wanted.disk_mb, network="none", **self._options
        )
        return self._keep(box)

    async def run(self, sandbox: str, order: Order) -> Ran:
        """Run a command to its end."""
        box = self._boxes[sandbox]
        program, *rest = order.argv
        done = await box.run(program, rest, dict(order.env), stdin=order.stdin or None, max_output_bytes=OUTPUT_BYTES)
        return Ran(done.exit_code, done.stdout_bytes, done.stderr_bytes)

    async def snapshot(self, sandbox: str, *, memory: bool) -> str:
        """Take a checkpoint."""
        kind = CheckpointType.MEMORY if memory else CheckpointType.FILESYSTEM
        return (await self._boxes[sandbox].checkpoint(checkpoint_type=kind)).snapshot_id

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        """Start forks; all or none."""
        results = await AsyncSandbox.fork_snapshot(snapshot, n)
        for each in results:
            if each.sandbox is not None:
                self._keep(each.sandbox)
        return [box.sandbox_id for box in results.unwrap()]

    async def end(self, called: str) -> None:
        """End a sandbox or delete a snapshot."""
        if called.startswith(_SNAPSHOT):
            await AsyncSandbox.delete_snapshot(called)
        else:
            await self._boxes.pop(called).terminate()

    def _keep(self, box: AsyncSandbox) -> str:
        self._boxes[box.sandbox_id] = box
        return box.sandbox_id


def namespace() -> OwnSandboxes:
    """Return sandboxes of the namespace driver, on this machine's own userland."""
    return OwnSandboxes("namespace")


DRIVERS = {"namespace": f"{__name__}:namespace"}
"""What `load_adapter` finds the adapter of each driver by."""


def adapter_of(driver: str) -> str:
    """Return the name of the adapter of a driver.

    Raises:
        ConfigError: there is no such driver.
    """
    try:
        return DRIVERS[driver]
    except KeyError:
        raise ConfigError(f"there is no driver {driver!r}", remedy=f"use one of {', '.join(DRIVERS)}") from None
