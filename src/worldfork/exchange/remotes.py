"""Places outside of a home that snapshots are pushed to and pulled from: a directory, or a store that speaks S3.

Both hold the same names: `layers/<64 hex digits>.wfa`, an archive of one layer by its digest, and
`snapshots/<id>.json`. A name appears with its whole content or not at all, and never changes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from worldfork.content.blocks import Sink, Source
from worldfork.core.errors import ConfigError, NotFound, StoreError, WorldforkError
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.syscalls import sync_directory

_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?")
_PART_BYTES = 8 << 20
_AHEAD = 3  # parts that are being fetched at a time
_s3_process = 0
"""The process whose threads serve requests to S3: a child that it forks has none of them, and would wait for ever."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Remote(Protocol):
    """Named contents in another place."""

    @property
    def where(self) -> str:
        """How it is called, without any secret."""

    def has(self, name: str) -> bool:
        """Tell whether there is something of this name."""

    def reading(self, name: str) -> Any:
        """Give a context whose value is the content, as a `Source`; NotFound if there is none."""

    def create(self, name: str, fill: Callable[[Sink], object]) -> bool:
        """Add what `fill` writes under this name; False, and nothing changed, if somebody was first."""

    def make_lasting(self) -> None:
        """See that no name that is there is lost in a crash, whoever gave it."""


def open_remote(text: str, *, make: bool = False) -> Remote:
    """Return the remote that a text names: `s3://bucket/prefix` or a directory.

    Args:
        text: its address. Endpoint, region and credentials of S3 come from the usual AWS_* variables.
        make: whether to make the directory where it is missing.
    Raises:
        ConfigError: there is no such place, or the package for S3 is missing.
        StoreError: it cannot be used.
    """
    if text.startswith("s3://"):
        return S3Remote(text)
    if "://" in text:
        raise ConfigError(f"{text!r} is no remote", remedy="give a directory or s3://bucket/prefix")
    path = Path(text).absolute()
    with typed(f"{path} cannot be used"):
        if make:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.is_dir():
            raise ConfigError(f"there is no directory {path}", remedy="give a directory or s3://bucket/prefix")
        remote = DirectoryRemote(path)
        if make:
            remote.sweep()
        return remote


class DirectoryRemote:
    """A directory, which may lie on a disk that several machines share."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._drafts = root / "drafts"

    @property
    def where(self) -> str:
        """The directory."""
        return str(self._root)

    def has(self, name: str) -> bool:
        """Tell whether there is a file of this name."""
        with typed(f"{self._root} cannot be read"):
            return (self._root / name).is_file()

    @contextmanager
    def reading(self, name: str) -> Iterator[Source]:
        """Open the file of this name."""
        with typed(f"{name} in {self._root} cannot be read"):
            try:
                fd = _open_file(self._root / name)
            except FileNotFoundError as error:
                raise _missing(name, self.where) from error
            with open(fd, "rb", buffering=0) as file:
                yield _Whole(file)

    def create(self, name: str, fill: Callable[[Sink], object]) -> bool:
        """Write a temporary file, bring it to disk, and give it its name if that is free."""
        path = self._root / name
        with typed(f"{name} cannot be written to {self._root}"):
            for directory in (self._drafts, path.parent):
                directory.mkdir(mode=0o700, exist_ok=True)
            draft, file = _new_draft(self._drafts)
            with file:
                try:
                    fill(file)
                    fault("push:written")
                    os.fsync(file.fileno())
                    fault("push:synced")
                    is_first = _name(draft, path)
                    fault("push:named")
                    sync_directory(path.parent)
                    fault("push:lasting")
                    return is_first
                finally:
                    with suppress(FileNotFoundError):
                        draft.unlink()

    def make_lasting(self) -> None:
        """Bring the directories to disk: whoever named what is there may not have come to it."""
        with typed(f"{self._root} cannot be brought to disk"):
            for directory in (self._root / "layers", self._root / "snapshots", self._root):
                sync_directory(directory)

    def sweep(self) -> None:
        """Remove what died in the making."""
        if not self._drafts.is_dir():
            return
        for name in os.listdir(self._drafts):
            with suppress(OSError), open(_open_file(self._drafts / name), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(self._drafts / name)


def _new_draft(drafts: Path) -> tuple[Path, FileIO]:
    """Make a file whose lock says that somebody alive is at it."""
    while True:
        draft = drafts / secrets.token_hex(16)
        file = open(draft, "xb", buffering=0)  # noqa: SIM115 - it is the caller's
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            fault("push:begun")
            # Who cleared up between the two found nobody at it.
            if draft.exists():
                return draft, file
        except BaseException:
            file.close()
            raise
        file.close()


def _name(draft: Path, path: Path) -> bool:
    try:
        os.link(draft, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    # A file system without hard links: whoever is second replaces a whole content by an equal one.
    if path.exists():
        return False
    os.rename(draft, path)
    return True


def _open_file(path: Path) -> int:
    """Open what may be anything: a FIFO would wait for a writer, and a link would lead elsewhere."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no file")
    return fd


class _Whole:
    """A file as a source."""

    def __init__(self, file: Any) -> None:
        self._file: BinaryIO = file

    def read(self, size_bytes: int, /) -> bytes:
        return self._file.read(size_bytes)


