"""From a `WorldSource` to a snapshot: each world is built once per home, and known by what it is made of."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from worldfork.core.errors import ConfigError, PathError, SandboxError
from worldfork.core.ids import content_id
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.place import place
from worldfork.lineage.snapshots import SnapshotInfo
from worldfork.records.origin import Origin, WorldSource
from worldfork.records.task import TASK_DIRECTORY
from worldfork.worlds.git import exported, tree_of
from worldfork.worlds.sdist import fetch_sdist
from worldfork.worlds.world import async_world

DEFAULT_DEPENDENCIES = ("pytest", "pytest-timeout")
"""What a world gets whose source names no pytest of its own; a snapshot is taken as it is."""

BUILD_MEMORY_MB = 4096
"""Of the sandbox that builds, MiB."""

MAX_FILES = 500_000
"""Of a directory of this machine that becomes a world."""

_FORMAT = "1"
"""Part of every key; another one when what a build does with the same source changes."""


async def build_world(source: WorldSource) -> SnapshotInfo:
    """Return the world of a source, built now if this home does not have it yet.

    Files of a git commit, a source distribution or a directory are laid down first; then `dependencies` are installed
    by pip, then the `commands` run, then `without` is removed. It all happens in a sandbox on this machine's userland,
    with the host's network where a package is fetched or commands run; rollouts of the world have none.

    Raises:
        ConfigError: the source names what is not there.
        NotFound: its snapshot is not there.
        SandboxError: a step of the build failed; the message says which and what it printed.
    """
    ground = await ground_of(source.origin)
    dependencies = _dependencies(source, is_taken_as_it_is=bool(source.origin.snapshot))
    if ground is not None and not (dependencies or source.commands or source.without):
        return ground
    recipe = [list(dependencies), [list(command) for command in source.commands], list(source.without)]
    key = _key("world", ground.snapshot_id if ground else "", recipe)

    async def build(sandbox: AsyncSandbox) -> None:
        async with _in_time(source.build_wall_s):
            await sandbox.make_directory(TASK_DIRECTORY)
            await _install(sandbox, dependencies)
            for command in source.commands:
                await _step(sandbox, command)
            await _remove(sandbox, source.without)

    return await _built(key, build, ground, network="host" if dependencies or source.commands else "none")


async def ground_of(origin: Origin) -> SnapshotInfo | None:
    """Return a snapshot with the files of an origin in `TASK_DIRECTORY` and nothing else added; None for no origin.

    A snapshot is the one that it is.

    Raises:
        ConfigError, NotFound, SandboxError: as `build_world`.
    """
    if origin.empty:
        return None
    here = await asyncio.get_running_loop().run_in_executor(None, place)
    if origin.snapshot:
        snapshot_id = await here.work(lambda: here.store.id_of(origin.snapshot))
        return await AsyncSandbox.get_snapshot(snapshot_id)
    if origin.package:
        key = _key("package", _normal(origin.package), origin.version, origin.sha256)
        return await _built(key, _fetching(origin), network="host")
    if origin.git:
        tree = await asyncio.to_thread(tree_of, origin.git)
        return await _built(_key("git", "as committed", tree), _exporting(origin.git))
    digest = await asyncio.to_thread(digest_of_directory, origin.directory)
    return await _built(_key("directory", digest), _uploading(origin.directory))


Build = Callable[[AsyncSandbox], Awaitable[None]]


async def _built(key: str, build: Build, ground: SnapshotInfo | None = None, *, network: str = "none") -> SnapshotInfo:
    below = {} if ground is None else {"snapshot_id": ground.snapshot_id}
    return await async_world(key, build, network=network, memory_mb=BUILD_MEMORY_MB, **below)


def _fetching(origin: Origin) -> Build:
    async def build(sandbox: AsyncSandbox) -> None:
        await sandbox.make_directory(TASK_DIRECTORY)
        await fetch_sdist(sandbox, origin, TASK_DIRECTORY)

    return build


def _exporting(git: str) -> Build:
    async def build(sandbox: AsyncSandbox) -> None:
        await sandbox.make_directory(TASK_DIRECTORY)
        stack = contextlib.ExitStack()
        exporting = asyncio.create_task(asyncio.to_thread(stack.enter_context, exported(git)))
        try:
            await sandbox.upload_directory(await asyncio.shield(exporting), TASK_DIRECTORY)
        finally:
            await asyncio.shield(_cleared(stack, exporting))

    return build


async def _cleared(stack: contextlib.ExitStack, exporting: asyncio.Task[Path]) -> None:
    """Remove what was exported. What is given up on the way there is exported to its end all the same."""
    await asyncio.wait([exporting])
    await asyncio.to_thread(stack.close)
    if not exporting.cancelled():
        # Nobody may have asked for it.
        exporting.exception()


def _uploading(directory: str) -> Build:
    async def build(sandbox: AsyncSandbox) -> None:
        await sandbox.make_directory(TASK_DIRECTORY)
        await sandbox.upload_directory(directory, TASK_DIRECTORY)

    return build


def _dependencies(source: WorldSource, *, is_taken_as_it_is: bool) -> tuple[str, ...]:
    for each in source.dependencies:
        if each.startswith("-"):
            raise ConfigError(f"{each!r} is an option of pip, not a requirement", field="world.dependencies")
    if is_taken_as_it_is or any(_names(each) == "pytest" for each in source.dependencies):
        return source.dependencies
    return (*source.dependencies, *DEFAULT_DEPENDENCIES)


def _names(requirement: str) -> str:
    found = re.match(r"\s*([A-Za-z0-9._-]+)", requirement)
    return _normal(found[1]) if found else ""


def _normal(package: str) -> str:
    """Return a package's name as registries compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


