"""Writing one layer from an upper: the paths that it shall hold, each with all that belongs to it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections import defaultdict
from collections.abc import Iterable

from worldfork.content.marks import is_tie, mark
from worldfork.core.errors import NotCapturable
from worldfork.lineage.upper import make_directory

_FICLONE = 0x40049409
_NO_CLONE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM)
_CHUNK_BYTES = 16 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NOATIME | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Copier:
    """Copies paths of `upper` into `target`, which it makes.

    Args:
        upper, target: directories.
        form: whose marks the overlay reads.
        modes: true modes of paths that were opened for the copy.
        merging: directories that stand over their own last copy and add to it.
        replacing: directories that hide whatever the last copy has in their place.
    """

    def __init__(
        self, upper: str, target: str, form: str, modes: dict[str, int], merging: set[str], replacing: set[str]
    ) -> None:
        self.size_bytes = 0
        self._upper = upper
        self._target = target
        self._form = form
        self._modes = modes
        self._merging = merging
        self._replacing = replacing
        self._links: dict[int, str] = {}
        self._chowns = os.geteuid() == 0
        self._clones = True

    def run(self, paths: Iterable[str], gone: Iterable[str]) -> None:
        """Write the layer.

        Args:
            paths: what to copy, parents first, from the root (an empty path) on.
            gone: where to put whiteouts; their directories are among `paths`.
        Raises:
            NotCapturable: an entry is of a kind that cannot be copied.
        """
        below: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            if path:
                below[os.path.dirname(path)].append(os.path.basename(path))
        missing: dict[str, list[str]] = defaultdict(list)
        for path in gone:
            missing[os.path.dirname(path)].append(os.path.basename(path))
        make_directory(self._target, 0o700)
        order = [""]
        for directory in order:  # grows meanwhile
            order += self._fill(directory, below[directory], missing[directory])
        # Last, for what is written into a directory changes its time, and inherits its default ACL.
        for directory in reversed(order):
            self._finish(directory)

    def _fill(self, directory: str, names: list[str], missing: list[str]) -> list[str]:
        """Write what a directory holds; returns the directories in it, empty so far."""
        directories = []
        source = os.open(f"{self._upper}/{directory}", _DIRECTORY)
        try:
            target = os.open(f"{self._target}/{directory}", _DIRECTORY)
            try:
                for name in names:
                    path = f"{directory}/{name}" if directory else name
                    info = os.stat(name, dir_fd=source, follow_symlinks=False)
                    if stat.S_ISDIR(info.st_mode):
                        os.mkdir(name, 0o700, dir_fd=target)
                        directories.append(path)
                    elif info.st_nlink < 2 or not self._link(path, name, info, target):
                        self._write(path, name, info, source, target)
                for name in missing:
                    os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
            finally:
                os.close(target)
        finally:
            os.close(source)
        return directories

    def _link(self, path: str, name: str, info: os.stat_result, target: int) -> bool:
        """Make a further name of a file that was written; False if this is its first."""
        first = self._links.setdefault(info.st_ino, path)
        if first == path:
            return False
        os.link(f"{self._target}/{first}", name, dst_dir_fd=target, follow_symlinks=False)
        return True

    def _write(self, path: str, name: str, info: os.stat_result, source: int, target: int) -> None:
        if stat.S_ISREG(info.st_mode):
            self._write_file(path, name, info, source, target)
            return
        if stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif _is_whiteout(info):
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
            return
        elif stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode):
            os.mknod(name, stat.S_IFMT(info.st_mode) | 0o600, dir_fd=target)
        else:
            raise NotCapturable(f"a device file cannot be captured: {path}", what=path, why="a device")
        full = f"{self._target}/{path}"
        if self._chowns:
            os.chown(full, info.st_uid, info.st_gid, follow_symlinks=False)
        self._copy_xattrs(path, f"{self._upper}/{path}", full)
        if not stat.S_ISLNK(info.st_mode):
            os.chmod(full, stat.S_IMODE(info.st_mode))
        os.utime(full, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)

    def _write_file(self, path: str, name: str, info: os.stat_result, source: int, target: int) -> None:
        reader = os.open(name, _READ, dir_fd=source)
        try:
            writer = os.open(name, _WRITE, 0o600, dir_fd=target)
            try:
                if info.st_size:
                    self._copy_content(reader, writer, info)
                if self._chowns:
                    os.fchown(writer, info.st_uid, info.st_gid)
                self._copy_xattrs(path, reader, writer)
                os.fchmod(writer, self._modes.get(path, stat.S_IMODE(info.st_mode)))
                os.utime(writer, ns=(info.st_atime_ns, info.st_mtime_ns))
            finally:
                os.close(writer)
        finally:
            os.close(reader)
        self.size_bytes += info.st_blocks * 512

    def _copy_content(self, reader: int, writer: int, info: os.stat_result) -> None:
        if self._clones:
            try:
                fcntl.ioctl(writer, _FICLONE, reader)
                return
            except OSError as error:
                if error.errno not in _NO_CLONE:
                    raise
                self._clones = error.errno == errno.EINVAL  # of this file alone
        if info.st_blocks * 512 < info.st_size:
            _copy_data(reader, writer, info.st_size)
        else:
            _copy_range(reader, writer, 0, info.st_size)

    def _finish(self, path: str) -> None:
        source, target = f"{self._upper}/{path}", f"{self._target}/{path}"
        info = os.lstat(source)
        if self._chowns:
            os.chown(target, info.st_uid, info.st_gid)
        self._copy_xattrs(path, source, target)
        opaque, redirect = mark("opaque", self._form), mark("redirect", self._form)
        if path in self._replacing:
            os.setxattr(target, opaque, b"y")
        elif path in self._merging:
            for name in {opaque, redirect}.intersection(os.listxattr(target)):
                os.removexattr(target, name)
        os.chmod(target, self._modes.get(path, stat.S_IMODE(info.st_mode)))
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))

    def _copy_xattrs(self, path: str, source: str | int, target: str | int) -> None:
        follow = isinstance(source, int)
        for name in os.listxattr(source, follow_symlinks=follow):
            if is_tie(name, self._form):
                continue
            try:
                os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=follow), follow_symlinks=follow)
            except PermissionError:
                raise NotCapturable(
                    f"{path} has the attribute {name}, which an ordinary user cannot copy",
                    remedy="end what runs in the sandbox first, or checkpoint with stop=True",
                    what=path,
                    why=name,
                ) from None


def _is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _copy_data(reader: int, writer: int, size: int) -> None:
    """Copy a file with holes: only what is between them."""
    offset = 0
    while offset < size:
        try:
            begin = os.lseek(reader, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        offset = os.lseek(reader, begin, os.SEEK_HOLE)
        _copy_range(reader, writer, begin, offset)
    os.ftruncate(writer, size)


def _copy_range(reader: int, writer: int, begin: int, end: int) -> None:
    while begin < end:
        done = os.copy_file_range(reader, writer, min(end - begin, _CHUNK_BYTES), begin, begin)
        if done == 0:
            raise OSError(errno.EIO, "a file became shorter while it was copied")
        begin += done
