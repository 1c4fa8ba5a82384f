"""Rollouts for real: forks, policies that behave and policies that do not, hidden tests, the journal."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from worldfork.core.errors import PolicyError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.snapshots import SnapshotInfo
from worldfork.records.episode import Episode, FailureKind
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.places import inside_task
from worldfork.rollout.demo_task import DEMO_REWARDS, demo_candidates, demo_task
from worldfork.rollout.group import Group, run_group, run_rollouts
from worldfork.rollout.journal import Journal, read_journal
from worldfork.rollout.loading import load_tasks
from worldfork.rollout.policies import CandidatesPolicy, NopPolicy, ReferencePolicy
from worldfork.rollout.turn import Turn
from worldfork.worlds.world import async_world

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

TESTS = """
from answer import value


def test_one():
    assert value(1) == 2


def test_two():
    assert value(2) == 3


def test_three():
    assert value(0) == 1
"""

RIGHT = "def value(x):\n    return x + 1\n"
WRONG = "def value(x):\n    return 3\n"
"""Passes one test of three."""


def task(**changes: Any) -> Task:
    values: dict[str, Any] = {
        "task_id": "e2e/answer",
        "prompt": "",
        "files": {"answer.py": "def value(x):\n    return None\n", "notes.txt": "kept\n"},
        "editable": ("answer.py",),
        "hidden_tests": {"test_answer.py": TESTS},
        "test_args": ("--timeout=5", "test_answer.py"),
        "solution": {"answer.py": RIGHT},
        "limits": TaskLimits(policy_wall_s=20, grade_cpu_s=4, grade_wall_s=10, memory_mb=256, disk_mb=64, pids=64),
    }
    return Task(**{**values, **changes})


class Acting:
    """A policy made of one function."""

    def __init__(self, policy_id: str, act: Callable[[AsyncSandbox], Awaitable[object]]) -> None:
        self.policy_id = policy_id
        self._act = act

    async def agent(self, sandbox: AsyncSandbox, task: Task, turn: Turn) -> None:
        await self._act(sandbox)


def shell(line: str, *, after: str | None = None) -> Acting:
    """A policy that writes `after` as its answer, where given, and then runs one line."""

    async def act(sandbox: AsyncSandbox) -> None:
        if after is not None:
            await sandbox.write_file(inside_task("answer.py"), after)
        await sandbox.sh(line, timeout=10)

    return Acting(f"shell {line}", act)


async def _install_pytest(sandbox: AsyncSandbox) -> None:
    """Copy this Python's own pytest: a test must not need the package registry."""
    where = await sandbox.run("python", ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True)
    target = where.stdout.strip()
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments", "pytest-timeout"):
        for file in importlib.metadata.files(name) or []:
            local = Path(str(file.locate()))
            if local.suffix == ".py" and ".." not in file.parts:
                await sandbox.write_file(f"{target}/{file}", local.read_bytes())


async def _world() -> SnapshotInfo:
    return await async_world("tests-e2e-rollouts", build=_install_pytest, network="none")


def group(policy: object, n: int = 1, *, of: Task | None = None, **more: Any) -> Group:
    async def run() -> Group:
        return await run_group(of or task(), policy, n, world=await _world(), **more)

    return asyncio.run(run())


def one(policy: object, *, of: Task | None = None) -> Episode:
    return group(policy, of=of).episodes[0]


def code(text: str, *, of: Task | None = None) -> Episode:
    return one(CandidatesPolicy({"one": {"answer.py": text}}), of=of)


def test_the_demo_gives_the_rewards_that_it_must() -> None:
    result = group(CandidatesPolicy(demo_candidates()), 8, of=demo_task())
    assert result.rewards == pytest.approx(list(DEMO_REWARDS))
    assert sum(each or 0 for each in result.advantages) == pytest.approx(0)
    assert len({episode.snapshot_id for episode in result.episodes}) == 1
    assert len({episode.sandbox_id for episode in result.episodes}) == 8
    assert len({episode.grading_sandbox_id for episode in result.episodes}) == 8


