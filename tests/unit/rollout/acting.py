"""What tests of rollouts put in the places of a policy, a verifier and a starting state."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar

from tests.unit.reward.played import PlayedSandbox, a_task

from worldfork.core.errors import NotFound
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.task import Task
from worldfork.reward.verifier import Case, Grade

GRADE = Grade(
    reward=0.5,
    parts={"fraction": 0.5},
    expected=("a", "b"),
    passed=("a",),
    failed=("b",),
    untouched=("a",),
    end="exited",
    sandbox_id="sb-g",
    grade_s=0.4,
)


class Verifier:
    """Gives the same grade to all, or what a function makes of a case."""

    verifier_id = "played"
    trust = "fresh"
    needs_end = False

    def __init__(self, error: Exception | None = None, give: Callable[[Case], Grade] | None = None) -> None:
        self.error = error
        self.give = give
        self.cases: list[Case] = []

    async def grade(self, case: Case) -> Grade:
        self.cases.append(case)
        if self.error is not None:
            raise self.error
        return GRADE if self.give is None else self.give(case)

    async def grade_nothing(self, case: Case) -> Grade:
        return Grade(0.0, expected=("a", "b"), untouched=("a",))


class Box(PlayedSandbox):
    """A sandbox of a rollout."""

    seed = 7

    def __init__(self, sandbox_id: str = "sb-played") -> None:
        super().__init__()
        self.sandbox_id = sandbox_id


class Start:
    """A starting state; each fork calls `make`, which may raise."""

    snapshot_id = "sn-played"
    originals: ClassVar = {"a.py": b"old"}
    solution = Edits({"a.py": EditedFile(b"right")})

    def __init__(self, make: Callable[[int], Box] | None = None) -> None:
        self.make = make or (lambda index: Box())
        self.begun = 0
        self.ended = 0

    @contextlib.asynccontextmanager
    async def fork(self, index: int = 0, *, seed: int | None = None, **_: Any) -> AsyncIterator[Any]:
        box = self.make(index)
        self.begun += 1
        try:
            yield box
        finally:
            self.ended += 1


class Starts:
    """One starting state for all tasks."""

    def __init__(self, start: Start | Exception) -> None:
        self.start = start

    async def get(self, task: Task) -> Any:
        if isinstance(self.start, Exception):
            raise self.start
        return self.start

    async def at(self, snapshot_id: str, task: Task) -> Any:
        if isinstance(self.start, Exception) or self.start.snapshot_id != snapshot_id:
            raise NotFound(f"no {snapshot_id}")
        return self.start


class Acting:
    """A policy made of one function of (sandbox, turn), or that raises."""

    def __init__(
        self, what: BaseException | Callable[[Any, Any], Awaitable[object]] | None = None, policy_id: str = "acting"
    ) -> None:
        self.policy_id = policy_id
        self.what = what

    async def agent(self, sandbox: Any, task: Task, turn: Any) -> None:
        if isinstance(self.what, BaseException):
            raise self.what
        if self.what is not None:
            await self.what(sandbox, turn)


class Left:
    """What carrying out gives."""

    def __init__(self, edits: Edits, end_snapshot_id: str = "sn-end") -> None:
        self.edits = edits
        self.end_snapshot_id = end_snapshot_id
        self.dropped = 0

    async def drop(self) -> None:
        self.dropped += 1


__all__ = ["GRADE", "Acting", "Box", "Left", "Start", "Starts", "Verifier", "a_task"]
