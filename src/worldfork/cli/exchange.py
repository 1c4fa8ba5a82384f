"""The verbs that move snapshots between homes: export, import, push, pull."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from worldfork.cli.boundary import OK, PARTIAL, exit_code, use_id_range, verb
from worldfork.cli.lookup import open_store, snapshot_id_of
from worldfork.cli.printing import note, print_error, print_json, print_line, progress
from worldfork.cli.sandboxes import AsJson
from worldfork.core.errors import ConfigError, NotFound, WorldforkError
from worldfork.core.settings import load_settings
from worldfork.exchange.arrival import import_snapshot
from worldfork.exchange.departure import export_snapshot
from worldfork.exchange.exchange import PushReport
from worldfork.exchange.exchange import pull as pull_snapshots
from worldfork.exchange.exchange import push as push_snapshots
from worldfork.lineage.snapshots import snapshot_info
from worldfork.sandbox.namespace import natural_form
from worldfork.store.failures import typed

_STREAM = "-"
_RemoteName = Annotated[str, typer.Argument(metavar="REMOTE", help="A directory, or s3://bucket/prefix.")]


@verb
def export(
    snapshot: Annotated[str, typer.Argument(metavar="SNAP", help="Id or name of a snapshot.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to write the archive; - is standard output.")],
    as_json: AsJson = False,
) -> None:
    """Write a snapshot, with all that it needs, into one file; print the digest of that."""
    use_id_range()
    if file == _STREAM and as_json:
        raise ConfigError("standard output carries the archive", remedy="give a file, or leave out --json")
    with progress("exporting", quiet=as_json or file == _STREAM), open_store() as store:
        snapshot_id = snapshot_id_of(store, snapshot)
        with _target(file) as out:
            exported = export_snapshot(store, snapshot_id, out)
    for text in exported.notes:
        note(f"worldfork: {text}")
    if as_json:
        print_json(
            {
                "snapshot_id": exported.snapshot_id,
                "file": file,
                "digest": exported.digest,
                "layers": exported.layers,
                "logical_bytes": exported.logical_bytes,
            }
        )
    elif file != _STREAM:
        print_line(exported.digest)


@verb
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="An archive that export wrote; - is standard input.")],
    as_json: AsJson = False,
) -> None:
    """Take a snapshot out of an archive, under the id that it has; print that once it is safe on the disk."""
    use_id_range()
    with progress("importing", quiet=as_json), open_store() as store, _source(file) as source:
        record = import_snapshot(store, source, _form())
    if as_json:
        print_json(snapshot_info(record).to_json())
    else:
        print_line(record.snapshot_id)


@verb
def push(
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAP...", help="Ids or names of snapshots.")],
    remote: _RemoteName,
    as_json: AsJson = False,
) -> int:
    """Copy snapshots to a directory or an S3 store, which gets only the layers that it lacks."""
    use_id_range()
    whole = PushReport()
    with open_store() as store:

        def one(text: str) -> None:
            done = push_snapshots(store, [snapshot_id_of(store, text)], remote)
            for snapshot_id in done.snapshots:
                _tell(snapshot_id, as_json=as_json)
            for words in done.notes:
                note(f"worldfork: {words}")
            whole.snapshots += done.snapshots
            whole.sent += done.sent
            whole.there += [digest for digest in done.there if digest not in whole.sent and digest not in whole.there]

        code = _each(snapshots, one, "pushing", as_json=as_json)
    if as_json:
        print_json({"snapshots": whole.snapshots, "layers_sent": whole.sent, "layers_there": whole.there})
    return code


@verb
def pull(
    remote: _RemoteName,
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAP...", help="Ids of snapshots.")],
    as_json: AsJson = False,
) -> int:
    """Fetch snapshots from a directory or an S3 store: only the layers that are not here."""
    use_id_range()
    found: list[dict[str, Any]] = []
    with open_store() as store:

        def one(text: str) -> None:
            for record in pull_snapshots(store, [text], remote, _form()):
                _tell(record.snapshot_id, as_json=as_json)
                found.append(snapshot_info(record).to_json())

        code = _each(snapshots, one, "pulling", as_json=as_json)
    if as_json:
        print_json(found)
    return code


def _tell(snapshot_id: str, *, as_json: bool) -> None:
    if not as_json:
        print_line(snapshot_id)


def _each(names: list[str], one: Callable[[str], None], doing: str, *, as_json: bool) -> int:
    """Do it for each; one that fails does not keep the rest. Return the exit code for all."""
    errors: list[WorldforkError] = []
    with progress(doing, total=len(names), quiet=as_json) as steps:
        for name in names:
            try:
                one(name)
            except WorldforkError as error:
                print_error(error, as_json=as_json)
                errors.append(error)
            steps.advance()
    if not errors:
        return OK
    return PARTIAL if len(errors) < len(names) else exit_code(errors[0])


def _form() -> str:
    """Return the form of layers that sandboxes of this process can stand on."""
    form = load_settings().form
    return form if form != "auto" else natural_form()


@contextmanager
def _source(file: str) -> Iterator[BinaryIO]:
    if file == _STREAM:
        if os.isatty(0):
            raise ConfigError("standard input is a terminal", remedy="give a file, or pipe an archive in")
        with open(0, "rb", buffering=0, closefd=False) as stream:
            yield stream
        return
    with typed(f"{file} cannot be read"):
        try:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFound(f"there is no file {file}", path=file) from error
    with open(fd, "rb", buffering=0) as archive:
        yield archive


@contextmanager
def _target(file: str) -> Iterator[BinaryIO]:
    """Give what to write to; a file has its name only once it is whole, and on disk."""
    if file == _STREAM:
        if os.isatty(1):
            raise ConfigError("an archive is nothing for a terminal", remedy="give a file, or pipe it on")
        with open(1, "wb", buffering=0, closefd=False) as stream:
            yield stream
        return
    path = Path(file)
    with typed(f"{file} cannot be written"):
        if path.exists() and not path.is_file():
            with open(path, "wb", buffering=0) as special:  # a FIFO or a device is there for whoever reads it
                yield special
            return
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with open(draft, "xb", buffering=0) as archive:
                yield archive
                os.fsync(archive.fileno())
            draft.replace(path)
            directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        finally:
            with suppress(FileNotFoundError):
                draft.unlink()
