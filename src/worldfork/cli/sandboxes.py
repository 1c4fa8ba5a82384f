"""The verbs for live sandboxes: create, ls, rm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from worldfork import Sandbox, SnapshotStore
from worldfork.cli.boundary import OK, PARTIAL, exit_code, verb
from worldfork.cli.printing import print_error, print_json, print_line, print_table, progress
from worldfork.cli.shapes import when
from worldfork.core.errors import ConfigError, WorldforkError

_LISTED = ("sandbox_id", "name", "status", "driver", "snapshot_id")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text; errors too.")]


def snapshot_id(text: str) -> str:
    """Return the id of the snapshot that an argument means: an id as it is, or a name."""
    return text if text.startswith("sn-") else SnapshotStore().find(text).snapshot_id


def key_values(pairs: list[str]) -> dict[str, str]:
    """Read `K=V` options.

    Raises:
        ConfigError: one has no `=` or no name.
    """
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise ConfigError(f"{pair!r} is not of the form NAME=VALUE", text=pair)
        found[name] = value
    return found


@verb
def create(
    base: Annotated[
        str | None,
        typer.Option(help="What it starts from: host, or dir:/path of a root file system. Default: WORLDFORK_BASE."),
    ] = None,
    snapshot: Annotated[str | None, typer.Option(help="Restore this snapshot, an id or a name.")] = None,
    name: Annotated[str | None, typer.Option(help="A name to find it by.")] = None,
    network: Annotated[
        str | None, typer.Option(help="none or host. Default: host from a base, none from a snapshot or for a machine.")
    ] = None,
    driver: Annotated[
        str | None, typer.Option(help="namespace, or microvm: a virtual machine. Default: WORLDFORK_DRIVER.")
    ] = None,
    cpus: Annotated[float | None, typer.Option(help="Processors, such as 1.5.")] = None,
    memory_mb: Annotated[int | None, typer.Option(help="Memory limit in MiB.")] = None,
    disk_mb: Annotated[int | None, typer.Option(help="Limit of what it may write, in MiB.")] = None,
    pids: Annotated[int | None, typer.Option(help="Limit of processes and threads.")] = None,
    timeout: Annotated[float | None, typer.Option(help="End it by itself after this many seconds.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE for every command.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="User of its commands.")] = None,
    working_dir: Annotated[str | None, typer.Option("--working-dir", "-w", help="Directory of its commands.")] = None,
    seed: Annotated[int | None, typer.Option(help="What it reads as WORLDFORK_SEED.")] = None,
    as_json: AsJson = False,
) -> None:
    """Start a sandbox that goes on after this command, and print its id."""
    options: dict[str, Any] = {
        "snapshot_id": None if snapshot is None else snapshot_id(snapshot),
        "name": name,
        "network": network,
        "driver": driver,
        "cpus": cpus,
        "memory_mb": memory_mb,
        "disk_mb": disk_mb,
        "pids": pids,
        "timeout_secs": timeout,
        "env": key_values(env or []) or None,
        "user": user,
        "working_dir": working_dir,
        "seed": seed,
    }
    if snapshot is None:
        options["base"] = base
    given = {key: value for key, value in options.items() if value is not None}
    with progress("starting a sandbox", quiet=as_json):
        sandbox = Sandbox.create(detached=True, **given)
    if as_json:
        print_json(sandbox.info().to_json())
    else:
        print_line(sandbox.sandbox_id)
    sandbox.close()


@verb
def ls(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Ids only.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the live sandboxes of this home, and those that are suspended."""
    found = [info.to_json() for info in Sandbox.list()]
    if as_json:
        print_json(found)
    elif quiet:
        for facts in found:
            print_line(facts["sandbox_id"])
    else:
        columns = ("sandbox", "name", "status", "driver", "snapshot", "created")
        rows = [(*(facts[column] for column in _LISTED), when(facts["created_at"])) for facts in found]
        print_table(columns, rows, empty="No sandbox is live.")


@verb
def rm(
    sandbox_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids or names of sandboxes.")],
    as_json: AsJson = False,
) -> int:
    """End sandboxes and remove what they wrote. Snapshots taken of them stay."""
    return remove_each(sandbox_ids, _terminate, as_json=as_json)


def _terminate(id_or_name: str) -> str:
    sandbox = Sandbox.connect(id_or_name)
    sandbox.terminate()
    return sandbox.sandbox_id


def remove_each(wanted: list[str], remove: Callable[[str], str], *, as_json: bool) -> int:
    """Remove things one after another; one that cannot be removed does not keep the others.

    Args:
        wanted: what each is called by.
        remove: removes one, and returns its id.
        as_json: how the ids of what was removed are printed.
    """
    removed: list[str] = []
    failure: WorldforkError | None = None
    for one in wanted:
        try:
            removed.append(remove(one))
        except WorldforkError as error:
            failure = error
            print_error(error, as_json=as_json)
    if as_json:
        print_json({"removed": removed})
    else:
        for one in removed:
            print_line(one)
    if failure is None:
        return OK
    return PARTIAL if removed else exit_code(failure)
