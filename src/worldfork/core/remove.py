"""Removal of whole trees that cannot reach anything outside of them.

A sandbox's files are hostile: links that point at the host, directories nested deeper than any stack, directories
without permissions. And a mistake of ours must not be worse than a leak: where something is mounted inside the tree,
that place is refused and what is mounted there is left alone.

`python -m worldfork.core.remove DIRECTORY...` removes what `rm -r` may not, such as a home with files of other ids.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

from worldfork.core.beneath import open_beneath
from worldfork.core.errors import ConfigError, DriverUnavailable, StoreError

_DEEPEST = 32
_REPORTED = 20
_FOREIGN = (errno.EACCES, errno.EPERM)


def remove_tree(path: Path, *, dir_fd: int | None = None) -> None:
    """Remove `path` and all below it. A path that does not exist is fine.

    Never follows a link, never crosses onto another mount, opens up directories of our own that lack permissions,
    and goes on after a failure so that one bad entry does not keep the rest. What belongs to this user's range of ids
    is removed by a process that has them.

    Args:
        path: a directory, file or link; its parent is trusted.
        dir_fd: directory that a relative `path` starts from.
    Raises:
        ConfigError: the path has no last name, like `/` or `..`.
        StoreError: something is left. `failures` is a list of (path, errno), at most 20 of them. An errno of EXDEV or
            EBUSY means that something is mounted there.
    Source: openat2(2), RESOLVE_NO_XDEV.
    """
    if path.name in ("", ".."):
        raise ConfigError(f"{path} names no entry of a directory", path=str(path))
    try:
        parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    try:
        removal = _Removal(path)
        removal.run(parent)
    finally:
        os.close(parent)
    refused = any(number in _FOREIGN for number in removal.failures.values())
    remedy = _remove_mapped(path) if refused and dir_fd is None and os.geteuid() != 0 else ""
    if remedy is None:
        return
    for first, number in removal.failures.items():
        raise StoreError(
            f"{path} could not be removed wholly; the first obstacle: {first}: {os.strerror(number)}",
            remedy="something is mounted there; unmount it first" if number in (errno.EXDEV, errno.EBUSY) else remedy,
            failures=list(removal.failures.items()),
        )


def _remove_mapped(path: Path) -> str | None:
    """Remove what belongs to this user's range of ids; a remedy where there is none, else None."""
    from worldfork.core import mapped  # needed by few, and only now

    try:
        mapped.namespace()
    except DriverUnavailable as error:
        return f"it may hold files of a range of ids; then: {error.remedy}" if error.remedy else ""
    mapped.run(remove_tree, path.absolute())
    return None


class _Frame:
    """One directory that is being emptied."""

    def __init__(self, fd: int, name: str, path: str) -> None:
        self.fd = fd
        self.name = name
        self.path = path
        self.failed = False
        """Something in it stays."""
        self.changed = False
        """Worth another look: its entries changed under the scan, which may then have missed some."""
        self.entries = os.scandir(fd)

    def rewind(self) -> None:
        self.entries.close()
        os.lseek(self.fd, 0, os.SEEK_SET)
        self.changed = False
        self.entries = os.scandir(self.fd)

    def close(self) -> None:
        self.entries.close()
        os.close(self.fd)


class _Removal:
    """One walk. The stack of open directories is bounded, however deep the tree is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures: dict[str, int] = {}
        self._moved = 0

    def run(self, parent: int) -> None:
        name = self.path.name
        try:
            if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                self._empty([self._open(parent, name, str(self.path))], parent)
            else:
                os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._note(str(self.path), error)

    def _empty(self, stack: list[_Frame], parent: int) -> None:
        """Empty and remove the directories of `stack`, the deepest first."""
        try:
            while stack:
                frame = stack[-1]
                entry = next(frame.entries, None)
                if entry is not None:
                    below = self._take(frame, entry, stack)
                    if below is not None:
                        stack.append(below)
                elif self._finish(frame, stack[-2].fd if len(stack) > 1 else parent):
                    stack.pop().close()
                    if frame.failed and stack:
                        stack[-1].failed = True
        finally:
            for frame in stack:
                frame.close()

    def _take(self, frame: _Frame, entry: os.DirEntry[str], stack: list[_Frame]) -> _Frame | None:
        """Remove one entry, or open it if it is a directory."""
        try:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=frame.fd)
                frame.changed = True
            elif len(stack) < _DEEPEST:
                return self._open(frame.fd, entry.name, f"{frame.path}/{entry.name}")
            else:
                self._hoist(frame, entry.name, stack[0])
        except FileNotFoundError:
            pass
        except OSError as error:
            frame.failed = True
            self._note(f"{frame.path}/{entry.name}", error)
        return None

    def _hoist(self, frame: _Frame, name: str, root: _Frame) -> None:
        """Move a directory that lies too deep up to the root of the tree, which is scanned again for it."""
        _open_up(frame.fd, name)
        while True:
            self._moved += 1
            try:
                os.rename(name, f".hoisted-{os.getpid()}-{self._moved}", src_dir_fd=frame.fd, dst_dir_fd=root.fd)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            else:
                root.changed = True
                return

    def _finish(self, frame: _Frame, above: int) -> bool:
        """Remove the directory itself; False if it has to be scanned again."""
        try:
            os.rmdir(frame.name, dir_fd=above)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and frame.changed:
                frame.rewind()
                return False
            if not frame.failed:
                frame.failed = True
                self._note(frame.path, error)
        return True

    def _open(self, above: int, name: str, path: str) -> _Frame:
        try:
            fd = open_beneath(above, name, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            _open_up(above, name)
            fd = open_beneath(above, name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) & 0o700 != 0o700:
                _allow(fd)
            return _Frame(fd, name, path)
        except BaseException:
            os.close(fd)
            raise

    def _note(self, path: str, error: OSError) -> None:
        if len(self.failures) < _REPORTED:
            self.failures.setdefault(path, error.errno or errno.EIO)


def _open_up(above: int, name: str) -> None:
    """Give the owner all permissions on a directory that is not a link and not on another mount."""
    fd = open_beneath(above, name, os.O_PATH | os.O_DIRECTORY)
    try:
        # Neither fchmod nor chmod by name will do: one refuses O_PATH, the other follows links.
        os.chmod(f"/proc/self/fd/{fd}", 0o700)
    finally:
        os.close(fd)


def _allow(fd: int) -> None:
    try:
        os.fchmod(fd, 0o700)
    except PermissionError:
        pass  # somebody else's directory; the removals in it will tell


if __name__ == "__main__":
    # By its own name, under which another process finds it.
    from worldfork.core.remove import remove_tree as _remove_tree

    for _name in sys.argv[1:]:
        _remove_tree(Path(_name).absolute())
