"""The owner is killed at every step: its processes are gone at once, the next process clears the rest away.

Items 30, 33 and 39 of the list of what users of such systems hit (`docs/peers-items.md`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.stores import exit_code_of, start_child
from tests.victims import Death, Tell, deaths, die_at, left_in, start_afresh

from worldfork import Sandbox
from worldfork.lineage import place as places

GONE_S = 2.0
_kept: list[Sandbox] = []
"""In a victim: what it works on."""


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    places.close_places()


def one(base: str) -> Callable[[], object]:
    def prepare() -> None:
        _kept.append(Sandbox.create(base=base, network="none"))
        _kept[0].write_file("/f", b"first")

    return prepare


def busy_one(base: str) -> Callable[[], object]:
    def prepare() -> None:
        one(base)()
        _kept[0].start_process("sleep", ["1000"])

    return prepare


def expect_all_steps(home: Path, stories: Iterator[Death], needed: set[str]) -> None:
    """After each death: no process after 2 s, nothing in the home after the next start, and what was told holds."""
    seen = set()
    for death in stories:
        seen.add(death.step)
        assert death.left == [], death
        assert death.gone_s < GONE_S, death
        assert death.code in (0, -signal.SIGKILL), death
        start_afresh()
        assert left_in(home) == [], death
        for snapshot_id in death.told:
            with Sandbox.create(snapshot_id=snapshot_id) as restored:
                assert restored.read_file("/f") == b"first", death
            Sandbox.delete_snapshot(snapshot_id)
    assert needed <= seen, needed - seen


def test_item_30_killed_at_every_step_of_a_create(own_home: Path, base: str) -> None:
    """Item 30: kill -9 at every step, start again, count what is left. Item 33: gone in less than 2 s."""

    def work(tell: Tell) -> None:
        Sandbox.create(base=base, network="none").run("true")

    stories = deaths(lambda: Sandbox.create(base=base, network="none").terminate(), work)
    expect_all_steps(own_home, stories, {"hold:committed", "start:made", "start:answered"})


def test_item_30_killed_at_every_step_of_making_a_base(own_home: Path, tmp_path: Path) -> None:
    """Item 30, for the state that the first sandbox of a base makes."""
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    places.place()
    stories = deaths(lambda: None, lambda tell: Sandbox.create(base=f"dir:{root}", network="none"))
    expect_all_steps(own_home, stories, {"begin_layer:made", "base:written", "publish:committed", "set_name:committed"})


def test_item_30_killed_at_every_step_of_a_checkpoint(own_home: Path, base: str) -> None:
    """Item 30, where nothing but init runs, so that the upper is taken away."""

    def work(tell: Tell) -> None:
        tell(_kept[0].checkpoint(wait_until="completed").snapshot_id)

    needed = {"checkpoint:held", "checkpoint:renamed", "checkpoint:made", "checkpoint:rerooted", "publish:committed"}
    expect_all_steps(own_home, deaths(one(base), work), needed)


def test_item_30_killed_at_every_step_of_a_copying_checkpoint(own_home: Path, base: str) -> None:
    """Item 30, where commands run: they are frozen when the owner dies."""

    def work(tell: Tell) -> None:
        tell(_kept[0].checkpoint().snapshot_id)
        _kept[0].write_file("/g", b"second")
        tell(_kept[0].checkpoint().snapshot_id)

    needed = {"checkpoint:frozen", "checkpoint:copied", "checkpoint:thawed", "publish:written"}
    expect_all_steps(own_home, deaths(busy_one(base), work), needed)


def test_item_30_killed_at_every_step_of_a_last_checkpoint(own_home: Path, base: str) -> None:
    """Item 30, for `stop=True`."""

    def work(tell: Tell) -> None:
        tell(_kept[0].checkpoint(stop=True).snapshot_id)

    needed = {"checkpoint:stopped", "checkpoint:taken", "publish:committed", "end:groups", "release:committed"}
    expect_all_steps(own_home, deaths(busy_one(base), work), needed)


def test_item_30_killed_at_every_step_of_a_fork(own_home: Path, base: str) -> None:
    """Item 30: some children run, some are being made, some not begun."""
    snapshots = []

    def prepare() -> None:
        one(base)()
        # Durable first, so that no step of another thread comes between those that are counted.
        snapshots.append(_kept[0].checkpoint(wait_until="completed"))

    def work(tell: Tell) -> None:
        for child in snapshots[0].fork(3).unwrap():
            child.run("true")

    expect_all_steps(own_home, deaths(prepare, work), {"hold:committed", "start:made", "start:answered"})


def test_item_30_killed_at_every_step_of_an_end(own_home: Path, base: str) -> None:
    """Item 30, for terminate."""
    needed = {"end:dead", "end:groups", "trash:moved", "release:committed"}
    expect_all_steps(own_home, deaths(busy_one(base), lambda tell: _kept[0].terminate()), needed)


def test_item_30_killed_at_any_moment_of_a_launch(own_home: Path, base: str) -> None:
    """Item 30, between the named steps, while the launcher itself works."""
    Sandbox.create(base=base, network="none").terminate()
    for delay_ms in range(24):
        reader, writer = os.pipe()

        def create(writer: int = writer) -> None:
            places.place()
            os.write(writer, b"x")
            Sandbox.create(base=base, network="none").run("sleep", ["1000"])

        child = start_child(create)
        os.read(reader, 1)
        time.sleep(delay_ms / 1000)
        os.kill(child, signal.SIGKILL)
        assert exit_code_of(child) == -signal.SIGKILL
        os.close(reader)
        os.close(writer)
        _expect_nothing_within(own_home, f"killed after {delay_ms} ms")


def _expect_nothing_within(home: Path, where: str) -> None:
    deadline_s = time.monotonic() + GONE_S
    while True:
        start_afresh()
        left = left_in(home)
        if not left:
            return
        assert time.monotonic() < deadline_s, (where, left)


def test_item_33_everything_inside_is_gone(own_home: Path, base: str) -> None:
    """Item 33: daemons, sessions of their own, stopped processes: all of it, in less than 2 s."""

    def work(tell: Tell) -> None:
        sandbox = Sandbox.create(base=base, network="none")
        sandbox.start_process("sleep", ["1000"])
        sandbox.sh("setsid sleep 1000 & (setsid sleep 1000 &) ; sleep 1000 & kill -STOP $!; trap '' TERM HUP INT")

    death = die_at(0, lambda: None, work)
    assert death.left == []
    assert death.gone_s < GONE_S
    start_afresh()
    assert left_in(own_home) == []


def test_item_39_worldfork_sweep_clears_up(own_home: Path, base: str) -> None:
    """Item 39: what a killed process left is cleared by `worldfork sweep`, and its snapshots are kept."""

    def work(tell: Tell) -> None:
        tell(_kept[0].checkpoint().snapshot_id)
        _kept[0].write_file("/f", b"later")

    death = die_at(0, one(base), work)
    swept = subprocess.run(
        [sys.executable, "-c", "from worldfork.cli.main import main; main()", "sweep", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert swept.returncode == 0, swept.stderr
    json.loads(swept.stdout)
    assert left_in(own_home) == []
    with Sandbox.create(snapshot_id=death.told[0]) as restored:
        assert restored.read_file("/f") == b"first"
