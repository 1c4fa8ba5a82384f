"""The verb demo: the whole story once, real and measured on the spot."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import typer

from worldfork import Sandbox, SnapshotInfo
from worldfork.cli.boundary import FAILED, OK, verb
from worldfork.cli.demo_machines import (
    Opened,
    choose_machines,
    freeze,
    kind_rows,
    open_world,
    restore,
    say_kinds,
    start_session,
    to_json,
)
from worldfork.cli.demo_report import ARTICLE, GROUP, Economics, economics_rows, reward_line
from worldfork.cli.demo_rollouts import Scored, roll_out
from worldfork.cli.demo_world import Survivor, WorldFacts, build_world, read_state, survivors
from worldfork.cli.printing import human_seconds, print_json, print_line, print_table, progress
from worldfork.cli.sandboxes import AsJson

RESTORES = 9
"""An odd number, so that the median is one of them."""
LABEL = "worldfork demo"
MACHINE_MEMORY_MB = 1024


@dataclass(frozen=True)
class Measured:
    """The world and what it cost."""

    snapshot: SnapshotInfo
    """What the rollouts start from."""
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
    driver: Annotated[
        Literal["namespace", "microvm"], typer.Option(help="What the world and its forks are isolated by.")
    ] = "namespace",
    base: Annotated[
        str | None, typer.Option(help="With microvm: dir:/path of a root file system that has python3.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Build a world, freeze it, prove what came back, grade eight rollouts and count the hours saved."""
    say: Callable[[str], None] = (lambda _: None) if as_json else print_line
    say("Build a world once, freeze it, fork it.\n")
    told: dict[str, Any]
    with ExitStack() as stack:
        if driver == "microvm":
            measured, told = _in_machines(choose_machines(base), stack, say, keep=keep, quiet=as_json)
        else:
            measured, told = _in_namespaces(stack, say, keep=keep, quiet=as_json)
        scored = _roll_out(measured.snapshot, measured.facts, say, quiet=as_json)
        if as_json:
            print_json({**_shape(measured, scored), **told})
        else:
            _say_economics(measured.economics, say)
        if keep:
            say(f"\nThe world stays as {measured.snapshot.snapshot_id}.")
    return OK if all(thing.ok for thing in measured.survived) and scored.as_known else FAILED


def _delete_later(stack: ExitStack, snapshot: SnapshotInfo, *, keep: bool = False) -> None:
    if not keep:
        stack.callback(Sandbox.delete_snapshot, snapshot.snapshot_id)


def _in_namespaces(
    stack: ExitStack, say: Callable[[str], None], *, keep: bool, quiet: bool
) -> tuple[Measured, dict[str, Any]]:
    began_s = time.perf_counter()
    with Sandbox.create() as world:
        facts, build_s = _build(world, say, began_s, quiet=quiet)
        began_s = time.perf_counter()
        snapshot = world.checkpoint(label=LABEL)
        checkpoint_s = time.perf_counter() - began_s
        _delete_later(stack, snapshot, keep=keep)
        say(f"2. Freeze    the snapshot could be forked after {human_seconds(checkpoint_s)}; the world runs on")
    return _restore(snapshot, facts, build_s, checkpoint_s, say), {}


def _in_machines(
    base: str, stack: ExitStack, say: Callable[[str], None], *, keep: bool, quiet: bool
) -> tuple[Measured, dict[str, Any]]:
    began_s = time.perf_counter()
    with open_world(base, MACHINE_MEMORY_MB, quiet=quiet) as opened:
        world = opened.sandbox
        say(f"   in virtual machines on {base}; what isolates them: {opened.isolation}")
        facts, build_s = _build(world, say, began_s, opened, quiet=quiet)
        session = start_session(world)
        frozen = []
        for kind, kept in (("filesystem", keep), ("memory", False)):
            frozen.append(freeze(world, kind, LABEL))
            _delete_later(stack, frozen[-1][0], keep=kept)
        say("2. Freeze    both ways while the world runs on: its disk, and its disk with the memory of what runs")
    with progress("restoring both kinds of snapshots", quiet=quiet):
        disk = restore(*frozen[0], facts, None, RESTORES)
        memory = restore(*frozen[1], facts, session, RESTORES)
    say(f"3. Restore   new machines, to the first answer; the median of {RESTORES}\n")
    if not quiet:
        print_table(("snapshot", "forkable after", "stood still", "adds on disk", "restore here", "the article"),
                    kind_rows(disk, memory))  # fmt: skip
    say("")
    say_kinds(disk, memory, say)
    survived = [*disk.survived, *memory.survived]
    measured = Measured(frozen[0][0], facts, build_s, disk.checkpoint_s, disk.restore_s, survived)
    return measured, {"machines": to_json(disk, memory, opened.isolation)}


def _build(
    world: Sandbox, say: Callable[[str], None], began_s: float, opened: Opened | None = None, *, quiet: bool
) -> tuple[WorldFacts, float]:
    with progress("building the world: packages, a fetched file, embeddings, a checkpoint", quiet=quiet):
        notes = [] if opened is None else opened.notes
        facts = build_world(world, notes.append, None if opened is None else opened.installed)
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
    measured = Measured(snapshot, facts, build_s, checkpoint_s, statistics.median(times_s), survivors(facts, state))
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
