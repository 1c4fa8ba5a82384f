"""The verb demo: the whole story once, real and measured on the spot."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from worldfork import Sandbox, SnapshotInfo
from worldfork.cli.boundary import FAILED, OK, verb
from worldfork.cli.demo_report import ARTICLE, GROUP, Economics, economics_rows, reward_line
from worldfork.cli.demo_rollouts import Scored, roll_out
from worldfork.cli.demo_world import Survivor, WorldFacts, build_world, read_state, survivors
from worldfork.cli.printing import human_seconds, print_json, print_line, print_table, progress
from worldfork.cli.sandboxes import AsJson

RESTORES = 9
"""An odd number, so that the median is one of them."""


@dataclass(frozen=True)
class Measured:
    """The world and what it cost."""

    facts: WorldFacts
    build_s: float
    """From nothing to the finished world."""
    checkpoint_s: float
    """Until the snapshot could be forked."""
    restore_s: float
    """From the snapshot to the first answer of a new sandbox; the median of `RESTORES`."""
    survived: list[Survivor]

    @property
    def economics(self) -> Economics:
        """What these figures come to over a whole run."""
        return Economics(self.build_s, self.restore_s)


@verb
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Keep the world's snapshot, and print its id.")] = False,
    as_json: AsJson = False,
) -> int:
    """Build a world, freeze it, prove what came back, grade eight rollouts and count the hours saved."""
    say: Callable[[str], None] = (lambda _: None) if as_json else print_line
    say("Build a world once, freeze it, fork it.\n")
    snapshot: SnapshotInfo | None = None
    began_s = time.perf_counter()
    try:
        with Sandbox.create() as world:
            facts, build_s = _build(world, say, began_s, quiet=as_json)
            began_s = time.perf_counter()
            snapshot = world.checkpoint(label="worldfork demo")
            checkpoint_s = time.perf_counter() - began_s
            say(f"2. Freeze    the snapshot could be forked after {human_seconds(checkpoint_s)}; the world runs on")
        measured = _restore(snapshot, facts, build_s, checkpoint_s, say)
        scored = _roll_out(snapshot, facts, say, quiet=as_json)
        if as_json:
            print_json(_shape(measured, scored))
        else:
            _say_economics(measured.economics, say)
        if keep:
            say(f"\nThe world stays as {snapshot.snapshot_id}.")
    finally:
        if snapshot is not None and not keep:
            Sandbox.delete_snapshot(snapshot.snapshot_id)
    return OK if all(thing.ok for thing in measured.survived) and scored.as_known else FAILED


def _build(world: Sandbox, say: Callable[[str], None], began_s: float, *, quiet: bool) -> tuple[WorldFacts, float]:
    with progress("building the world: packages, a fetched file, embeddings, a checkpoint", quiet=quiet):
        notes: list[str] = []
        facts = build_world(world, notes.append)
    build_s = time.perf_counter() - began_s
    say(f"1. Build     {', '.join(facts.packages)}; and the state that code left: {build_s:.1f} s")
    for text in notes:
        say(f"             {text}")
    return facts, build_s


def _restore(
    snapshot: SnapshotInfo, facts: WorldFacts, build_s: float, checkpoint_s: float, say: Callable[[str], None]
) -> Measured:
    times_s = []
    state: dict[str, Any] = {}
    for number in range(RESTORES):
        began_s = time.perf_counter()
        with Sandbox.create(snapshot_id=snapshot.snapshot_id) as restored:
            restored.run("true", check=True)
            times_s.append(time.perf_counter() - began_s)
            if number == 0:
                state = read_state(restored, facts.packages)
    measured = Measured(facts, build_s, checkpoint_s, statistics.median(times_s), survivors(facts, state))
    say(f"3. Restore   a new sandbox answered after {human_seconds(measured.restore_s)}, the median of {RESTORES}")
    for thing in measured.survived:
        say(f"             {'came back' if thing.ok else 'NOT THE SAME'}  {thing.name}: {thing.detail}")
    return measured


def _roll_out(snapshot: SnapshotInfo, facts: WorldFacts, say: Callable[[str], None], *, quiet: bool) -> Scored:
    with progress(f"rolling out a group of {GROUP}", quiet=quiet):
        scored = roll_out(snapshot.snapshot_id, with_pytest=facts.has_pytest)
    where = f"graded by hidden tests in {GROUP} more" if facts.has_pytest else "and hidden tests in the same"
    say(f"4. Roll out  {GROUP} candidates in {GROUP} forks, {where}: {scored.took_s:.1f} s")
    for line in scored.lines:
        say(f"             {reward_line(*line)}")
    say(f"             rewards    {_vector(scored.rewards)}")
    say(f"             advantages {_vector(scored.advantages)}")
    return scored


def _vector(values: list[float | None] | list[float]) -> str:
    return "[" + ", ".join("None" if value is None else f"{value:.2f}" for value in values) + "]"


def _say_economics(economics: Economics, say: Callable[[str], None]) -> None:
    say(f"5. Count     what {economics.rollouts:,} rollouts pay for their start states, at {economics.group} at once\n")
    print_table(("", "measured here", "the article"), economics_rows(economics))
    factor = economics.rebuild_h / economics.fork_h
    say(f"\nBuilding once takes 1/{factor:,.0f} of the sandbox time of building every time.")


def _shape(measured: Measured, scored: Scored) -> dict[str, Any]:
    return {
        "world": {
            "packages": list(measured.facts.packages),
            "from_registry": measured.facts.from_registry,
            "build_s": measured.build_s,
        },
        "checkpoint_s": measured.checkpoint_s,
        "restore_s": measured.restore_s,
        "survived": [asdict(thing) for thing in measured.survived],
        "episodes": scored.episodes,
        "rewards": scored.rewards,
        "advantages": scored.advantages,
        "economics": measured.economics.to_json(),
        "article": ARTICLE.to_json(),
    }
