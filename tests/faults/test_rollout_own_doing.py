"""What a policy does to its own sandbox is its own doing and scored; what befalls that from outside is never."""

from __future__ import annotations

import os
import signal

import pytest
from tests.e2e.test_rollouts import RIGHT, WRONG, Acting, group, one

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.place import place
from worldfork.records.episode import Episode, FailureKind
from worldfork.reward.places import inside_task
from worldfork.rollout.faults import RETRIES, FaultRules

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
FEW = FaultRules(pause_s=0.01)


def doing(line: str, *, left: str = WRONG) -> Episode:
    """The episode of a policy that leaves an answer and then runs one line, whatever comes of it."""

    async def act(sandbox: AsyncSandbox) -> None:
        await sandbox.write_file(inside_task("answer.py"), left)
        await sandbox.sh(line, timeout=15)
        await sandbox.sh("true", timeout=15)

    return one(Acting(line[:60], act))


def kill_init(sandbox: AsyncSandbox) -> None:
    pid = sandbox._live._pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


MEMORY = "python -c 'data = []\nwhile True: data.append(bytearray(1 << 20))'"
FORKS = "f() { f | f & f; }; f"


@pytest.mark.parametrize(
    "line", [MEMORY, FORKS, "kill -9 -1; kill -9 1; kill -9 $PPID", "head -c 20M /dev/zero > /dev/shm/x"]
)
def test_what_ends_processes_alone_leaves_the_answer_to_be_graded(line: str) -> None:
    found = doing(line)
    assert (found.failure, found.reward) == (None, pytest.approx(1 / 3))
    assert doing(line, left=RIGHT).reward == 1.0


@pytest.mark.parametrize(
    "line",
    [
        "for n in 1 2 3; do head -c 30M /dev/zero > /root/$n; done; sleep 30",
        "mkdir -p /root/d; cd /root/d; for n in $(seq 200); do mkdir d; cd d; done; sleep 30",
    ],
    ids=["bytes", "depth"],
)
def test_what_takes_the_disk_scores_0(line: str) -> None:
    found = doing(line, left=RIGHT)
    assert (found.failure, found.reward, found.policy_end) == (None, 0.0, "out_of_space")


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("true", "/usr/bin/new"),
        ("true", "/proc/sys/kernel/new"),
        ("true", "/workspace/answer.py/below"),
        ("head -c 1G /dev/zero > /dev/shm/full; true", "/dev/shm/more"),
        ("for n in $(seq 5000); do mkdir /dev/shm/$n /dev/$n || break; done 2>/dev/null", "/dev/new"),
    ],
    ids=["read-only", "proc", "below-a-file", "full-tmpfs", "full-dev"],
)
def test_a_file_that_could_not_be_written_inside_is_no_trouble_of_the_host(line: str, path: str) -> None:
    async def act(sandbox: AsyncSandbox) -> None:
        await sandbox.write_file(inside_task("answer.py"), WRONG)
        await sandbox.sh(line, timeout=15)
        await sandbox.write_file(path, b"x" * 100_000)

    found = one(Acting(f"writes {path}", act))
    assert found.failure is None
    assert found.reward == pytest.approx(1 / 3)


def test_an_init_that_is_killed_from_outside_is_tried_again_and_has_no_reward() -> None:
    async def act(sandbox: AsyncSandbox) -> None:
        await sandbox.write_file(inside_task("answer.py"), RIGHT)
        kill_init(sandbox)
        await sandbox.sh("sleep 30")

    [found] = group(Acting("killed", act), rules=FEW).episodes
    assert found.failure is not None
    assert (found.failure.kind, found.reward) == (FailureKind.LOST, None)
    assert found.faults == ("lost",) * RETRIES[FailureKind.LOST]


def test_one_that_is_killed_once_is_scored_in_the_end_beside_its_siblings() -> None:
    killed: list[int] = []

    async def act(sandbox: AsyncSandbox) -> None:
        await sandbox.write_file(inside_task("answer.py"), RIGHT)
        if sandbox.fork_index == 1 and not killed:
            killed.append(1)
            kill_init(sandbox)
        await sandbox.sh("true")

    found = group(Acting("killed once", act), 4, rules=FEW)
    assert found.rewards == [1.0] * 4
    assert [len(episode.faults) for episode in found.episodes] == [0, 1, 0, 0]


def test_an_init_that_the_host_had_no_memory_for_has_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(sandbox: AsyncSandbox) -> None:
        monkeypatch.setattr(place().host_kills, "lately", lambda: 1)
        kill_init(sandbox)
        await sandbox.sh("sleep 30")

    [found] = group(Acting("no memory", act), rules=FEW).episodes
    assert found.failure is not None
    assert found.failure.kind is FailureKind.MEMORY
