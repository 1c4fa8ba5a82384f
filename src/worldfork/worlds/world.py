"""Build a world once: one builder at a time for each key, across threads and processes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from worldfork.core.errors import ConfigError, FormatUnsupported, NotFound
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.door import through
from worldfork.lineage.fitting import check_base, check_ids
from worldfork.lineage.place import Place, place
from worldfork.lineage.snapshots import SnapshotInfo, snapshot_info, wait_durable
from worldfork.lineage.synchronous import Sandbox


async def async_world(key: str, build: Callable[[AsyncSandbox], Awaitable[None] | None], **create: Any) -> SnapshotInfo:
    """Return the snapshot called `key`; the first to ask builds it in a fresh sandbox, the others wait.

    A builder that fails or is killed frees the key, and the next one tries. The snapshot is durable when this
    returns, so that a world, once announced, is never half there.

    Args:
        key: the world's name; change it when what `build` does changes.
        build: prepares a fresh sandbox.
        create: arguments of `AsyncSandbox.create`.

    Raises:
        Whatever `build` raises; nothing is stored then.
    """
    here = await asyncio.get_running_loop().run_in_executor(None, place)
    name = f"world:{here.driver.form}:{key}"
    found = await here.work(lambda: _known(here, name))
    if found is not None:
        return found
    async with here.single_flight(name):
        found = await here.work(lambda: _known(here, name))
        if found is not None:
            return found
        async with await AsyncSandbox.create(**create) as sandbox:
            built = build(sandbox)
            if inspect.isawaitable(built):
                await built
            info = await sandbox.checkpoint(stop=True, label=f"world {key}")
        await wait_durable(here.durability(info.snapshot_id))
        await here.work(lambda: here.store.set_name(name, info.snapshot_id))
        return info


def world(key: str, build: Callable[[Sandbox], None], **create: Any) -> SnapshotInfo:
    """The same for synchronous callers; `build` gets a `Sandbox` and may block."""

    async def build_in_thread(sandbox: AsyncSandbox) -> None:
        await asyncio.get_running_loop().run_in_executor(None, build, Sandbox(sandbox))

    return through(async_world, key, build_in_thread, **create)


def _known(here: Place, name: str) -> SnapshotInfo | None:
    """Return the world of this name if it is there and still fits this machine; else it is to be built again."""
    snapshot_id = here.store.named(name)
    if snapshot_id is None:
        return None
    try:
        record = here.store.snapshot(snapshot_id)
        check_base(record, allow_changed=False)
        check_ids(record, here.driver.ids)
    except (NotFound, FormatUnsupported, ConfigError):
        return None
    return snapshot_info(record)
