"""How open rollouts end: nothing that we do to them makes a reward of 0, and nothing that was finished is lost."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.faults.rolling import RIGHT, Acting, Forked, a_task, solve, states

from worldfork.core.errors import Locked, SandboxError, StoreError, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.door import through
from worldfork.lineage.place import place
from worldfork.records.episode import FailureKind
from worldfork.reward.verifier import Case, Grade
from worldfork.rollout import opened as module
from worldfork.rollout.faults import FaultRules
from worldfork.rollout.group import run_rollouts
from worldfork.rollout.ledger import Ledger
from worldfork.rollout.leftovers import ends_of, sweep_ends
from worldfork.rollout.opened import AsyncRollout, open_rollout
from worldfork.rollout.run_directory import RunDirectory
from worldfork.rollout.starts import StartingStates, _key
from worldfork.rollout.stored import StoredRun
from worldfork.rollout.synchronous import Rollout
from worldfork.store import faultpoints

pytestmark = pytest.mark.filterwarnings("ignore:no cgroup of this host:RuntimeWarning")

ROOT = Path(__file__).resolve().parents[2]
SOLVE = f"printf '{RIGHT.strip()}\\n' > answer.txt"
OPENER = f"""
import os, signal, sys, time
from tests.faults.rolling import Forked, a_task, states
from worldfork.lineage.door import through
from worldfork.reward import carry
from worldfork.rollout.synchronous import Rollout
from worldfork.store import faultpoints
rollout = Rollout.open(a_task(), starts=through(states), verifier=Forked(), ttl_s=120)
rollout.sh({SOLVE!r})
print(rollout.rollout_id, flush=True)
def die(*_):
    # Whoever watches has seen by then that the sandbox is gone.
    end_s = time.monotonic() + 10
    while not (rollout._inner._ledger.path / "death.json").exists() and time.monotonic() < end_s:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def starts(home: Path) -> StartingStates:
    return through(states)


@pytest.fixture
def failing() -> Iterator[Callable[[str, int], None]]:
    """Let a named step fail so many times."""

    def install(step: str, times: int) -> None:
        left = [times]

        def hook(name: str) -> None:
            if name == step and left[0]:
                left[0] -= 1
                raise StoreError("busy for a moment")

        faultpoints.install(hook)

    yield install
    faultpoints.install(None)