def test_nop_and_reference() -> None:
    untouched, solved = one(NopPolicy()), one(ReferencePolicy())
    assert (untouched.reward, solved.reward) == (0.0, 1.0)
    assert len(solved.expected) == 3
    assert solved.passed == solved.expected == untouched.failed
    assert solved.parts == {"fraction": 1.0, "fail_to_pass": 1.0}


def test_what_counts_is_what_ran_and_passed() -> None:
    episode = code(WRONG)
    assert episode.reward == pytest.approx(1 / 3)
    assert (len(episode.passed), len(episode.failed)) == (1, 2)


def test_a_pass_that_is_broken_spoils_fail_to_pass() -> None:
    broken = task(files={"answer.py": "def value(x):\n    return 2\n"})
    assert code("def value(x):\n    return 3\n", of=broken).parts["fail_to_pass"] == 0.0
    kept = code("def value(x):\n    return 2 if x == 1 else 3\n", of=broken)
    assert kept.parts["fail_to_pass"] == pytest.approx(0.5)
    assert kept.untouched == ("test_answer.py::test_one",)


def test_forks_know_their_index() -> None:
    async def act(sandbox: AsyncSandbox) -> None:
        told = await sandbox.run("sh", ["-c", 'test "$WORLDFORK_FORK_INDEX" = 1 && echo yes'])
        if told.stdout.strip() == "yes":
            await sandbox.write_file(inside_task("answer.py"), RIGHT)

    assert group(Acting("index", act), 3).rewards == [0.0, 1.0, 0.0]


# What a policy leaves in its sandbox counts for nothing but its declared files.


@pytest.mark.parametrize(
    "line",
    [
        "mkfifo answer.fifo; mv answer.fifo answer.py",
        "rm answer.py; mkdir answer.py",
        "printf 'def value(x):\\n    return x + 1\\n' > /root/right.py; ln -sf /root/right.py answer.py",
        "cp answer.py /root; rm -r /workspace; ln -s /root /workspace",
        "rm answer.py",
        "head -c 20000000 /dev/zero > answer.py",
        "chmod 000 answer.py; rm answer.py",
    ],
)
def test_what_is_no_plain_file_does_not_exist(line: str) -> None:
    episode = one(shell(line))
    assert episode.reward == 0.0
    assert episode.failure is None


def test_a_link_on_the_way_is_not_followed() -> None:
    nested = task(
        files={"pkg/answer.py": "def value(x):\n    return None\n"},
        editable=("pkg/answer.py",),
        solution={"pkg/answer.py": RIGHT},
        hidden_tests={"test_answer.py": TESTS.replace("from answer", "from pkg.answer")},
    )
    moved = "mv pkg other; printf 'def value(x):\\n    return x + 1\\n' > other/answer.py; ln -s other pkg"
    assert one(shell(moved), of=nested).reward == 0.0
    assert one(ReferencePolicy(), of=nested).reward == 1.0


PLANTED = {
    "conftest.py": "def pytest_runtest_makereport(item, call):\n    raise SystemExit(0)\n",
    "pytest.ini": "[pytest]\naddopts = --collect-only\n",
    "test_answer.py": "def test_one(): pass\ndef test_two(): pass\ndef test_three(): pass\n",
    "pytest.py": "raise SystemExit(0)\n",
    "sitecustomize.py": "import os; os._exit(0)\n",
}


def test_planted_files_stay_behind() -> None:
    planted = CandidatesPolicy({"plants": {**PLANTED, "answer.py": WRONG}})
    assert one(planted).reward == pytest.approx(1 / 3)


def test_processes_that_stay_change_nothing() -> None:
    line = "for i in 1 2 3 4; do (setsid sh -c 'while :; do echo x > answer.py; done' &) ; done"
    assert one(shell(line, after=RIGHT)).reward in (0.0, 1.0)
    quiet = "(setsid sleep 1000 &); (setsid sh -c 'trap \"\" TERM; sleep 1000' &)"
    assert one(shell(quiet, after=WRONG)).reward == pytest.approx(1 / 3)


