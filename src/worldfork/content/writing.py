"""Writing a tree from its entries, so that a layer says exactly what they say."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from worldfork.content.entry import Entry
from worldfork.content.failures import naming
from worldfork.content.hashing import ContentHash
from worldfork.content.held import DIRECTORY, Held, spare
from worldfork.content.mapped import value_outside
from worldfork.content.marks import mark, name_in_layer
from worldfork.content.share import Cloning
from worldfork.core.errors import ConfigError, Corrupt

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_REFUSALS = (errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP)
"""With which a file system or the kernel turns down an owner, a device or an attribute."""
_TYPES = {"c": stat.S_IFCHR, "b": stat.S_IFBLK, "p": stat.S_IFIFO, "s": stat.S_IFSOCK}


class Writer:
    """Writes a layer, or any tree, from its entries in canonical order.

    Works by descriptors of directories that it has made itself, so that no entry can lead out of `target`.

    Args:
        target: the directory to make; its parent exists and is trusted.
        form: "trusted" or "user": what the layer's overlay reads, and how owners inside are kept.
        checked: whether to compare the bytes of contents that come as chunks with the entry's `content`.
        made_here: whether the entries are of layers of this very form and machine, so that no attribute is refused
            unless the kernel does.
    Raises:
        OutOfSpace, StoreError: the target cannot be made.
    """

    def __init__(self, target: Path, form: str, *, checked: bool = False, made_here: bool = False) -> None:
        self._form = form
        self._foreign = ("trusted.", "security.") if form == "user" and not made_here else ()
        self._checked = checked
        self._is_root = os.geteuid() == 0
        self._owner = (os.geteuid(), os.getegid())
        self._cloning = Cloning()
        self._open: list[_Made] = []
        self._later: list[Entry] = []
        """Directories that their owner is to be closed out of, while names in them may still be needed for links: those
        in a directory before it."""
        with naming("", "made"):
            os.mkdir(target, 0o700)
            self._root = os.open(target, DIRECTORY)
            if os.fstat(self._root).st_mode & stat.S_ISGID:  # as the directory around it, whose group it has
                os.fchown(self._root, -1, self._owner[1])
                os.fchmod(self._root, 0o700)
            for name in os.listxattr(self._root):
                if name.startswith("system.posix_acl_"):  # inherited from the directory around the tree
                    os.removexattr(self._root, name)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, entry: Entry, content: Iterable[bytes | int] | int | None = None) -> None:
        """Write one path.

        Args:
            entry: what to write. The first is the root; a directory comes before what is in it, and no path comes
                after its directory has been left. Whether it has a `link` decides if `content` is needed.
            content: of a file: a descriptor to copy from, or chunks: bytes, or a number of zeros to leave as a hole.
                Nothing where it is empty.
        Raises:
            ConfigError: the order or a name is wrong, or the form cannot carry it, and which; `path` is a field.
            Corrupt: the content is not what the entry says.
            OutOfSpace, StoreError: it cannot be written.
        """
        with naming(entry.path, "written"):
            if not self._open:
                if entry.path or entry.kind != "d":
                    raise self._refused(entry, "a tree begins with its root")
                self._open.append(_Made(os.dup(self._root), entry))
                return
            name = self._enter_parent(entry)
            above = self._open[-1].fd
            if entry.kind == "w":
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=above)
                self._open[-1].deletes = True
            elif entry.link and entry.kind != "d":
                self._link(entry, name, above)
            elif entry.kind == "d":
                os.mkdir(name, 0o700, dir_fd=above)
                self._open.append(_Made(os.open(name, DIRECTORY, dir_fd=above), entry))
                spare(self._open)
            elif entry.kind == "f":
                self._write_file(entry, name, above, content)
            else:
                self._write_special(entry, name, above)

    def finish(self) -> None:
        """End the tree: directories get their times and modes.

        Raises:
            ConfigError, OutOfSpace, StoreError: as for `add`; also when nothing was added.
        """
        if not self._open:
            raise ConfigError("a tree has at least a root")
        while self._open:
            self._leave()
        for entry in self._later:
            with naming(entry.path, "written"):
                fd = self._reach(entry, entry.path)
                try:
                    os.fchmod(fd, entry.mode)
                finally:
                    os.close(fd)
        self._later.clear()
        self.close()

    def close(self) -> None:
        """Let go of everything. Idempotent; without `finish` the tree stays as it is, unfinished."""
        while self._open:
            self._open.pop().let_go()
        if self._root >= 0:
            os.close(self._root)
        self._root = -1

    def _enter_parent(self, entry: Entry) -> str:
        """Leave directories until the one of this entry is at hand; return the entry's own name."""
        parent, _, name = entry.path.rpartition("/")
        if name in ("", ".", "..") or "\0" in name or entry.path.startswith("/"):
            raise self._refused(entry, "its name is none")
        while self._open[-1].entry.path != parent:
            if len(self._open) == 1:
                raise self._refused(entry, "its directory has not been written, or has been left")
            self._leave()
        return name

    def _leave(self) -> None:
        made = self._open.pop()
        try:
            with naming(made.entry.path, "written"):
                self._dress_directory(made)
                if self._open:
                    self._open[-1].find_again(made.fd)
        finally:
            made.let_go()

    def _dress_directory(self, made: _Made) -> None:
        entry, fd = made.entry, made.fd
        self._own(entry, fd)
        self._set_xattrs(entry, fd)
        if entry.opaque:
            os.setxattr(fd, mark("opaque", self._form), b"y")
        if made.deletes:
            # By this mark the overlay looks for deletions also where nothing lies below, instead of listing them.
            os.setxattr(fd, mark("origin", self._form), b"")
        if entry.redirect:
            if self._form != "trusted":
                raise self._refused(entry, f"it goes on in {entry.redirect}, which the form {self._form} cannot say")
            os.setxattr(fd, mark("redirect", self._form), os.fsencode(entry.redirect))
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        if self._is_root or entry.mode & 0o700 == 0o700:
            os.fchmod(fd, entry.mode)
        else:
            self._later.append(entry)

    def _write_file(self, entry: Entry, name: str, above: int, content: Iterable[bytes | int] | int | None) -> None:
        fd = os.open(name, _CREATE, 0o600, dir_fd=above)
        try:
            if isinstance(content, int):
                info = os.fstat(content)
                self._expect(entry, "size_bytes", entry.size_bytes, info.st_size)
                self._cloning.copy(content, fd, info.st_size, sparse=info.st_blocks * 512 < info.st_size)
            else:
                self._write_chunks(entry, fd, content or ())
            self._own(entry, fd)
            self._set_xattrs(entry, fd)
            os.fchmod(fd, entry.mode)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)

    def _write_chunks(self, entry: Entry, fd: int, content: Iterable[bytes | int]) -> None:
        found = ContentHash(entry.size_bytes) if self._checked and entry.content else None
        size = 0
        ends_with_hole = False
        for chunk in content:
            ends_with_hole = isinstance(chunk, int)
            if isinstance(chunk, int):
                size += chunk
                if found is not None and size <= entry.size_bytes:
                    found.zeros(chunk)
                continue
            rest = memoryview(chunk)
            if found is not None:
                found.update(rest)
            while rest:
                done = os.pwrite(fd, rest, size)
                rest = rest[done:]
                size += done
            if size > entry.size_bytes:
                break
        self._expect(entry, "size_bytes", entry.size_bytes, size)
        if ends_with_hole:
            os.ftruncate(fd, size)
        if found is not None:
            self._expect(entry, "content", entry.content, found.hexdigest())

    def _write_special(self, entry: Entry, name: str, above: int) -> None:
        if entry.kind == "l":
            os.symlink(entry.target, name, dir_fd=above)
        elif entry.kind in _TYPES:
            try:
                os.mknod(name, _TYPES[entry.kind] | 0o600, os.makedev(*entry.device), dir_fd=above)
            except PermissionError as error:
                raise self._refused(entry, "it is a device") from error
        else:
            raise self._refused(entry, f"{entry.kind!r} is no kind of file")
        # No call sets an attribute by a name in a directory, and opening it is out of the question.
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            self._own(entry, name, above)
            self._set_xattrs(entry, f"/proc/self/fd/{fd}")
            if entry.kind != "l":
                os.chmod(f"/proc/self/fd/{fd}", entry.mode)
        finally:
            os.close(fd)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=above, follow_symlinks=False)

    def _link(self, entry: Entry, name: str, above: int) -> None:
        parent, _, first = entry.link.rpartition("/")
        directory = self._reach(entry, parent)
        try:
            os.link(first, name, src_dir_fd=directory, dst_dir_fd=above, follow_symlinks=False)
        except FileNotFoundError as error:
            raise self._refused(entry, f"it is a link to {entry.link}, which is not there") from error
        finally:
            os.close(directory)

    def _reach(self, entry: Entry, directory: str) -> int:
        """Open a directory of the tree, for an entry that needs it."""
        fd = os.dup(self._root)
        for name in directory.split("/") if directory else []:
            if name in ("", ".", ".."):
                os.close(fd)
                raise self._refused(entry, f"{directory} leads elsewhere")
            try:
                below = os.open(name, DIRECTORY, dir_fd=fd)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise self._refused(entry, f"there is no directory {directory}") from error
            finally:
                os.close(fd)
            fd = below
        return fd

    def _own(self, entry: Entry, where: int | str, above: int | None = None) -> None:
        if not self._is_root:
            if (entry.uid, entry.gid) != (0, 0):
                raise self._refused(entry, f"it belongs to {entry.uid}:{entry.gid}, and an ordinary user has one owner")
            return
        try:
            if isinstance(where, int):
                os.chown(where, entry.uid, entry.gid)
            else:
                os.chown(where, entry.uid, entry.gid, dir_fd=above, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            raise self._refused(entry, f"it belongs to {entry.uid}:{entry.gid}, who cannot be here") from error

    def _set_xattrs(self, entry: Entry, where: int | str) -> None:
        for name, value in entry.xattrs:
            if name.startswith(self._foreign):
                raise self._refused(entry, f"it has the attribute {name}")
            try:
                stored = value if self._is_root else value_outside(name, value, *self._owner)
                os.setxattr(where, name_in_layer(name, self._form), stored)
            except LookupError as error:
                raise self._refused(entry, f"its attribute {name} cannot be here: {error}") from error
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                raise self._refused(entry, f"it has the attribute {name}") from error

    def _refused(self, entry: Entry, why: str) -> ConfigError:
        return ConfigError(
            f"{entry.path!r} cannot be a part of a layer of the form {self._form}: {why}", path=entry.path
        )

    def _expect(self, entry: Entry, what: str, expected: object, actual: object) -> None:
        if expected != actual:
            raise Corrupt(
                f"the {what} of {entry.path!r} is {actual}, not {expected}",
                path=entry.path,
                expected=expected,
                actual=actual,
            )


class _Made(Held):
    """A directory that is being filled."""

    def __init__(self, fd: int, entry: Entry) -> None:
        super().__init__(fd)
        self.entry = entry
        self.deletes = False
        """Whether a whiteout is in it."""
