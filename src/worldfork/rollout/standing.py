"""From which starting states a run goes on: those that its earlier rollouts stand on, or equal ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from worldfork.core.errors import ConfigError, FormatUnsupported, NotFound
from worldfork.core.threads import in_thread
from worldfork.records.task import Task
from worldfork.reward.verifier import Start
from worldfork.rollout.contents import told_of
from worldfork.rollout.orders import Starts

Stood = Mapping[str, str | None]
"""Id of a starting state's snapshot -> digest of its content, where that was told."""

_log = logging.getLogger("worldfork")


class Standing:
    """Gives each task the starting state that the run's rollouts of it stand on. For one event loop.

    What a branch or a directory holds changes, and worlds are built again: rewards from two starting states are not to
    be compared with each other.

    Args:
        states: where starting states come from.
        stood: task hash -> what scored rollouts of the run stand on.
    """

    def __init__(self, states: Starts, stood: Mapping[str, Stood]) -> None:
        self._states = states
        self._stood = stood
        self._held: dict[str, Start] = {}

    async def settle(self, tasks: Iterable[Task]) -> None:
        """Decide for tasks that have rollouts.

        Raises:
            ConfigError: those of a task stand on a state that is gone, and what would be made for it is not equal.
        """
        for task in tasks:
            if task.task_hash not in self._stood:
                continue
            try:
                found = await self._find(task)
            except Exception:
                # Each rollout of the task meets the same, and tells it.
                _log.debug("no starting state for %s", task.task_id, exc_info=True)
                continue
            self._held[task.task_hash] = await self._expected(found, task)

    async def get(self, task: Task) -> Start:
        """Return a task's starting state."""
        if task.task_hash not in self._stood:
            return await self._states.get(task)
        held = self._held.get(task.task_hash)
        if held is None:
            held = self._held[task.task_hash] = await self._expected(await self._find(task), task)
        return held

    async def at(self, snapshot_id: str, task: Task) -> Start:
        """Return the state that a task had when it was made."""
        return await self._states.at(snapshot_id, task)

    async def _find(self, task: Task) -> Start:
        """Return the state that is to be expected: one of those stood on where one is there, else the present one."""
        stood = self._stood[task.task_hash]
        try:
            now, why = await self._states.get(task), None
        except Exception as error:
            now, why = None, error
        if now is not None and now.snapshot_id in stood:
            return now
        for snapshot_id in stood:
            found = await recorded(self._states, snapshot_id, task)
            if found is not None:
                by_now = "none could be made" if now is None else f"it would be {now.snapshot_id}"
                _log.warning("%s goes on from %s, as its run began; by now %s", task.task_id, snapshot_id, by_now)
                return found
        if now is None:
            raise why or NotFound(f"{task.task_id} has no starting state")
        return now

    async def _expected(self, found: Start, task: Task) -> Start:
        for snapshot_id, content in self._stood[task.task_hash].items():
            if not await is_same(self._states, found, snapshot_id, content, task):
                raise ConfigError(
                    f"the run's rollouts of {task.task_id} stand on {snapshot_id}, new ones would on "
                    f"{found.snapshot_id}, which does not hold the same",
                    remedy="name another directory with --run (run=)",
                    field="run",
                    task_id=task.task_id,
                    old=snapshot_id,
                    new=found.snapshot_id,
                )
        return found


async def recorded(states: Starts, snapshot_id: str, task: Task) -> Start | None:
    """Return the state that rollouts stood on; None where it is gone, or does not fit this machine any more."""
    try:
        return await states.at(snapshot_id, task)
    except (NotFound, FormatUnsupported):
        return None


async def is_same(states: Starts, start: Start, snapshot_id: str, content: str | None, task: Task) -> bool:
    """Whether a starting state holds what another one does, as far as that is known.

    Args:
        states: where the other one may be yet.
        start: the one.
        snapshot_id, content: the other one, and the digest of its content where that was told.
        task: whose they are.
    """
    if start.snapshot_id == snapshot_id:
        return True
    if content is None:
        other = await recorded(states, snapshot_id, task)
        content = None if other is None else await in_thread(told_of, other)
    return content is not None and content == await in_thread(told_of, start)


async def start_of(states: Starts, snapshot_id: str | None, content: str | None, task: Task) -> Start:
    """Return the state that a rollout stood on, or an equal one.

    Raises:
        NotFound: there is none. Others: as `StartingStates.get`.
    """
    found = None if snapshot_id is None else await recorded(states, snapshot_id, task)
    if found is not None:
        return found
    now = await states.get(task)
    if snapshot_id is None or not await is_same(states, now, snapshot_id, content, task):
        raise NotFound(
            f"the starting state of the rollout, {snapshot_id or 'which nobody wrote down'}, is gone, and "
            f"{now.snapshot_id}, which the task has by now, is not known to hold the same",
            remedy="bring it back by `worldfork import` or `pull`, or roll out again",
            snapshot_id=snapshot_id,
        )
    return now