class Counting(Forked):
    """Counts how often it grades, and waits where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.began, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.start_ids: list[str] = []

    async def grade(self, case: Case) -> Grade:
        self.count += 1
        self.start_ids.append(case.start.snapshot_id)
        self.began.set()
        while not self.go_on.is_set():
            await asyncio.sleep(0.01)
        return await super().grade(case)


def opened(starts: StartingStates, **options: Any) -> Rollout:
    return Rollout.open(a_task(), **{"starts": starts, "verifier": Forked(), "ttl_s": 120, **options})


def opened_elsewhere(rest: str) -> tuple[str, int]:
    """Open and solve in another process, which goes on as told; return the rollout's id and how the process ended."""
    done = subprocess.run(
        [sys.executable, "-c", OPENER + rest], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    return done.stdout.strip(), done.returncode


def test_an_opener_that_just_ends_makes_no_reward(starts: StartingStates) -> None:
    rollout_id, code = opened_elsewhere("")
    assert code == 0
    found = Rollout.attach(rollout_id, verifier=Forked())
    episode = found.grade()
    assert episode.reward is None
    assert episode.failure is not None
    assert episode.failure.kind is FailureKind.LOST
    found.close()


def test_the_end_of_a_process_in_the_middle_of_a_group_makes_no_reward(starts: StartingStates) -> None:
    async def act(sandbox: AsyncSandbox, turn: Any) -> None:
        await solve(sandbox, turn)
        # As at exit: the loop of a daemon thread goes on for a while.
        sandbox._live.end_now()
        await sandbox.sh("true")

    rules = FaultRules(retries={})
    [episode] = through(run_rollouts, [a_task()], Acting(act), n=1, starts=starts, verifier=Forked(), rules=rules)
    assert episode.reward is None
    assert episode.failure is not None
    assert episode.failure.kind is FailureKind.LOST


@pytest.mark.parametrize(
    ("rest", "reward"),
    [
        ("carry.read_edits = die\nrollout.grade()", 1.0),
        ("faultpoints.install(lambda name: die() if name == 'checkpoint:taken' else None)\nrollout.grade()", None),
    ],
    ids=["state taken", "state not taken"],
)
def test_an_opener_that_is_killed_while_it_reads_makes_no_zero(
    rest: str, reward: float | None, starts: StartingStates
) -> None:
    rollout_id, code = opened_elsewhere(rest)
    assert code == -signal.SIGKILL
    sweep_ends(place())
    found = Rollout.attach(rollout_id, verifier=Forked())
    episode = found.grade()
    assert episode.reward == reward
    assert reward is not None or (episode.failure is not None and episode.failure.kind is FailureKind.LOST)
    found.close()
    assert ends_of(found._inner._ledger.path) == []
    place().sweep()


def test_a_fault_of_a_moment_before_the_stop_is_tried_again(
    starts: StartingStates, failing: Callable[[str, int], None]
) -> None:
    rollout = opened(starts)
    rollout.sh(SOLVE)
    failing("rollout:carry", 1)
    assert rollout.grade().reward == 1.0
    rollout.close()


@pytest.mark.parametrize(("step", "lives"), [("rollout:carry", True), ("carry:read", False)])
def test_what_was_left_is_not_lost_for_a_longer_moment(
    step: str, lives: bool, starts: StartingStates, failing: Callable[[str, int], None]
) -> None:
    rollout = opened(starts)
    rollout.sh(SOLVE)
    failing(step, 2)
    failure = rollout.grade().failure
    assert failure is not None
    assert failure.kind is FailureKind.CARRY
    assert (through(rollout._inner.sandbox.cause_of_death) is None) == lives
    episode = rollout.grade()
    assert episode.reward == 1.0
    rollout.close()
    assert ends_of(rollout._inner._ledger.path) == []


def test_what_is_closed_before_it_could_be_read_leaves_no_state(
    starts: StartingStates, failing: Callable[[str, int], None]
) -> None:
    rollout = opened(starts)
    failing("carry:read", 2)
    assert rollout.grade().reward is None
    assert len(ends_of(rollout._inner._ledger.path)) == 1
    rollout.close()
    assert ends_of(rollout._inner._ledger.path) == []
    failure = rollout.grade().failure
    assert failure is not None
    assert failure.kind is FailureKind.STOPPED


def test_a_forked_child_ends_no_rollout_of_its_parent(starts: StartingStates) -> None:
    rollout = opened(starts)
    rollout.sh(SOLVE)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            rollout.grade()
        except SandboxError:
            rollout.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rollout.sh("cat answer.txt").stdout == RIGHT
    assert rollout.grade().reward == 1.0
    rollout.close()


def test_it_is_closed_on_a_disk_that_is_full(
    starts: StartingStates, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    rollout = opened(starts)
    rollout.sh(SOLVE)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "worldfork"):
        for name in ("set_episode", "set_closed"):
            patched.setattr(Ledger, name, full)
        rollout.close()
    assert caplog.text.count("no space left") == 2
    assert through(rollout._inner.sandbox.cause_of_death) is not None
    # Nobody could write down that it was closed; it was not the policy's wish all the same.
    found = Rollout.attach(rollout.rollout_id, verifier=Forked())
    assert found.grade().reward is None
    found.close()


def test_who_waits_gets_the_failure_that_came_of_it(starts: StartingStates, monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(Counting):
        async def grade(self, case: Case) -> Grade:
            await super().grade(case)
            raise VerifierError("late", kind=FailureKind.OVERLOAD)

    waiting, turn = [], Ledger.turn

    def counted(ledger: Ledger, wait_s: float) -> Any:
        waiting.append(wait_s)
        return turn(ledger, wait_s)

    monkeypatch.setattr(Ledger, "turn", counted)
    verifier = Busy()
    verifier.go_on.clear()
    rollout = opened(starts, verifier=verifier)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(rollout.grade) for _ in range(4)]
        while len(waiting) < 4:
            verifier.began.wait(0.01)
        verifier.go_on.set()
        episodes = [each.result(timeout=60) for each in asked]
    tries = verifier.count
    assert tries == 3
    assert all(each == episodes[0] for each in episodes)
    # Who asks later sees another moment.
    rollout.grade()
    assert verifier.count == 2 * tries
    rollout.close()


def test_an_asynchronous_handle_goes_by_its_id(starts: StartingStates) -> None:
    async def send() -> None:
        async with await open_rollout(a_task(), starts=await states(), verifier=Forked(), ttl_s=120) as rollout:
            sent = pickle.dumps(rollout)
            assert len(sent) < 200
            again = pickle.loads(sent)
            assert isinstance(again, AsyncRollout)
            assert (await again.sh("echo here")).stdout == "here\n"

    asyncio.run(send())


def test_it_is_graded_by_the_state_that_it_was_forked_from(starts: StartingStates) -> None:
    verifier = Counting()
    rollout = opened(starts, verifier=verifier)
    rollout.sh(SOLVE)
    start_id = through(starts.get, a_task()).snapshot_id
    here = place()
    name = f"world:{here.driver.form}:{_key(a_task(), str(starts.world_id))}"

    async def change() -> None:
        """As a branch that moved, or a world that was built again."""
        async with await AsyncSandbox.create(snapshot_id=start_id) as box:
            await box.write_file("/workspace/more.txt", "more")
            other = await box.checkpoint()
        here.store.set_name(name, other.snapshot_id)

    try:
        through(change)
        world = through(AsyncSandbox.get_snapshot, starts.world_id)
        assert through(through(StartingStates.open, world).get, a_task()).snapshot_id != start_id
        episode = Rollout.attach(rollout.rollout_id, verifier=verifier).grade()
    finally:
        # Others of this home's tests start from it too.
        here.store.set_name(name, start_id)
    assert (episode.reward, episode.snapshot_id) == (1.0, start_id)
    assert verifier.start_ids == [start_id]
    rollout.close()


def test_another_verifier_may_be_the_tasks_own(starts: StartingStates, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Forked):
        verifier_id = "own"

    monkeypatch.setattr(module, "judges", lambda verifier=None, **_: lambda _: verifier or Own())
    rollout = opened(starts)
    found = Rollout.attach(rollout.rollout_id, other_verifier=True)
    assert found.grade().verifier_id == "own"
    found.close()


def test_a_grading_that_is_cancelled_after_the_closing_leaves_nothing(starts: StartingStates) -> None:
    async def cancel() -> None:
        verifier = Counting()
        verifier.go_on.clear()
        rollout = await open_rollout(a_task(), starts=await states(), verifier=verifier, ttl_s=120)
        grading = asyncio.ensure_future(rollout.grade(keep=True))
        while not verifier.began.is_set():
            await asyncio.sleep(0.01)
        # As by a `close` that did not wait for so long.
        rollout._ledger.set_closed()
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading
        assert rollout._ledger.end() is None
        assert ends_of(rollout._ledger.path) == []
        failure = (await rollout.grade()).failure
        assert failure is not None
        assert failure.code == "closed"

    asyncio.run(cancel())


@pytest.mark.parametrize("error", [Locked("a run writes", holders=[]), OSError(errno.ENOSPC, "full")])
def test_what_was_graded_is_never_graded_again_for_its_run(
    error: Exception, starts: StartingStates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    verifier = Counting()
    rollout = opened(starts, verifier=verifier, run=tmp_path / "run")
    rollout.sh(SOLVE)
    monkeypatch.setattr("worldfork.rollout.ending._JOURNAL_S", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "add", refuse)
        assert rollout.grade().reward == 1.0
        assert rollout.grade().reward == 1.0
    rollout.close()
    assert verifier.count == 1
    [episode] = StoredRun(tmp_path / "run").episodes
    edits, trajectory = StoredRun(tmp_path / "run").edits(episode), StoredRun(tmp_path / "run").trajectory(episode)
    assert edits is not None
    assert trajectory is not None
    assert edits.files["answer.txt"].content == RIGHT.encode()
    assert rollout._inner._ledger.to_add() is None


def test_a_grading_asked_for_again_is_no_part_of_the_turn(starts: StartingStates) -> None:
    class Slow(Counting):
        async def grade(self, case: Case) -> Grade:
            self.count += 1
            if self.count > 2:
                return await Forked.grade(self, case)
            await asyncio.sleep(0.3)
            raise VerifierError("broken", kind=FailureKind.GRADING)

    rollout = opened(starts, verifier=Slow())
    assert rollout.grade().reward is None
    episode = rollout.grade()
    assert episode.reward == 0.0
    assert episode.timings.policy_s is not None
    assert episode.timings.policy_s < 0.6
    rollout.close()
