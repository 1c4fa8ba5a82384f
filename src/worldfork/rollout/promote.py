"""Taking over what the winner of a group made: into a live sandbox, or into a directory of the host."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from worldfork.content.patches import PatchFile, apply_patch, parse_patch
from worldfork.content.patches.model import EXECUTABLE, LINK, MAX_FILE_BYTES, REGULAR
from worldfork.core.beneath import open_beneath
from worldfork.core.errors import ConfigError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.snapshots import SnapshotInfo
from worldfork.records.episode import Episode, ranked
from worldfork.store.failures import typed

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True)
class Promoted:
    """One file of a directory that a diff changes."""

    path: str
    how: str
    """`added`, `changed` or `removed`."""
    size_bytes: int
    """Of the file then; 0 of one that is removed."""


def best_episode(episodes: Iterable[Episode]) -> Episode:
    """Return the valid episode of the highest reward; of several, the one of the lowest index.

    Raises:
        ConfigError: none has a reward, or they are of several tasks.
    """
    valid = [each for each in episodes if each.reward is not None]
    if not valid:
        raise ConfigError("no episode has a reward", field="episodes")
    tasks = sorted({each.task_id for each in valid})
    if len(tasks) > 1:
        raise ConfigError(
            f"there are episodes of {len(tasks)} tasks, such as {tasks[0]!r}", remedy="choose one task", field="task"
        )
    return ranked(valid)[0]


def final_state(winner: Episode) -> str:
    """Return the snapshot of an episode's final state.

    Raises:
        ConfigError: it was not kept.
    """
    if winner.final_snapshot_id is None:
        raise ConfigError(
            f"the final state of {winner.task_id} #{winner.index} was not kept",
            remedy='run the group with keep="best"',
            field="final_snapshot_id",
        )
    return winner.final_snapshot_id


async def promote_into(sandbox: AsyncSandbox, winner: Episode) -> SnapshotInfo:
    """Make the winner's final state the disk of a live sandbox, which stays the one it is.

    Args:
        sandbox: with no processes in it; of the world that the winner started from.
        winner: an episode whose final state was kept.

    Returns:
        A snapshot of what the sandbox's disk was before, to go back by.

    Raises:
        ConfigError: the winner's final state was not kept, or stands on another base.
        NotFound: it is kept no more. Others: as `AsyncSandbox.adopt`.
    """
    return await sandbox.adopt(final_state(winner), label=f"before {winner.task_id} #{winner.index}"[:100])


def apply_to_directory(
    directory: str | Path, diff: bytes | str, *, dry_run: bool = False, moved: bool = False
) -> list[Promoted]:
    """Apply a unified diff to the files below a directory of the host: all of it, or nothing.

    No link is followed and no mount is crossed. New files get the permissions that this process gives new files; a
    changed one keeps its own but for executability.

    Args:
        directory: where the diff's paths begin; a repository's own files in `.git` are never touched.
        diff: as an episode's.
        dry_run: only tell what would change.
        moved: whether hunks may also be applied where their lines have moved to, see `apply_patch`.

    Returns:
        What changes, by path.

    Raises:
        ConfigError: it does not apply; `path` and `hunk` tell where. Nothing was changed.
        OutOfSpace, StoreError: the directory cannot be read or written. Unless a removal or a rename itself failed,
            nothing was changed.
    """
    patch = parse_patch(diff)
    with typed(f"the diff cannot be applied to {directory}"), _Tree(Path(directory)) as tree:
        changes = apply_patch(patch, tree.read, moved=moved)
        links = sorted(path for path, file in changes.items() if file is not None and file.is_link)
        if links:
            raise ConfigError(f"patch: {links[0]!r} becomes a link", field="patch", path=links[0])
        promoted = [
            Promoted(
                path,
                "removed" if file is None else "changed" if tree.read(path) else "added",
                0 if file is None else len(file.content),
            )
            for path, file in changes.items()
        ]
        tree.expect_room(changes)
        if not dry_run:
            tree.write(changes)
    return promoted


class _Tree:
    """The files below a directory, by descriptors, so that no link leads out of it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._fd = -1
        self._seen: dict[str, PatchFile | None] = {}
        self._directories: set[str] = set()
        """Those looked at as if they were files."""
        self._there: set[str] = set()
        """Directories that need not be made any more."""

    def __enter__(self) -> _Tree:
        try:
            self._fd = os.open(self._root, _DIRECTORY)
        except OSError as error:
            raise ConfigError(f"{self._root} is no directory: {error.strerror}", field="directory") from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, path: str) -> PatchFile | None:
        """Return what is at a path; remembered, so that what is written is what was looked at."""
        if path not in self._seen:
            self._seen[path] = self._look(path)
        return self._seen[path]

    def _look(self, path: str) -> PatchFile | None:
        above, _, name = path.rpartition("/")
        try:
            parent = open_beneath(self._fd, above or ".", os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise ConfigError(f"patch: {path!r} lies below a file or a link", field="patch", path=path) from None
            raise
        try:
            info = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):
                return PatchFile(os.fsencode(os.readlink(name, dir_fd=parent)), LINK)
            if stat.S_ISDIR(info.st_mode):
                self._directories.add(path)
                return None
            if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_FILE_BYTES:
                raise ConfigError(f"patch: {path!r} is no plain file, or too large", field="patch", path=path)
            with open(open_beneath(parent, name, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                return PatchFile(file.read(), EXECUTABLE if info.st_mode & 0o100 else REGULAR)
        except FileNotFoundError:
            return None
        finally:
            os.close(parent)

    def expect_room(self, changes: Mapping[str, PatchFile | None]) -> None:
        """Refuse a file where a directory is, unless the changes leave nothing of that.

        Raises:
            ConfigError: a directory stays in the way.
        """
        removed = {path for path, file in changes.items() if file is None}
        for path, file in changes.items():
            if file is not None and path in self._directories and not self._vanishes(path, removed):
                raise ConfigError(f"patch: {path!r} is a directory", field="patch", path=path)

    def _vanishes(self, directory: str, removed: Set[str]) -> bool:
        """Tell whether a directory is gone once these files are: it looks at no more entries than there are of them."""
        waiting = [directory]
        while waiting:
            above = waiting.pop()
            fd = open_beneath(self._fd, above, _DIRECTORY)
            try:
                with os.scandir(fd) as entries:
                    found = 0
                    for entry in entries:
                        found += 1
                        path = f"{above}/{entry.name}"
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(path)
                        elif path not in removed:
                            return False
            finally:
                os.close(fd)
            if not found:
                return False
        return True

    def write(self, changes: Mapping[str, PatchFile | None]) -> None:
        """Make the changes: everything is written beside its place first, then all is renamed."""
        made: list[str] = []
        parts: dict[str, str] = {}
        try:
            for path, file in changes.items():
                if file is not None:
                    parts[path] = f".{secrets.token_hex(8)}.part"
                    self._write_beside(path, parts[path], file, made)
            for path, file in changes.items():
                if file is None:
                    self._remove(path)
            for path, part in parts.items():
                with self._above(path) as above:
                    os.rename(part, path.rpartition("/")[2], src_dir_fd=above, dst_dir_fd=above)
        except BaseException:
            self._clear(parts, made)
            raise

    def _clear(self, parts: Mapping[str, str], made: Sequence[str]) -> None:
        """Remove what was written beside its place, and the directories that were made for it."""
        for path, part in parts.items():
            with contextlib.suppress(OSError), self._above(path) as above:
                os.unlink(part, dir_fd=above)
        for path in reversed(made):
            with contextlib.suppress(OSError), self._above(path) as above:
                os.rmdir(path.rpartition("/")[2], dir_fd=above)

    @contextlib.contextmanager
    def _above(self, path: str) -> Iterator[int]:
        """Open the directory of a path. One at a time: a patch may touch more of them than a process may have open."""
        fd = open_beneath(self._fd, path.rpartition("/")[0] or ".", _DIRECTORY)
        try:
            yield fd
        finally:
            os.close(fd)

    def _make_above(self, path: str, made: list[str]) -> None:
        """Make the directories of a path that are not there."""
        names = path.split("/")
        for depth in range(1, len(names)):
            directory = "/".join(names[:depth])
            if directory in self._there:
                continue
            with self._above(directory) as above:
                try:
                    os.mkdir(names[depth - 1], dir_fd=above)
                except FileExistsError:
                    pass
                else:
                    made.append(directory)
                    below = open_beneath(above, names[depth - 1], _DIRECTORY)
                    try:
                        _give(below, os.fstat(above))
                    finally:
                        os.close(below)
            self._there.add(directory)

    def _write_beside(self, path: str, part: str, file: PatchFile, made: list[str]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        executable = file.mode == EXECUTABLE
        self._make_above(path, made)
        with (
            self._above(path) as above,
            open(os.open(part, flags, 0o777 if executable else 0o666, dir_fd=above), "wb") as target,
        ):
            target.write(file.content)
            before = _regular(path.rpartition("/")[2], above)
            _give(target.fileno(), before or os.fstat(above))
            if before is not None:
                # Whom a program acts as is nothing that new content inherits.
                mode = stat.S_IMODE(before.st_mode) & 0o777
                # Who may read it may run it, as chmod's `+x` after a checkout.
                os.fchmod(target.fileno(), mode | (mode & 0o444) >> 2 if executable else mode & ~0o111)
            target.flush()
            os.fsync(target.fileno())

    def _remove(self, path: str) -> None:
        """Remove a file, and the directories that it leaves empty."""
        names = path.split("/")
        for depth in range(len(names), 0, -1):
            parent = open_beneath(self._fd, "/".join(names[: depth - 1]) or ".", _DIRECTORY)
            try:
                if depth == len(names):
                    os.unlink(names[-1], dir_fd=parent)
                else:
                    os.rmdir(names[depth - 1], dir_fd=parent)
            except OSError as error:
                if depth < len(names) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return
                raise
            finally:
                os.close(parent)


def _regular(name: str, above: int) -> os.stat_result | None:
    """Return what a regular file looks like; None for anything else: a link lets everybody do everything."""
    try:
        info = os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return info if stat.S_ISREG(info.st_mode) else None


def _give(fd: int, like: os.stat_result) -> None:
    """Let root leave to the owner of a directory what it makes there."""
    if os.geteuid() == 0:
        os.fchown(fd, like.st_uid, like.st_gid)
