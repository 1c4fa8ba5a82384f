"""Wall limits on a full machine: honest code is never worth 0 for one, and wrong code cannot make one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from tests.e2e.test_rollouts import WRONG, _world, task

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import Episode, FailureKind
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.rollout.faults import FaultRules
from worldfork.rollout.group import run_group
from worldfork.rollout.policies import CandidatesPolicy, NopPolicy

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]
AGAIN = pytest.mark.exhaustive
"""What shows once more, by another verifier or beside others, what another case shows."""

ONCE = FaultRules(retries={})
LIMITS = TaskLimits(policy_wall_s=20, grade_cpu_s=30, grade_wall_s=12, memory_mb=256, disk_mb=64, pids=64)
LONGER = replace(LIMITS, grade_wall_s=15)
CPUS = len(os.sched_getaffinity(0))

TWO_WORKERS = """\
import os, time

def value(x):
    workers = []
    for _ in range(2):
        worker = os.fork()
        if worker == 0:
            while time.process_time() < {cpu_s}:
                pass
            os._exit(0)
        workers.append(worker)
    for worker in workers:
        os.waitpid(worker, 0)
    return x + 1
"""

ONE = """\
import time

def value(x):
    ends = time.process_time() + {cpu_s}
    while time.process_time() < ends:
        pass
    return x + 1
"""

CHAIN = """\
import os, time

def value(x):
    for _ in range(40):
        worker = os.fork()
        if worker == 0:
            while time.process_time() < {cpu_s} / 40:
                pass
            os._exit(0)
        os.waitpid(worker, 0)
    return x + 1
"""

STARVES = """\
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
ends = time.monotonic() + {until_s}
for _ in range(40):
    if os.fork() == 0:
        while time.monotonic() < ends:
            pass
        os._exit(0)
while time.monotonic() < ends:
    pass
time.sleep(1000)
"""

YIELDS = "import os\nwhile True:\n    os.sched_yield()\n"
SLEEPS = "import time\ntime.sleep(1000)\n"
DOZES = "import time\nwhile True:\n    time.sleep(5e-5)\n"
IDLES = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True:\n    pass\n"
TOGGLES = """\
import os, time
every = os.sched_getaffinity(0)
ends = time.monotonic() + 1000
while time.monotonic() < ends:
    os.sched_setaffinity(0, {min(every)})
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        pass
    os.sched_setaffinity(0, every)