async def _install(sandbox: AsyncSandbox, dependencies: Sequence[str]) -> None:
    if dependencies:
        pip = ("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
        await _step(sandbox, (*pip, *dependencies), remedy="the registry must be in reach, and have these versions")


async def _step(sandbox: AsyncSandbox, command: Sequence[str], remedy: str = "") -> None:
    result = await sandbox.run(command[0], command[1:], working_dir=TASK_DIRECTORY)
    if not result.ok:
        words = (result.stderr.strip() or result.stdout.strip())[-1000:]
        raise SandboxError(
            f"the world could not be built: `{' '.join(command)[:300]}` ended as {result.reason.value} with "
            f"{result.exit_code}: {words or 'no output'}",
            remedy=remedy or "each of world.commands must end with 0 in a sandbox on this machine's userland",
            command=tuple(command),
            output=words,
        )


async def _remove(sandbox: AsyncSandbox, paths: Sequence[str]) -> None:
    for path in paths:
        try:
            await sandbox.delete_file(f"{TASK_DIRECTORY}/{path}", recursive=True)
        except PathError as error:
            raise ConfigError(
                f"world.without names {path!r}, which is not in the world", field="world.without"
            ) from error


@contextlib.asynccontextmanager
async def _in_time(wall_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(wall_s):
            yield
    except TimeoutError as error:
        raise SandboxError(
            f"the world was not built within {wall_s:g} s", remedy="raise world.build_wall_s", build_wall_s=wall_s
        ) from error


def digest_of_directory(path: str) -> str:
    """Return 64 hex digits over what a directory of this machine holds: paths, kinds, modes, contents. Blocking.

    Raises:
        ConfigError: there is no such directory, it cannot be read, or it holds more than `MAX_FILES` entries.
    """
    top = Path(path)
    if not top.is_dir():
        raise ConfigError(f"there is no directory {path}", field="origin.directory")
    whole = hashlib.sha256()
    try:
        for count, (inside, row) in enumerate(_rows(top), start=1):
            if count > MAX_FILES:
                raise ConfigError(f"{path} holds more than {MAX_FILES} entries", field="origin.directory")
            whole.update(content_id(os.fsencode(inside), row).encode())
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: {error.strerror}", field="origin.directory") from error
    return whole.hexdigest()


def _rows(top: Path) -> Iterator[tuple[str, bytes]]:
    waiting = [""]
    while waiting:
        directory = waiting.pop()
        with os.scandir(top / directory) as entries:
            ordered = sorted(entries, key=lambda entry: os.fsencode(entry.name))
        for entry in ordered:
            inside = f"{directory}/{entry.name}".lstrip("/")
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                waiting.append(inside)
                yield inside, b"%o" % mode
            elif stat.S_ISLNK(mode):
                yield inside, b"%o " % mode + os.fsencode(os.readlink(entry.path))
            elif stat.S_ISREG(mode):
                with open(entry.path, "rb") as file:
                    yield inside, b"%o " % mode + hashlib.file_digest(file, "sha256").digest()


def _key(kind: str, *parts: object) -> str:
    text = json.dumps([_FORMAT, kind, *parts], sort_keys=True, ensure_ascii=True)
    return f"{kind}-{content_id(text.encode('ascii'))[:32]}"
