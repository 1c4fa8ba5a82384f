"""Our own sandboxes as the checks see them, by driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worldfork.core.errors import DriverUnavailable
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.place import place
from worldfork.records.snapshot import CheckpointType
from worldfork.sandbox.driver import Capabilities
from worldfork.sandbox.microvm.inside import HOOK
from worldfork.testing.adapter import Abilities, Order, Ran, Wanted

OUTPUT_BYTES = 64 << 20
PATIENCE = 4.0
"""For guests that QEMU interprets."""
_SNAPSHOT = "sn-"


class OwnSandboxes:
    """Sandboxes of one driver."""

    def __init__(self, driver: str = "namespace", base: str = "") -> None:
        able = _capabilities(driver)
        self._options: dict[str, Any] = {"driver": driver, **({"base": base} if base else {})}
        self.abilities = Abilities(
            memory=able.memory_checkpoint,
            network=False,
            detached=True,
            processes=True,
            limits=able.limits,
            hook=HOOK if able.memory_checkpoint else "",
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
        if results.errors:
            # Nobody is told of them, and so nobody else would end them.
            for box in results.sandboxes:
                await box.terminate()
        return [self._keep(box) for box in results.unwrap()]

    async def end(self, called: str) -> None:
        """End a sandbox or delete a snapshot."""
        if called.startswith(_SNAPSHOT):
            await AsyncSandbox.delete_snapshot(called)
        else:
            await self._boxes.pop(called).terminate()

    def _keep(self, box: AsyncSandbox) -> str:
        self._boxes[box.sandbox_id] = box
        return box.sandbox_id


def of_driver(text: str) -> OwnSandboxes:
    """Return sandboxes of `DRIVER` or `DRIVER@BASE`, as `name_of` writes it."""
    driver, _, base = text.partition("@")
    return OwnSandboxes(driver, base)


def name_of(driver: str, base: str = "") -> str:
    """Return what `load_adapter` finds the adapter of a driver by; `base` is for those that need one.

    Raises:
        ConfigError: there is no such driver.
    """
    _capabilities(driver)
    return f"{__name__}:of_driver:{driver}{'@' if base else ''}{base}"


def usual_patience(driver: str, base: str = "") -> float:
    """Return what time limits are multiplied by for a driver on this machine. Blocking, up to 10 s.

    Raises:
        DriverUnavailable: sandboxes of it cannot start here, with the remedy.
    """
    here = place()
    if driver == here.driver.name:
        return 1.0
    from worldfork.sandbox.microvm.host import find_host

    if (base or here.settings.base) == "host":
        raise DriverUnavailable(
            "virtual machines start from a root file system",
            remedy="give --base dir:PATH; `worldfork image build --driver microvm --from debian` makes one",
        )
    host = find_host(here.home.images, allow_tcg=here.settings.allow_tcg)
    return PATIENCE if host.decision.accel == "tcg" else 1.0


def _capabilities(driver: str) -> Capabilities:
    return place().driver_of(driver).capabilities()
