"""One snapshot, N sandboxes: started a few at a time, each a result of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from worldfork.core.errors import ConfigError
from worldfork.lineage.identity import choose_seeds
from worldfork.lineage.live import Live
from worldfork.lineage.mounts import learn_mounts
from worldfork.lineage.place import Place
from worldfork.lineage.renewing import renew
from worldfork.lineage.stacks import on_mountable
from worldfork.lineage.starting import (
    Ready,
    StartOptions,
    begin_one,
    make_facts,
    prepare,
    start_prepared,
    suited,
    unprepare,
    with_network,
)
from worldfork.records.sandbox import SandboxFacts
from worldfork.records.snapshot import SnapshotRecord
from worldfork.sandbox.driver import Begun

MAX_FORKS = 10_000
"""In one call."""


def natural_concurrency() -> int:
    """Return how many starts at a time give the best latency: twice the processors that this process may use.

    Two starts at once overlap well, more on a processor only wait for the kernel's locks.
    """
    return 2 * max(1, len(os.sched_getaffinity(0)))


def expect_forks(
    live: Live,
    n: int,
    options: StartOptions,
    *,
    memory: bool,
    seeds: Sequence[int] | str | None = None,
    max_concurrency: int | None = None,
) -> None:
    """Refuse forks of a live sandbox that cannot come about, before a snapshot is taken for them.

    Args:
        live: the sandbox.
        memory: whether its processes go along.
        n, options, seeds, max_concurrency: as of `fork_snapshot`.

    Raises:
        ConfigError: the arguments make no sense.
        OutOfSpace: the host has less memory than so many machines take at least.
    """
    _check_forks(n, seeds, max_concurrency)
    if not memory and options.driver == live.place.driver.name:
        return
    from worldfork.lineage.machines import expect_memory, expect_unchanged

    if memory:
        expect_unchanged(live.sandbox_id, options)
    expect_memory(n)


def _check_forks(n: int, seeds: Sequence[int] | str | None, max_concurrency: int | None) -> tuple[list[int], int]:
    """Return the seeds, and how many start at a time."""
    if not 1 <= n <= MAX_FORKS:
        raise ConfigError(f"cannot fork {n} times", remedy=f"use a number from 1 to {MAX_FORKS}")
    width = natural_concurrency() if max_concurrency is None else max_concurrency
    if width < 1:
        raise ConfigError(f"max_concurrency cannot be {width}", remedy="use 1 or more")
    return choose_seeds(seeds, n), width


async def fork_snapshot(
    place: Place,
    snapshot_id: str,
    n: int,
    options: StartOptions,
    *,
    seeds: Sequence[int] | str | None = None,
    max_concurrency: int | None = None,
    on_child: Callable[[int, Live | Exception], Awaitable[None] | None] | None = None,
) -> list[Live | Exception]:
    """Start `n` sandboxes from a snapshot; child `i` of the result is a sandbox or the error that it met.

    One child's failure does not touch its siblings. When the caller is cancelled, those that run are ended.

    Args:
        seeds: see `choose_seeds`.
        max_concurrency: starts at a time; `natural_concurrency()` by default.
        on_child: called with each child as soon as it is there.

    Raises:
        ConfigError: `n` or `max_concurrency` makes no sense.
        NotFound: the snapshot is gone.
        OutOfSpace: the host has less memory than so many machines take at least.
    """
    chosen, width = _check_forks(n, seeds, max_concurrency)
    record = place.quick(lambda: place.store.snapshot(snapshot_id))
    options = suited(place, record, options, n)

    def get_ready(found: SnapshotRecord) -> Ready:
        return _prepare(place, found, options, chosen)

    async def get_many_ready(found: SnapshotRecord) -> tuple[Ready, Begun | None]:
        return await place.work(lambda: get_ready(found), undo=lambda made: unprepare(place, made[0])), None

    async def get_one_ready(found: SnapshotRecord) -> tuple[Ready, Begun | None]:
        return await begin_one(place, found, options, get_ready)

    await learn_mounts(place, options.mounts)
    since_s = place.clock.monotonic_s()
    # One alone is begun while it is prepared; of many, the start of one overlaps with those of others anyway.
    ready, begun = await on_mountable(place, record, get_many_ready if n > 1 else get_one_ready)
    return await _start_all(place, ready, width, on_child, begun, since_s)


def _prepare(place: Place, record: SnapshotRecord, options: StartOptions, seeds: Sequence[int]) -> Ready:
    """Take leases and make directories for all children, in one go. Blocking."""
    many: list[SandboxFacts] = []
    network = None
    for index, seed in enumerate(seeds):
        named = options if options.name is None else replace(options, name=f"{options.name}-{index}")
        facts, network = with_network(make_facts(place, record, named, index=index, seed=seed), named)
        many.append(facts)
    prepare(place, many)
    return many, network


async def _start_all(
    place: Place,
    ready: Ready,
    width: int,
    on_child: Callable[[int, Live | Exception], Awaitable[None] | None] | None,
    first: Begun | None,
    since_s: float,
) -> list[Live | Exception]:
    many, network = ready
    results: list[Live | Exception | None] = [None] * len(many)
    waiting = iter(range(len(many)))
    taken: set[int] = set()

    async def take_turns() -> None:
        for index in waiting:
            taken.add(index)
            child: Live | Exception
            try:
                child = await start_prepared(place, many[index], network, first, since_s=since_s)
            except Exception as error:  # one child's failure is its own result, whatever it was
                child = error
            results[index] = child
            if on_child is not None:
                called = on_child(index, child)
                if called is not None:
                    await called

    renewing = asyncio.ensure_future(renew(place, many, taken)) if len(many) > width else None
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(width, len(many))):
                group.create_task(take_turns())
    except BaseException:
        await asyncio.shield(_undo(place, many, results, taken))
        raise
    finally:
        if renewing is not None:
            renewing.cancel()
    return [child for child in results if child is not None]


async def _undo(
    place: Place, many: list[SandboxFacts], results: list[Live | Exception | None], taken: set[int]
) -> None:
    await asyncio.gather(*(child.end() for child in results if isinstance(child, Live)), return_exceptions=True)
    for index, facts in enumerate(many):
        if index not in taken:
            await place.work(lambda facts=facts: place.dispose(facts))  # type: ignore[misc]  # binds the loop's value
    place.tidy_soon()
