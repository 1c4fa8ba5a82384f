"""Files of a live sandbox: read, written, moved up and down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from worldfork.lineage.handle import Handle
from worldfork.records.sandbox import DirectoryEntry, ListDirectoryResponse
from worldfork.sandbox import download, files, upload
from worldfork.sandbox.files import lay
from worldfork.sandbox.replies import FileRecord


class Transfers(Handle):
    """The calls about files."""

    async def write_file(self, path: str, content: bytes | str, *, mode: int | None = None) -> None:
        """Write a regular file, with its parents where they are missing."""
        data = content.encode() if isinstance(content, str) else content
        await files.write_file(await self._live.connection(), path, data, mode=mode, **self._where(path))

    async def read_file(self, path: str, *, max_bytes: int = files.MAX_READ_BYTES) -> bytes:
        """Return a regular file's content.

        Raises:
            PathError: no such file, not a regular one, or larger than `max_bytes`.
        """
        return await files.read_file(await self._live.connection(), path, max_bytes=max_bytes, **self._where(path))

    async def lay_files(
        self, directory: str, files: Mapping[str, tuple[bytes, int]], *, removed: Iterable[str] = ()
    ) -> None:
        """Remove what is at some paths below a directory, then write regular files there: any number at once.

        No link below it is followed; what stands in a file's way, a link or a directory, gives way to it.

        Args:
            directory: must be there.
            files: path below it -> content and permission bits.
            removed: paths below it; nothing need be there.

        Raises:
            PathError: something could not be removed or written; what came before it stays.
        """
        await lay(await self._live.connection(), directory, files, removed=removed, **self._where(directory))

    async def upload_file(self, local_path: str | Path, path: str) -> None:
        """Copy a file of the host into the sandbox, with its mode."""
        await upload.upload_file(await self._live.connection(), Path(local_path), path, **self._where(path))

    async def download_file(self, path: str, local_path: str | Path) -> None:
        """Copy a file of the sandbox, of any size, to the host."""
        await download.download_file(await self._live.connection(), path, Path(local_path), **self._where(path))

    async def upload_directory(self, local_path: str | Path, path: str) -> None:
        """Copy a directory of the host into the sandbox; links stay links, modes are kept."""
        await upload.upload_tree(
            await self._live.connection(), local_path, self._full(path), user=self._live.facts.user
        )

    async def download_directory(self, path: str, local_path: str | Path) -> None:
        """Copy a directory of the sandbox to the host; nothing is written outside the target."""
        await download.download_tree(
            await self._live.connection(), self._full(path), local_path, user=self._live.facts.user
        )

    async def list_directory(self, path: str) -> ListDirectoryResponse:
        """Return a directory's entries, by name."""
        records = await files.list_directory(await self._live.connection(), path, **self._where(path))
        return ListDirectoryResponse(path, tuple(_entry(record) for record in records))

    async def stat_file(self, path: str, *, follow_links: bool = True) -> DirectoryEntry:
        """Return what is at a path; with `follow_links=False` a link itself.

        Raises:
            PathError: nothing is there.
        """
        return _entry(await files.stat(await self._live.connection(), path, follow=follow_links, **self._where(path)))

    async def make_directory(self, path: str) -> None:
        """Make a directory and its parents; one that exists is fine."""
        await files.make_directory(await self._live.connection(), path, **self._where(path))

    async def delete_file(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link, an empty directory or, with `recursive`, a whole one."""
        await files.delete(await self._live.connection(), path, recursive=recursive, **self._where(path))


def _entry(record: FileRecord) -> DirectoryEntry:
    return DirectoryEntry(
        name=record.name,
        is_dir=record.kind == "d",
        size=None if record.kind == "d" else record.size_bytes,
        modified_at=record.mtime_ns / 1e9,
        kind=record.kind,
        mode=record.mode & 0o7777,
        link_target=record.target or None,
    )
