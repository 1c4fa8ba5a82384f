"""The verb promote: what the winner of a group made, into a directory or a live sandbox."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from worldfork.cli.boundary import OK, verb
from worldfork.cli.printing import print_json, print_line, print_table
from worldfork.cli.sandboxes import AsJson
from worldfork.core.errors import ConfigError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import Episode
from worldfork.rollout.promote import Promoted, apply_to_directory, best_episode, final_state, promote_into
from worldfork.rollout.stored import StoredRun


@verb
def promote(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="Directory to apply the diff to, such as a working copy.")
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option(help="Live sandbox, by id or name, whose disk becomes the winner's.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="The task's id, where the run has several.")] = None,
    policy: Annotated[str | None, typer.Option(help="Only rollouts of this policy, by its id.")] = None,
    rollout: Annotated[str | None, typer.Option(help="The rollout that was opened by this id.")] = None,
    index: Annotated[int | None, typer.Option(min=0, help="This rollout of the group instead of the best one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would change.")] = False,
    moved: Annotated[
        bool, typer.Option("--moved", help="Also where lines have moved, if they stand in one place only.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Take over what the best rollout of a group made."""
    if (to is None) == (sandbox is None):
        raise ConfigError("name one place for it", remedy="add --to DIR or --sandbox ID", field="to")
    stored = StoredRun(run)
    winner = _chosen(stored.episodes, task_id=task, policy_id=policy, rollout_id=rollout, index=index)
    changes: list[Promoted] = []
    before: str | None = None
    if to is not None:
        diff = stored.blob(winner.diff)
        if diff is None:
            raise ConfigError(
                f"the run holds no diff of {winner.task_id} #{winner.index}", remedy="run it again with --run DIR"
            )
        changes = apply_to_directory(to, diff, dry_run=dry_run, moved=moved)
    else:
        before = asyncio.run(_into(str(sandbox), winner, dry_run=dry_run))
    if as_json:
        print_json({
            "task_id": winner.task_id,
            "index": winner.index,
            "reward": winner.reward,
            "dry_run": dry_run,
            "changes": [dataclasses.asdict(each) for each in changes],
            "before_snapshot_id": before,
        })  # fmt: skip
        return OK
    print_line(f"{winner.task_id} #{winner.index}, reward {winner.reward:g}" + (" (dry run)" if dry_run else ""))
    if to is not None:
        rows = [(each.path, each.how, each.size_bytes) for each in changes]
        print_table(("path", "how", "bytes"), rows, empty="It changes nothing.")
    elif before is not None:
        print_line(f"{sandbox} is as it was left; before that it was as in {before}.")
    return OK


def _chosen(episodes: list[Episode], **wanted: object) -> Episode:
    chosen = {name: value for name, value in wanted.items() if value is not None}
    found = [each for each in episodes if all(getattr(each, name) == value for name, value in chosen.items())]
    if not found:
        raise ConfigError("the run has no such rollout", remedy="see `worldfork report RUN`", field="task")
    return best_episode(found)


async def _into(sandbox: str, winner: Episode, *, dry_run: bool) -> str | None:
    live = await AsyncSandbox.connect(sandbox)
    if dry_run:
        await AsyncSandbox.get_snapshot(final_state(winner))
        return None
    return (await promote_into(live, winner)).snapshot_id
