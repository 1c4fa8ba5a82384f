"""Small real rollouts: a task of one file, forks of a bare world, and a verifier that forks too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.laying import lay_edits
from worldfork.reward.verifier import Case, Grade
from worldfork.rollout.starts import StartingStates
from worldfork.worlds.world import async_world

RIGHT = "right\n"
ANSWER = "/workspace/answer.txt"


def a_task(**limits: Any) -> Task:
    values: dict[str, Any] = {
        "policy_wall_s": 20, "start_wall_s": 30, "grade_wall_s": 20, "memory_mb": 128, "disk_mb": 64, "pids": 64,
    }  # fmt: skip
    return Task(
        "faults/answer",
        "",
        files={"answer.txt": "wrong\n"},
        editable=("answer.txt",),
        hidden_tests={"test_none.py": ""},
        limits=TaskLimits(**{**values, **limits}),
    )


async def states() -> StartingStates:
    async def nothing(sandbox: AsyncSandbox) -> None:
        await sandbox.make_directory("/workspace")

    world = await async_world("tests-faults-rollouts", build=nothing, network="none")
    return await StartingStates.open(world)


class Forked:
    """Looks at the answer in a fresh fork of the start; `meddle` is called with each fork."""

    verifier_id = "forked"
    trust = "fresh"
    needs_end = False

    def __init__(self, meddle: Callable[[Case, AsyncSandbox], Awaitable[None]] | None = None) -> None:
        self._meddle = meddle

    async def grade(self, case: Case) -> Grade:
        async with case.start.fork(grading=True) as box:
            await lay_edits(box, case.edits)
            if self._meddle is not None:
                await self._meddle(case, box)
            # A removed answer is a wrong one.
            found = await box.run("cat", [ANSWER], timeout=10)
        return Grade(1.0 if found.stdout == RIGHT else 0.0, sandbox_id=box.sandbox_id)

    async def grade_nothing(self, case: Case) -> Grade:
        return Grade(0.0)


class Acting:
    """A policy made of one function of (sandbox, turn)."""

    def __init__(self, act: Callable[[AsyncSandbox, Any], Awaitable[object]], policy_id: str = "acting") -> None:
        self.policy_id = policy_id
        self._act = act

    async def agent(self, sandbox: AsyncSandbox, task: Task, turn: Any) -> None:
        await self._act(sandbox, turn)


async def solve(sandbox: AsyncSandbox, turn: Any) -> None:
    """Write the answer."""
    await sandbox.write_file(ANSWER, RIGHT)
