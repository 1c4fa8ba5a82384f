"""The verbs for frozen state: checkpoint, snapshots, fork."""

from __future__ import annotations

from typing import Annotated

import typer

from worldfork import Sandbox
from worldfork.cli.boundary import OK, PARTIAL, exit_code, verb
from worldfork.cli.printing import human_bytes, print_error, print_json, print_line, print_table, progress
from worldfork.cli.sandboxes import AsJson, remove_each
from worldfork.cli.shapes import error_shape, snapshot_shape, when
from worldfork.core.errors import WorldforkError
from worldfork.lineage.place import place
from worldfork.records.snapshot import SnapshotRecord


@verb
def checkpoint(
    sandbox_id: Annotated[str, typer.Argument(metavar="ID", help="Id or name of a live sandbox.")],
    stop: Annotated[bool, typer.Option("--stop", help="End the sandbox once it is stored.")] = False,
    durable: Annotated[
        bool, typer.Option("--durable", help="Wait until a crash of the machine cannot lose it.")
    ] = False,
    label: Annotated[str | None, typer.Option(help="A note kept with the snapshot.")] = None,
    timeout: Annotated[float, typer.Option(help="Give up after this many seconds.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Freeze a sandbox's disk into a snapshot and print its id. The sandbox goes on."""
    with progress("checkpointing", quiet=as_json):
        info = Sandbox.connect(sandbox_id).checkpoint(
            stop=stop, label=label, timeout=timeout, wait_until="completed" if durable else "local_ready"
        )
    if as_json:
        print_json(snapshot_shape(place().store.snapshot(info.snapshot_id)))
    else:
        print_line(info.snapshot_id)


def all_snapshots() -> list[SnapshotRecord]:
    """Return what this home holds, the newest first."""
    return place().store.snapshots()[::-1]


snapshots = typer.Typer(help="List snapshots, or remove them with `rm`.", invoke_without_command=True)


@snapshots.callback()
@verb
def list_snapshots(
    context: typer.Context,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Ids only.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the snapshots of this home, newest first; `snapshots rm ID...` removes some."""
    if context.invoked_subcommand is not None:
        return
    found = [snapshot_shape(record) for record in all_snapshots()]
    if as_json:
        print_json(found)
    elif quiet:
        for facts in found:
            print_line(facts["snapshot_id"])
    else:
        rows = [
            (
                facts["snapshot_id"],
                facts["label"],
                facts["state"],
                facts["layers"],
                human_bytes(facts["size_bytes"]),
                facts["sandbox_id"],
                when(facts["created_s"]),
            )
            for facts in found
        ]
        columns = ("snapshot", "label", "state", "layers", "changed", "taken of", "created")
        print_table(columns, rows, empty="There is no snapshot.")


@snapshots.command("rm")
@verb
def remove_snapshots(
    snapshot_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of snapshots.")],
    as_json: AsJson = False,
) -> int:
    """Remove snapshots. One that a live sandbox still uses stays, and the error names the sandbox."""
    return remove_each(snapshot_ids, Sandbox.delete_snapshot, as_json=as_json)


@verb
def fork(
    source: Annotated[str, typer.Argument(metavar="ID", help="A snapshot, or a live sandbox (its state now).")],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many sandboxes.")] = 1,
    seed: Annotated[list[int] | None, typer.Option(help="Seed of one fork; give it once per fork.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="How many start at once.")] = None,
    as_json: AsJson = False,
) -> int:
    """Make sandboxes that share one state and go on after this command, and print their ids."""
    whole = Sandbox.get_snapshot(source) if source.startswith("sn-") else Sandbox.connect(source)
    with progress(f"forking {count}", quiet=as_json):
        results = whole.fork(count, seeds=seed or None, max_concurrency=concurrency, detached=True)
    if as_json:
        print_json(
            [
                {
                    "index": result.index,
                    "sandbox_id": None if result.sandbox is None else result.sandbox.sandbox_id,
                    "error": None if result.error is None else error_shape(result.error),
                }
                for result in results
            ]
        )
    failed: list[WorldforkError] = []
    for result in results:
        if result.error is not None:
            failed.append(result.error)
            print_error(result.error, as_json=as_json)
        elif result.sandbox is not None and not as_json:
            print_line(result.sandbox.sandbox_id)
    if not failed:
        return OK
    return PARTIAL if len(failed) < len(results) else exit_code(failed[0])
