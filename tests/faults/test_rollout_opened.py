"""Open rollouts: graded once whoever asks, from any thread and process, closed twice, ended by their lease."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.faults.rolling import RIGHT, Forked, a_task, states

from worldfork.core.errors import ConfigError, NotFound, SandboxDied, SandboxError, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.door import through
from worldfork.lineage.place import place
from worldfork.records.episode import FailureKind
from worldfork.reward.score_verifier import ScoreVerifier
from worldfork.reward.verifier import Case, Grade
from worldfork.rollout.leftovers import sweep_ends
from worldfork.rollout.opened import AsyncRollout, open_rollout
from worldfork.rollout.starts import StartingStates
from worldfork.rollout.stored import StoredRun
from worldfork.rollout.synchronous import Rollout

pytestmark = pytest.mark.filterwarnings("ignore:no cgroup of this host:RuntimeWarning")

ROOT = Path(__file__).resolve().parents[2]
SOLVE = f"printf '{RIGHT.strip()}\\n' > answer.txt"


@pytest.fixture
def starts(home: Path) -> StartingStates:
    return through(states)


class Counting(Forked):
    """Counts how often it grades."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.began = threading.Event()
        self.wait_s = 0.0

    async def grade(self, case: Case) -> Grade:
        self.count += 1
        self.began.set()
        await asyncio.sleep(self.wait_s)
        return await super().grade(case)


def opened(starts: StartingStates, **options: Any) -> Rollout:
    return Rollout.open(a_task(), **{"starts": starts, "verifier": Forked(), "ttl_s": 120, **options})


def test_a_rollout_from_its_start_to_its_end(starts: StartingStates) -> None:
    with opened(starts, index=3, seed=11, policy_id="mine") as rollout:
        assert rollout.sh('echo "$WORLDFORK_FORK_INDEX $WORLDFORK_SEED $PWD"').stdout == "3 11 /workspace\n"
        rollout.sh(SOLVE)
        episode = rollout.grade()
        assert (episode.reward, episode.index, episode.seed, episode.policy_id) == (1.0, 3, 11, "mine")
        assert [step.action for step in rollout.trajectory.steps][1:] == [SOLVE]
        edits = rollout.edits()
        assert edits is not None
        assert edits.files["answer.txt"].content == RIGHT.encode()
        with pytest.raises(SandboxDied):
            rollout.sh("true")
        assert episode.timings.policy_s is not None
    rollout.close()
    assert rollout.grade() == episode
    with pytest.raises(ConfigError):
        opened(starts, ttl_s=0)


def test_it_is_graded_once_however_many_ask(starts: StartingStates) -> None:
    verifier = Counting()
    rollout = opened(starts, verifier=verifier)
    rollout.sh(SOLVE)
    others = [Rollout.attach(rollout.rollout_id, verifier=verifier) for _ in range(3)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(each.grade) for each in (rollout, *others) for _ in range(4)]
        episodes = [each.result(timeout=60) for each in asked]
    assert verifier.count == 1
    assert all(each == episodes[0] for each in episodes)
    assert episodes[0].reward == 1.0
    for each in (rollout, *others, rollout):
        each.close()


