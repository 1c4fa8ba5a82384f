"""A policy that breaks its own sandbox is scored for what it did: 0 or what is left, never no reward."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from tests.faults.rolling import Acting, Forked, a_task, solve, states

from worldfork.core.errors import SandboxDied
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import Episode, FailureKind
from worldfork.rollout.faults import FaultRules
from worldfork.rollout.group import run_rollouts

pytestmark = pytest.mark.filterwarnings("ignore:no cgroup of this host:RuntimeWarning")

DEEDS = [
    "kill -9 -1",
    "kill -9 1; kill -TERM 1; kill -ABRT 1",
    "kill -9 $PPID",
    "kill -STOP -1",
    "dd if=/dev/zero of=/big bs=1M count=200 2>/dev/null",
    "while dd if=/dev/zero of=/big$i bs=1M count=20 2>/dev/null; do i=x$i; done",
    "python3 -c 'x = bytearray(1 << 30)'",
    "python3 -c 'import mmap; m = mmap.mmap(-1, 1 << 30); m.write(b\"x\" * (1 << 30))'",
    ":(){ :|:& };:",
    "for i in $(seq 100); do setsid sleep 1000 & done",
    "dd if=/dev/zero of=/dev/shm/big bs=1M count=400 2>/dev/null",
    "rm -rf --no-preserve-root / 2>/dev/null",
    "chmod 000 /workspace; mv /workspace /elsewhere",
    "rm -rf /workspace; ln -s / /workspace",
    "rm answer.txt; mkfifo answer.txt",
    "rm answer.txt; mkdir answer.txt; touch answer.txt/x",
    "rm answer.txt; ln -s /etc/hostname answer.txt",
    "i=0; while [ $i -lt 20000 ]; do mkdir -p d$i; i=$((i+1)); done",
    "umount -a; mount -t tmpfs none /workspace",
    "sleep 1000",
]


def roll(act: Any, **limits: Any) -> Episode:
    async def one() -> Episode:
        rolling = run_rollouts([a_task(**limits)], Acting(act), starts=await states(), verifier=Forked())
        return (await rolling)[0]

    return asyncio.run(one())


@pytest.mark.parametrize("solves", [False, True])
@pytest.mark.parametrize("line", DEEDS)
def test_its_own_doing_is_scored(line: str, solves: bool) -> None:
    async def act(sandbox: AsyncSandbox, turn: Any) -> None:
        if solves:
            await solve(sandbox, turn)
        await sandbox.sh(line, timeout=3, working_dir="/workspace")
        await sandbox.sh("true", timeout=3)

    episode = roll(act)
    assert episode.failure is None, episode.failure
    assert episode.attempt == 1
    assert episode.reward in ((0.0, 1.0) if solves else (0.0,))


def test_a_program_on_the_host_cannot_void_its_score_by_ending_its_sandbox() -> None:
    async def end(sandbox: AsyncSandbox, turn: Any) -> None:
        await (await AsyncSandbox.connect(sandbox.sandbox_id)).terminate()

    async def end_and_stumble(sandbox: AsyncSandbox, turn: Any) -> None:
        await end(sandbox, turn)
        await sandbox.sh("true")

    for act in (end, end_and_stumble):
        episode = roll(act)
        assert (episode.reward, episode.policy_end) == (0.0, SandboxDied.code)


def test_a_turn_without_end_is_graded_by_what_it_left() -> None:
    async def act(sandbox: AsyncSandbox, turn: Any) -> None:
        await solve(sandbox, turn)
        await sandbox.sh("while :; do :; done")

    episode = roll(act, policy_wall_s=1.5)
    assert (episode.reward, episode.policy_end) == (1.0, "timed_out")


def test_what_runs_on_after_the_turn_changes_nothing_any_more() -> None:
    async def act(sandbox: AsyncSandbox, turn: Any) -> None:
        await solve(sandbox, turn)
        line = "while :; do echo wrong > /workspace/answer.txt; echo right > /workspace/answer.txt; done"
        await sandbox.sh(f"setsid sh -c '{line}' >/dev/null 2>&1 &", timeout=3)

    episode = roll(act)
    assert episode.reward in (0.0, 1.0)
    assert episode.timings.carry_s is not None
    assert episode.timings.carry_s < 20


def test_a_sandbox_that_another_process_ends_is_no_score() -> None:
    async def wait(sandbox: AsyncSandbox, turn: Any) -> None:
        program = "import sys; from worldfork import Sandbox; Sandbox.connect(sys.argv[1]).terminate()"
        ending = await asyncio.create_subprocess_exec(sys.executable, "-c", program, sandbox.sandbox_id)
        assert await ending.wait() == 0
        await sandbox.sh("true")

    async def one() -> Episode:
        rules = FaultRules(retries={})
        rolling = run_rollouts([a_task()], Acting(wait), starts=await states(), verifier=Forked(), rules=rules)
        return (await rolling)[0]

    failure = asyncio.run(one()).failure
    assert failure is not None
    assert failure.kind is FailureKind.LOST