ATTACK = """
import os, signal, sys
if os.fork():
    os._exit(0)
os.setsid()
known = {int(name) for name in os.listdir("/proc") if name.isdigit()}
while True:
    for pid in range(max(known) + 1, max(known) + 4000):
        if pid != os.getpid():
            try:
                os.kill(pid, getattr(signal, sys.argv[1]))
            except OSError:
                pass
"""


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_processes_that_attack_their_reader_change_nothing(number: str) -> None:
    async def act(sandbox: AsyncSandbox) -> None:
        await sandbox.write_file(inside_task("answer.py"), WRONG)
        await sandbox.run("python", ["-c", ATTACK, number])

    episode = one(Acting(f"attacks {number}", act))
    assert episode.failure is None
    assert episode.reward == pytest.approx(1 / 3)


# A policy cannot void a bad score by breaking its own sandbox.


@pytest.mark.parametrize(
    "line",
    [
        "kill -9 -1",
        "kill -9 1; kill 1",
        "rm -rf --no-preserve-root / 2>/dev/null",
        "python -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'",
        ":() { : | : & }; : 2>/dev/null; sleep 1",
        "i=0; while [ $i -lt 200 ]; do setsid sleep 1000 & i=$((i+1)); done 2>/dev/null",
        "head -c 200000000 /dev/zero > /root/full; head -c 200000000 /dev/zero > full",
    ],
)
def test_a_broken_sandbox_is_scored(line: str) -> None:
    episode = one(shell(line, after=WRONG))
    assert episode.failure is None
    assert episode.reward is not None
    assert episode.reward <= 1 / 3 + 1e-9


def test_a_turn_that_does_not_end_is_graded_as_it_stands() -> None:
    async def act(sandbox: AsyncSandbox) -> None:
        await sandbox.write_file(inside_task("answer.py"), WRONG)
        await sandbox.run("sleep", ["1000"])

    episode = one(Acting("sleeps", act), of=task(limits=TaskLimits(policy_wall_s=1, grade_cpu_s=4)))
    assert episode.policy_end == "timed_out"
    assert episode.reward == pytest.approx(1 / 3)


def test_a_policy_program_that_breaks_gives_no_reward() -> None:
    async def no_answer(sandbox: AsyncSandbox) -> None:
        raise PolicyError("the model does not answer")

    async def defect(sandbox: AsyncSandbox) -> None:
        raise RuntimeError("oh")

    for act, name in ((no_answer, "policy"), (defect, "RuntimeError")):
        episode = one(Acting(name, act))
        assert episode.reward is None
        assert episode.failure is not None
        assert (episode.failure.kind, episode.failure.code) == (FailureKind.POLICY, name)


def test_a_policy_that_wraps_the_end_of_its_sandbox_is_still_scored() -> None:
    async def act(sandbox: AsyncSandbox) -> None:
        await sandbox.terminate()
        raise RuntimeError("the tool is broken")

    episode = one(Acting("wraps", act))
    assert episode.reward == 0.0
    assert episode.policy_end == "sandbox_died"


# Code under test that ends, stalls or floods the verifier gets what it earned before.


@pytest.mark.parametrize(
    "text",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "raise KeyboardInterrupt",
        "def value(x):\n    import os; os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.kill(os.getppid(), 9); os.kill(-1, 9)",
        "import unittest\ndef value(x):\n    raise unittest.SkipTest",
        "import pytest\ndef value(x):\n    pytest.skip()",
        "import pytest\ndef value(x):\n    pytest.xfail()",
        "while True: pass",
        "def value(x):\n    while True: pass",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: break\nwhile True: pass",
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'x' * (1 << 24))\n    except OSError: pass",
        "import os\nos.closerange(0, 64)",
        "def value(x):\n    with open('/root/full', 'wb') as f:\n        while True: f.write(bytes(1 << 20))",
        "",
        "def value(x)",
    ],
)
def test_hostile_code_earns_nothing_and_voids_nothing(text: str) -> None:
    episode = code(text)
    assert episode.failure is None
    assert episode.reward == 0.0