def test_another_process_grades_what_this_one_opened(starts: StartingStates) -> None:
    rollout = opened(starts)
    rollout.sh(SOLVE)
    program = (
        "import json, sys; from tests.faults.rolling import Forked; from worldfork.rollout.synchronous import Rollout\n"
        "found = Rollout.attach(sys.argv[1], verifier=Forked())\n"
        "print(json.dumps([found.sh('cat answer.txt').stdout, found.grade().to_json()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, rollout.rollout_id], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    seen, episode = json.loads(done.stdout)
    assert (seen, episode["reward"]) == (RIGHT, 1.0)
    assert rollout.grade().to_json() == episode
    rollout.close()


def test_a_handle_goes_by_its_id(starts: StartingStates) -> None:
    rollout = opened(starts)
    again = pickle.loads(pickle.dumps(rollout))
    assert again.rollout_id == rollout.rollout_id
    assert again.sh("echo here").stdout == "here\n"
    rollout.close()
    with pytest.raises(NotFound):
        Rollout.attach("sb-aaaaaaaaaaaaaaaa")
    with pytest.raises(ConfigError):
        Rollout.attach("../../etc")


class Other(Forked):
    """Another reward function."""

    verifier_id = "other"


def test_no_other_verifier_grades_in_silence(starts: StartingStates) -> None:
    rollout = opened(starts)
    rollout.sh(SOLVE)
    # As a worker has it that was sent the handle: the task's own verifier is not what it was opened with.
    sent = pickle.loads(pickle.dumps(rollout))
    with pytest.raises(ConfigError, match="opened to be graded by forked, not by "):
        sent.grade()
    with pytest.raises(ConfigError, match="graded by forked, not by other"):
        Rollout.attach(rollout.rollout_id, verifier=Other())
    # Nothing was ended by that.
    assert rollout.sh("cat answer.txt").stdout == RIGHT
    assert Rollout.attach(rollout.rollout_id, verifier=Forked()).grade().reward == 1.0
    assert sent.grade().verifier_id == "forked"
    rollout.close()
    told = opened(starts)
    assert Rollout.attach(told.rollout_id, verifier=Other(), other_verifier=True).grade().verifier_id == "other"
    told.close()


def half(case: Case) -> float:
    """Grade as a trainer's own function does."""
    return 0.5 if case.edits.files["answer.txt"].content == RIGHT.encode() else 0.0


def test_a_function_grades_where_it_is_known(starts: StartingStates) -> None:
    with pytest.raises(ConfigError, match="cannot both grade"):
        opened(starts, score=half)
    own, sent = (opened(starts, verifier=None, score=half, group_id="step-7") for _ in range(2))
    for rollout in (own, sent):
        rollout.sh(SOLVE)
    episode = own.grade()
    assert (episode.reward, episode.group_id) == (0.5, "step-7")
    assert episode.verifier_id.endswith(".half")
    # No function goes with an id: whoever attaches names it, and nothing is ended before that.
    there = pickle.loads(pickle.dumps(sent))
    with pytest.raises(ConfigError) as caught:
        there.grade()
    assert "verifier=` ScoreVerifier(SCORE)" in str(caught.value.remedy)
    assert there.sh("cat answer.txt").stdout == RIGHT
    graded = Rollout.attach(sent.rollout_id, verifier=ScoreVerifier(half)).grade()
    assert (graded.reward, graded.group_id, graded.verifier_id) == (0.5, "step-7", episode.verifier_id)
    for rollout in (own, sent):
        rollout.close()


def test_what_others_did_is_in_the_trajectory(starts: StartingStates, tmp_path: Path) -> None:
    rollout = opened(starts, run=tmp_path / "run")
    rollout.sh("echo one")
    program = (
        "import sys; from worldfork.rollout.synchronous import Rollout\n"
        "found = Rollout.attach(sys.argv[1]); found.sh('echo two'); found.recorder.fact('model', 'none')"
    )
    subprocess.run([sys.executable, "-c", program, rollout.rollout_id], cwd=ROOT, check=True, timeout=120)
    rollout.sh(SOLVE)
    episode = rollout.grade()
    rollout.close()
    trajectory = StoredRun(tmp_path / "run").trajectory(episode)
    assert trajectory is not None
    assert [step.action for step in trajectory.steps] == ["echo one", "echo two", SOLVE]
    assert [step.began_s for step in trajectory.steps] == sorted(step.began_s for step in trajectory.steps)
    assert trajectory.facts == {"model": "none"}
    assert episode.timings.commands_s is not None
    assert episode.timings.policy_s is not None
    assert 0 < episode.timings.commands_s <= episode.timings.policy_s <= episode.timings.total_s


def test_what_is_closed_leaves_next_to_nothing(starts: StartingStates) -> None:
    rollout = opened(starts)
    rollout.sh(SOLVE)
    rollout.grade()
    path = rollout._inner._ledger.path
    assert (path / "end.json").exists()
    rollout.close()
    assert {each.name for each in path.iterdir()} <= {"facts.json", "episode.json", "death.json", "closed", "lock"}
    assert sum(each.stat().st_size for each in path.iterdir()) < 4096


def test_closed_before_it_is_graded_it_has_no_reward(starts: StartingStates) -> None:
    rollout = opened(starts)
    other = Rollout.attach(rollout.rollout_id)
    rollout.close()
    rollout.close()
    other.close()
    for each in (rollout, other, Rollout.attach(rollout.rollout_id)):
        failure = each.grade().failure
        assert failure is not None
        assert (failure.kind, failure.code) == (FailureKind.STOPPED, "closed")


def test_its_lease_ends_it(starts: StartingStates) -> None:
    rollout = opened(starts, ttl_s=0.7)
    rollout.sh(SOLVE)
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s and through(rollout._inner.sandbox.cause_of_death) is None:
        time.sleep(0.05)
    failure = rollout.grade().failure
    assert failure is not None
    assert failure.kind is FailureKind.LIMIT
    rollout.close()


def test_death_by_its_own_doing_is_scored(starts: StartingStates) -> None:
    with opened(starts) as rollout:
        rollout.sandbox.terminate()
        assert rollout.grade().reward == 0.0


@pytest.mark.parametrize(
    ("line", "kind"),
    [("while dd if=/dev/zero of=/big$i bs=1M count=20 2>/dev/null; do i=x$i; done", None), ("", FailureKind.LOST)],
)
def test_another_process_knows_whose_doing_a_death_was(
    line: str, kind: FailureKind | None, starts: StartingStates
) -> None:
    rollout = opened(starts)
    rollout.sh(SOLVE)
    if line:
        with contextlib.suppress(SandboxError):
            rollout.sh(line, timeout=30)
    else:
        pid = rollout._inner.sandbox._live._pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s and through(rollout._inner.sandbox.cause_of_death) is None:
        time.sleep(0.05)
    program = (
        "import json, sys; from tests.faults.rolling import Forked; from worldfork.rollout.synchronous import Rollout\n"
        "print(json.dumps(Rollout.attach(sys.argv[1], verifier=Forked()).grade().to_json()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, rollout.rollout_id], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    episode = json.loads(done.stdout)
    if kind is None:
        assert (episode["reward"], episode["policy_end"]) == (0.0, "sandbox_died")
    else:
        assert episode["failure"]["kind"] == kind.value
    rollout.close()


def test_closing_lets_a_grading_come_to_its_end(starts: StartingStates) -> None:
    verifier = Counting()
    verifier.wait_s = 0.5
    rollout = opened(starts, verifier=verifier)
    rollout.sh(SOLVE)
    with ThreadPoolExecutor(1) as pool:
        grading = pool.submit(rollout.grade)
        assert verifier.began.wait(30)
        rollout.close()
        assert grading.result(timeout=60).reward == 1.0


def test_a_fault_of_a_moment_is_not_for_ever(starts: StartingStates) -> None:
    class Busy(Forked):
        busy = True

        async def grade(self, case: Case) -> Grade:
            if self.busy:
                raise VerifierError("late", kind=FailureKind.OVERLOAD)
            return await super().grade(case)

    verifier = Busy()
    rollout = opened(starts, verifier=verifier)
    rollout.sh(SOLVE)
    failure = rollout.grade().failure
    assert failure is not None
    assert failure.kind is FailureKind.OVERLOAD
    verifier.busy = False
    assert rollout.grade().reward == 1.0
    verifier.busy = True
    assert rollout.grade().reward == 1.0
    rollout.close()


@pytest.mark.parametrize("keep", [False, True])
def test_a_cancelled_grading_is_taken_up_again(keep: bool, starts: StartingStates) -> None:
    verifier = Counting()

    async def cancel_first() -> float | None:
        rollout = await open_rollout(a_task(), starts=await states(), verifier=verifier, ttl_s=120)
        await rollout.sh(SOLVE)
        verifier.wait_s = 60
        grading = asyncio.ensure_future(rollout.grade(keep=keep))
        while not verifier.began.is_set():
            await asyncio.sleep(0.01)
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading
        verifier.wait_s = 0
        # Another handle, as another process would have it: the sandbox has ended, what it left is known.
        again = await AsyncRollout.attach(rollout.rollout_id, verifier=verifier)
        episode = await again.grade(keep=keep)
        await again.close()
        assert (episode.final_snapshot_id is not None) == keep
        if episode.final_snapshot_id is not None:
            await AsyncSandbox.delete_snapshot(episode.final_snapshot_id)
        return episode.reward

    assert asyncio.run(cancel_first()) == 1.0
    assert verifier.count == 2


def test_states_are_kept_where_that_is_asked(starts: StartingStates) -> None:
    rollout = opened(starts)
    rollout.sh(SOLVE)
    first = rollout.keep("in the middle")
    rollout.sh("echo more > more.txt")
    last = rollout.grade(keep=True).final_snapshot_id
    rollout.close()
    assert last is not None

    async def look() -> list[str]:
        seen = []
        for snapshot_id in (first, last):
            async with await AsyncSandbox.create(snapshot_id=snapshot_id) as box:
                seen.append((await box.sh("ls", working_dir="/workspace")).stdout)
            await AsyncSandbox.delete_snapshot(snapshot_id)
        return seen

    kept = place().store.snapshot(last)
    assert (kept.label, kept.state, kept.level) == (f"end of {rollout.rollout_id}", "durable", "local")
    assert through(look) == ["answer.txt\n", "answer.txt\nmore.txt\n"]


def test_killed_while_it_grades_it_leaves_the_state_to_the_next(starts: StartingStates) -> None:
    program = (
        "import asyncio, os, signal, sys; from tests.faults.rolling import Forked\n"
        "from worldfork.rollout.synchronous import Rollout\n"
        "class Dying(Forked):\n"
        "    needs_end = True\n"
        "    async def grade(self, case): os.kill(os.getpid(), signal.SIGKILL)\n"
        "Rollout.attach(sys.argv[1], verifier=Dying()).grade(keep=True)"
    )

    class Looking(Forked):
        needs_end = True

        async def grade(self, case: Case) -> Grade:
            async with await AsyncSandbox.create(snapshot_id=case.end_snapshot_id) as box:
                found = await box.run("cat", ["/workspace/answer.txt"], timeout=10)
            return Grade(1.0 if found.stdout == RIGHT else 0.0)

    rollout = opened(starts, verifier=Looking())
    rollout.sh(SOLVE)
    done = subprocess.run([sys.executable, "-c", program, rollout.rollout_id], cwd=ROOT, timeout=120)
    assert done.returncode == -signal.SIGKILL
    sweep_ends(place())
    episode = rollout.grade(keep=True)
    assert episode.reward == 1.0
    rollout.close()
    sweep_ends(place())
    assert place().store.snapshot(str(episode.final_snapshot_id)).label == f"end of {rollout.rollout_id}"
    place().store.delete_snapshot(str(episode.final_snapshot_id))


def test_episodes_are_added_to_a_run(starts: StartingStates, tmp_path: Path) -> None:
    def one(index: int) -> None:
        with opened(starts, index=index, run=tmp_path / "run") as rollout:
            rollout.sh(SOLVE)
            rollout.grade()
            rollout.grade()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(8)))
    stored = StoredRun(tmp_path / "run")
    assert sorted(each.index for each in stored.episodes) == list(range(8))
    for episode in stored.episodes:
        edits, trajectory, diff = stored.edits(episode), stored.trajectory(episode), stored.diff(episode)
        assert edits is not None
        assert edits.files["answer.txt"].content == RIGHT.encode()
        assert trajectory is not None
        assert trajectory.steps[0].action == SOLVE
        assert diff is not None
        assert "+right" in diff
    assert list(stored.tasks) == [a_task().task_hash]


def test_many_at_once_from_many_threads(starts: StartingStates) -> None:
    def one(index: int) -> float | None:
        with opened(starts, index=index) as rollout:
            if index % 2:
                rollout.sh(SOLVE)
            return rollout.grade().reward

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(16))) == [0.0, 1.0] * 8
