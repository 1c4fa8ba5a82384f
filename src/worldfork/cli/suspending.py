"""The verbs for sandboxes that rest: suspend, resume."""

from __future__ import annotations

from typing import Annotated

import typer

from worldfork import Sandbox
from worldfork.cli.boundary import verb
from worldfork.cli.printing import print_json, print_line, progress
from worldfork.cli.sandboxes import AsJson
from worldfork.cli.snapshots import Outside


@verb
def suspend(
    sandbox_id: Annotated[str, typer.Argument(metavar="ID", help="Id or name of a live machine.")],
    outside: Outside = "refuse",
    as_json: AsJson = False,
) -> None:
    """Save a machine with its memory, end it, and print the id of the snapshot in which it rests."""
    with progress("suspending", quiet=as_json):
        sandbox = Sandbox.connect(sandbox_id)
        snapshot_id = sandbox.suspend(outside=outside)
    if as_json:
        print_json({"sandbox_id": sandbox.sandbox_id, "snapshot_id": snapshot_id})
    else:
        print_line(snapshot_id)


@verb
def resume(
    sandbox_id: Annotated[str, typer.Argument(metavar="ID", help="Id or name of a suspended sandbox.")],
    as_json: AsJson = False,
) -> None:
    """Let a suspended sandbox go on as it was, after this command too, and print its id."""
    with progress("resuming", quiet=as_json):
        sandbox = Sandbox.resume(sandbox_id, detached=True)
    if as_json:
        print_json(sandbox.info().to_json())
    else:
        print_line(sandbox.sandbox_id)
    sandbox.close()