def test_code_that_sleeps_is_no_overload() -> None:
    slow = task(test_args=("--timeout=1", "test_answer.py"), limits=TaskLimits(grade_cpu_s=4, grade_wall_s=30, pids=64))
    asleep = "import time\ndef value(x):\n    if x == 1: return 2\n    time.sleep(1000)\n"
    episode = code(asleep, of=slow)
    assert episode.reward == pytest.approx(1 / 3)
    at_import = code("import time; time.sleep(1000)", of=task(limits=TaskLimits(grade_wall_s=2)))
    assert at_import.reward == 0.0
    assert at_import.grade_end == "timed_out"


def test_results_so_far_count_when_the_tests_are_ended() -> None:
    ending = "import os\ndef value(x):\n    if x == 2: os._exit(0)\n    return x + 1\n"
    apart = code(ending)
    assert len(apart.passed) == 2, "where code under test runs apart, the other tests go on"
    episode = code(ending, of=task(verifier={"kind": "pytest"}))
    assert episode.passed == ("test_answer.py::test_one",)
    assert episode.failed == ()


# The verifier's own trouble is never a score.


def test_a_task_whose_reference_passes_nothing_gives_no_reward() -> None:
    episode = one(NopPolicy(), of=task(solution={"answer.py": "def value(x):\n    return None\n"}))
    assert episode.reward is None
    assert episode.failure is not None
    assert episode.failure.kind is FailureKind.CALIBRATION


def test_a_world_without_pytest_gives_no_reward() -> None:
    async def run() -> Group:
        bare = await async_world("tests-e2e-bare", build=lambda _: None, network="none")
        return await run_group(task(), NopPolicy(), 2, world=bare)

    for episode in asyncio.run(run()).episodes:
        assert episode.reward is None
        assert episode.failure is not None
        assert episode.failure.kind is FailureKind.GRADING


def test_a_run_is_resumed_without_repeating_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / "run" / "episodes.jsonl"
    seen: list[int] = []
    fails = True

    class Fails:
        policy_id = "fails-first"

        async def agent(self, sandbox: AsyncSandbox, task: Task, turn: Turn) -> None:
            index = turn.index
            seen.append(index)
            if index == 1 and fails:
                raise PolicyError("not now")

    with Journal.open(path) as journal:
        assert group(Fails(), 3, journal=journal).rewards == [0.0, None, 0.0]
    fails = False
    with Journal.open(path) as journal:
        assert group(Fails(), 4, journal=journal).rewards == [0.0, 0.0, 0.0, 0.0]
    assert sorted(seen) == [0, 1, 1, 2, 3]
    assert len(read_journal(path)) == 4


def test_a_cancelled_run_keeps_what_ended(tmp_path: Path) -> None:
    async def act(sandbox: AsyncSandbox) -> None:
        if (await sandbox.run("sh", ["-c", "echo $WORLDFORK_FORK_INDEX"])).stdout.strip() != "0":
            await sandbox.run("sleep", ["1000"])

    ended = asyncio.Event()

    async def run(journal: Journal) -> None:
        world = await _world()
        running = asyncio.create_task(
            run_group(task(), Acting("stalls", act), 3, world=world, journal=journal, on_episode=lambda _: ended.set())
        )
        await ended.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with Journal.open(tmp_path / "j.jsonl") as journal:
        asyncio.run(run(journal))
        assert [episode.index for episode in journal.episodes()] == [0]


def test_real_tasks() -> None:
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not there")
    chosen = {"quixbugs/gcd", "quixbugs/knapsack", "exercism/leap", "exercism/paasio", "exercism/alphametics"}
    tasks = [
        each
        for name in ("quixbugs", "exercism")
        for each in load_tasks(DATA / f"{name}.jsonl")
        if each.task_id in chosen
    ]

    async def run() -> tuple[list[Episode], list[Episode]]:
        world = await _world()
        return (
            await run_rollouts(tasks, ReferencePolicy(), world=world),
            await run_rollouts(tasks, NopPolicy(), world=world),
        )

    solved, untouched = asyncio.run(run())
    assert [episode.reward for episode in solved] == [1.0] * len(chosen)
    assert all(episode.reward is not None and episode.reward < 1 for episode in untouched)