class S3Remote:
    """A bucket, or what is below a prefix in it."""

    def __init__(self, url: str) -> None:
        if not _S3.fullmatch(url):
            raise ConfigError(f"{url!r} is no S3 address", remedy="give s3://bucket/prefix")
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError as error:
            raise ConfigError(
                "S3 needs the package obstore, which is not installed", remedy="pip install 'worldfork[s3]'"
            ) from error
        global _s3_process
        _s3_process = _s3_process or os.getpid()
        self.where = url.rstrip("/")
        """The address."""
        self._calls: Any = obstore
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        is_plain = endpoint.startswith("http:")
        with self._typed(url):
            self._store = S3Store.from_url(
                self.where,
                config={"endpoint": endpoint} if endpoint else None,
                # A part of a few MiB is what takes longest.
                client_options={"timeout": "120s", "connect_timeout": "10s", "allow_http": is_plain},
                retry_config={"max_retries": 4},
            )

    def has(self, name: str) -> bool:
        """Tell whether there is an object of this name."""
        with self._typed(name):
            try:
                self._calls.head(self._store, name)
                return True
            except FileNotFoundError:
                return False

    @contextmanager
    def reading(self, name: str) -> Iterator[Source]:
        """Fetch the object of this name in parts, some ahead."""
        with self._typed(name):
            try:
                found = self._calls.head(self._store, name)
            except FileNotFoundError as error:
                raise _missing(name, self.where) from error
        with ThreadPoolExecutor(_AHEAD, "worldfork-fetch") as pool:
            parts = _Parts(lambda begin, end: self._part(name, found["e_tag"], begin, end), found["size"], pool)
            try:
                yield parts
            finally:
                parts.cancel()

    def _part(self, name: str, tag: str | None, begin: int, end: int) -> bytes:
        same = {"if_match": tag} if tag else {}
        with self._typed(name):
            try:
                return bytes(self._calls.get(self._store, name, options={"range": (begin, end), **same}).bytes())
            except FileNotFoundError as error:
                raise _missing(name, self.where) from error

    def create(self, name: str, fill: Callable[[Sink], object]) -> bool:
        """Write an object if there is none of this name; one that is large appears when its last part is there."""
        buffer = _Gathered()
        with self._typed(name):
            try:
                try:
                    fill(buffer)
                except _TooLarge:
                    return self._create_large(name, fill)
                fault("push:written")
                self._calls.put(self._store, name, buffer.content(), mode="create", use_multipart=False)
                fault("push:named")
            except self._calls.exceptions.AlreadyExistsError:
                return False
            except FileNotFoundError as error:
                raise ConfigError(f"there is no bucket for {self.where}", remedy="make the bucket first") from error
        return True

    def make_lasting(self) -> None:
        """Nothing to do: an object that can be seen is stored."""

    def _create_large(self, name: str, fill: Callable[[Sink], object]) -> bool:
        # There is no condition on an object in parts. Only layers are as large, and two of one name are equal.
        if self.has(name):
            return False
        with self._calls.open_writer(self._store, name, buffer_size=_PART_BYTES) as writer:
            fill(writer)
            fault("push:written")
        fault("push:named")
        return True

    @contextmanager
    def _typed(self, name: str) -> Iterator[None]:
        if _s3_process != os.getpid():
            raise StoreError(
                "this process was forked by one that has used S3, and cannot use it itself",
                remedy="start it anew, as multiprocessing does with 'spawn', or push and pull before the fork",
            )
        refused = (
            self._calls.exceptions.PermissionDeniedError,
            self._calls.exceptions.UnauthenticatedError,
        )
        try:
            yield
        except (WorldforkError, FileNotFoundError, self._calls.exceptions.AlreadyExistsError):
            raise
        except refused as error:
            raise StoreError(
                f"{self.where} refuses access to {name}",
                remedy="set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and, where needed, AWS_ENDPOINT_URL",
            ) from error
        except (self._calls.exceptions.BaseError, OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise StoreError(f"{name} at {self.where}: {reason}", remedy="try again") from error


class _TooLarge(Exception):
    """More than one request should carry."""


class _Gathered:
    """A sink that keeps what fits into one request."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes | memoryview, /) -> int:
        self._size += len(data)
        if self._size > 2 * _PART_BYTES:
            raise _TooLarge
        self._parts.append(bytes(data))
        return len(data)

    def content(self) -> bytes:
        return b"".join(self._parts)


class _Parts:
    """A source that fetches parts of an object ahead of what is read."""

    def __init__(self, fetch: Callable[[int, int], bytes], size_bytes: int, pool: ThreadPoolExecutor) -> None:
        self._fetch = fetch
        self._pool = pool
        self._ranges = iter([(at, min(at + _PART_BYTES, size_bytes)) for at in range(0, size_bytes, _PART_BYTES)])
        self._coming: deque[Future[bytes]] = deque()
        self._left = memoryview(b"")

    def read(self, size_bytes: int, /) -> bytes:
        if not self._left:
            while len(self._coming) < _AHEAD and (wanted := next(self._ranges, None)) is not None:
                self._coming.append(self._pool.submit(self._fetch, *wanted))
            if not self._coming:
                return b""
            self._left = memoryview(self._coming.popleft().result())
        part, self._left = self._left[:size_bytes], self._left[size_bytes:]
        return bytes(part)

    def cancel(self) -> None:
        for future in self._coming:
            future.cancel()


def _missing(name: str, where: str) -> NotFound:
    return NotFound(f"there is no {name} in {where}", name=name, remote=where)
