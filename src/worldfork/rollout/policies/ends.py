"""The two ends of every scale: a policy that does nothing, and one that knows the answer."""

from __future__ import annotations

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.task import Task
from worldfork.reward.places import inside_task
from worldfork.rollout.turn import Turn


class NopPolicy:
    """Does nothing: the lower end of every scale."""

    policy_id = "nop"

    async def agent(self, sandbox: AsyncSandbox, task: Task, turn: Turn) -> None:
        """Return at once."""


class ReferencePolicy:
    """Writes the task's own solution: the upper end of every scale.

    The turn tells it the solution where that is not in the task itself.
    """

    policy_id = "reference"
    tells_solution = True
    """Its turns are told the reference."""

    async def agent(self, sandbox: AsyncSandbox, task: Task, turn: Turn) -> None:
        """Lay the solution over the starting state."""
        edits = turn.solution
        if edits is None:
            for path, text in task.solution.items():
                await sandbox.write_file(inside_task(path), text)
            return
        for path in edits.removed:
            await sandbox.delete_file(inside_task(path))
        for path, file in edits.files.items():
            await sandbox.write_file(inside_task(path), file.content, mode=0o755 if file.executable else 0o644)
