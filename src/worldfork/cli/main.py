"""The `worldfork` program: its verbs, in the order in which a newcomer needs them."""

from __future__ import annotations

import logging
import warnings
from typing import Annotated

import typer

from worldfork.cli import (
    browse,
    demo,
    exchange,
    execute,
    export_episodes,
    image,
    keeping,
    lineage,
    promote,
    regrade,
    report,
    rollouts,
    sandboxes,
    snapshots,
    store,
    suspending,
    tasks,
    upkeep,
    verify,
)
from worldfork.cli.printing import note

app = typer.Typer(
    name="worldfork",
    no_args_is_help=True,
    add_completion=False,
    # A traceback here is a defect to be reported: whole, plain, and without the values of variables.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"worldfork {version('worldfork')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Build a world once, freeze it, fork it thousands of times."""


app.command()(upkeep.doctor)
app.command()(demo.demo)
app.command()(verify.verify)
app.command()(sandboxes.create)
app.command()(sandboxes.ls)
app.command("exec", context_settings={"allow_interspersed_args": False})(execute.execute)
app.command()(sandboxes.rm)
app.command()(snapshots.checkpoint)
app.add_typer(snapshots.snapshots, name="snapshots")
app.command()(snapshots.fork)
app.command()(suspending.suspend)
app.command()(suspending.resume)
app.command()(lineage.show)
app.command()(lineage.tree)
app.command()(browse.diff)
app.command()(browse.files)
app.command()(browse.cat)
app.command()(keeping.tag)
app.command()(keeping.prune)
app.command()(keeping.df)
app.command()(exchange.export)
app.command("import")(exchange.import_)
app.command()(exchange.push)
app.command()(exchange.pull)
app.command()(rollouts.rollout)
app.add_typer(tasks.tasks, name="tasks")
app.command()(regrade.regrade)
app.command()(report.report)
app.command()(promote.promote)
app.command()(export_episodes.export_episodes)
app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    upkeep.bench
)
app.command()(upkeep.sweep)
app.add_typer(image.image, name="image")
app.add_typer(store.store, name="store")


def _say_warnings_plainly() -> None:
    """Give the library's warnings the form of its errors: one line, without a place in the source."""

    def show(message: Warning | str, *_: object, **more: object) -> None:
        note(f"worldfork: {message}")

    warnings.showwarning = show
    logging.basicConfig(format="worldfork: %(message)s", level=logging.WARNING)


def main() -> None:
    """Run the program with the arguments of this process."""
    _say_warnings_plainly()
    app()


if __name__ == "__main__":
    main()