"""


@contextlib.contextmanager
def others(many: int) -> Iterator[None]:
    """So many processes of the machine want a CPU all the time."""
    with contextlib.ExitStack() as stack:
        for _ in range(many):
            # The kernel may share out CPUs by sessions first.
            command = [sys.executable, "-c", "while True: pass"]
            child = stack.enter_context(subprocess.Popen(command, start_new_session=True))
            stack.callback(child.kill)
        yield


def busy_s() -> float:
    """The CPU seconds that this machine has used."""
    user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


class Calm:
    """Waits until others leave the CPUs alone; for so long in all, since a machine that is shared may never do so."""

    left_s = 90.0

    def wait(self) -> None:
        while True:
            before_s, at_s = busy_s(), time.monotonic()
            time.sleep(0.5)
            took_s = time.monotonic() - at_s
            self.left_s -= took_s
            if busy_s() - before_s < 0.3 * CPUS * took_s:
                return
            if self.left_s < 0:
                # Half of a limit lost by what else runs is no attack's doing.
                pytest.skip("others use this machine's CPUs: nobody can tell whom they starve")


@pytest.fixture(scope="module")
def calm() -> Calm:
    return Calm()


def graded(of: Task, policy: object) -> Episode:
    async def run() -> Episode:
        return (await run_group(of, policy, 1, world=await _world(), rules=ONCE)).episodes[0]

    return asyncio.run(run())


def learn(of: Task) -> None:
    """Have the task calibrated while there is a CPU for it; nothing is said of an episode on a busy machine."""
    for _ in range(3):
        failure = graded(of, NopPolicy()).failure
        if failure is None:
            return
        assert failure.kind is FailureKind.OVERLOAD, failure
    pytest.skip("this machine is too busy to calibrate a task")


def assert_not_below(of: Task, honest: str) -> None:
    learn(of)
    with others(4 * CPUS):
        episode = graded(of, CandidatesPolicy({"honest": {"answer.py": honest}}))
    if episode.reward is None:
        assert episode.failure is not None
        assert episode.failure.kind is FailureKind.OVERLOAD
    else:
        assert episode.reward == 1.0


def a_task(verifier: str, **changes: Any) -> Task:
    values: dict[str, Any] = {"test_args": ("test_answer.py",), "limits": LIMITS, "verifier": {"kind": verifier}}
    return task(**{**values, **changes})


@pytest.fixture(autouse=True)
def _counts() -> None:
    """Only where a cgroup counts CPU use; what is done elsewhere is no more than a guess."""

    async def ask() -> bool:
        async with await AsyncSandbox.create() as sandbox:
            return await sandbox.cpu_use() is not None

    if not asyncio.run(ask()):
        pytest.skip("no cgroup of this host counts CPU use")


@pytest.mark.parametrize(
    ("honest", "verifier"),
    [
        pytest.param(TWO_WORKERS.format(cpu_s=1.5), "pytest", id="two workers"),
        pytest.param(TWO_WORKERS.format(cpu_s=1.5), "split", id="two workers apart"),
        pytest.param(ONE.format(cpu_s=2.0), "pytest", id="one"),
        pytest.param(ONE.format(cpu_s=2.0), "split", id="one apart", marks=AGAIN),
        pytest.param(CHAIN.format(cpu_s=2.0), "pytest", id="a chain"),
        pytest.param(CHAIN.format(cpu_s=2.0), "split", id="a chain apart", marks=AGAIN),
    ],
)
def test_honest_code_on_a_full_machine_is_never_worth_0(honest: str, verifier: str) -> None:
    assert_not_below(a_task(verifier, task_id=f"starvation/{verifier}", limits=LONGER), honest)


@pytest.mark.parametrize("verifier", ["pytest", pytest.param("split", marks=AGAIN)])
def test_a_limit_of_one_test_on_a_full_machine_is_no_0_either(verifier: str) -> None:
    of = a_task(
        verifier,
        task_id=f"starvation/late-{verifier}",
        test_args=("--timeout=1", "test_answer.py"),
        limits=replace(LIMITS, grade_wall_s=60),
    )
    assert_not_below(of, TWO_WORKERS.format(cpu_s=0.9))


UNTIL_S = LIMITS.grade_wall_s - 0.7


@pytest.mark.parametrize(
    ("attack", "many", "verifier"),
    [
        pytest.param(STARVES.format(until_s=UNTIL_S), 0, "pytest", id="starves itself alone"),
        pytest.param(STARVES.format(until_s=UNTIL_S), CPUS, "pytest", id="starves itself beside others", marks=AGAIN),
        pytest.param(STARVES.format(until_s=UNTIL_S), CPUS, "split", id="starves itself apart"),
        pytest.param(SLEEPS, 4 * CPUS, "pytest", id="sleeps"),
        pytest.param(SLEEPS, 4 * CPUS, "split", id="sleeps apart", marks=AGAIN),
        pytest.param(IDLES, 4 * CPUS, "pytest", id="stands back"),
        pytest.param(TOGGLES, CPUS - 1, "pytest", id="keeps to a CPU that another has"),
        pytest.param(YIELDS, CPUS - 1, "pytest", id="yields", marks=AGAIN),
        pytest.param(DOZES, CPUS - 1, "pytest", id="dozes"),
    ],
)
def test_wrong_code_does_not_void_its_score(attack: str, many: int, verifier: str, calm: Calm) -> None:
    of = a_task(verifier, task_id=f"starvation/wrong-{verifier}")
    learn(of)
    text = WRONG.replace("    return", indent(attack, "    ") + "    return")
    for _ in range(2):
        if many <= CPUS:
            calm.wait()
        with others(many):
            episode = graded(of, CandidatesPolicy({"one": {"answer.py": text}}))
        if episode.failure is None or episode.failure.kind is not FailureKind.OVERLOAD:
            break
        # Once that may be somebody else's doing, who began after the wait.
    assert episode.failure is None, episode.failure
    assert episode.reward is not None
    assert episode.reward < 1.0
