"""Which states at the end of a run's rollouts stay, and in which order they go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from worldfork.core.errors import WorldforkError
from worldfork.records.episode import Episode, ranked
from worldfork.rollout.leftovers import let_go, settle, take_over, wait_lasting
from worldfork.rollout.outcome import Outcome
from worldfork.rollout.stopping import Prefix

_log = logging.getLogger("worldfork")


class FinalStates:
    """The states that a run keeps: of all its rollouts, or of the best of each group. For one event loop.

    What is written down always comes before what is done: a state is on disk before an episode names it, and is deleted
    after its episode was written without it. Whatever process dies in between, the journal tells which of the states
    that bear its run's label stay.

    Args:
        keep: `best`, `all` or None.
        prefix_of: gives a task's group as far as it has come. Of a group that may yet be cut only those that count in
            any case are compared: the best of the others may lie behind the cut.
    """

    def __init__(self, keep: str | None, prefix_of: Callable[[str], Prefix]) -> None:
        self.keep = keep
        self._prefix_of = prefix_of
        self._named: dict[str, Episode] = {}
        """Snapshot id -> the episode that has it."""
        self._best: dict[str, Episode] = {}
        self._open: dict[str, dict[int, Episode]] = {}
        """Task hash -> episodes by index that have not been compared with the best yet."""
        self._going: list[str] = []

    async def know(self, episodes: list[Episode], book: Path | None) -> list[Episode]:
        """Take what an earlier process kept; return the episodes that lose their states by that, without them.

        Raises:
            StoreError: it could not be written down whose they are now.
        """
        # A state that certainly stays is left alone: it is the caller's.
        mine = [
            each
            for each in episodes
            if each.final_snapshot_id is not None
            and (self.keep == "best" or not self._prefix_of(each.task_hash).counts(each.index))
        ]
        await take_over([str(each.final_snapshot_id) for each in mine], book)
        lost: list[Episode] = []
        for episode in mine:
            lost += self.add(episode)
        return lost

    async def lasting(self, outcome: Outcome) -> Outcome:
        """Return an outcome once the state that it names is on disk; without it where that cannot be."""
        snapshot_id = outcome.episode.final_snapshot_id
        if snapshot_id is None:
            return outcome
        try:
            await wait_lasting(snapshot_id)
        except (WorldforkError, OSError) as error:
            _log.warning("the state at the end of %s is not kept: %s", outcome.episode.sandbox_id, error)
            self._going.append(snapshot_id)
            return replace(outcome, episode=_without(outcome.episode))
        return outcome

    def add(self, episode: Episode) -> list[Episode]:
        """Take an episode that ended; return those that lose their states by that, it among them, without these."""
        if episode.final_snapshot_id is not None:
            self._named[episode.final_snapshot_id] = episode
            if self.keep == "best":
                self._open.setdefault(episode.task_hash, {})[episode.index] = episode
        return [self._lose(each) for each in self._compare(episode.task_hash)]

    def take_back(self, episode: Episode) -> None:
        """Take note that an episode does not count any more; its state goes."""
        if episode.final_snapshot_id is not None:
            self._lose(episode)

    def decide(self) -> list[Episode]:
        """Compare what is left, now that nothing more comes; return those that lose their states, without them."""
        return [self._lose(each) for task_hash in list(self._open) for each in self._compare(task_hash, all_count=True)]

    def going(self) -> list[str]:
        """Return the states that go by what was decided up to now, once; delete them after that was written."""
        going, self._going = self._going, []
        return going

    async def settle(self, episode: Episode | None = None) -> None:
        """Let what is named stay: one episode's state, or all."""
        chosen = self._named if episode is None else [episode.final_snapshot_id]
        settled = {each: self._named.pop(each) for each in list(chosen) if each in self._named}
        await settle({str(snapshot_id): each.sandbox_id for snapshot_id, each in settled.items()})

    async def forsake(self) -> None:
        """Delete all: nobody was told of any, and nothing names them."""
        named, self._named = list(self._named), {}
        await let_go([*self.going(), *named])

    def _compare(self, task_hash: str, *, all_count: bool = False) -> Iterator[Episode]:
        """Yield each that is not the best of its group, of those that count."""
        waiting, prefix = self._open.get(task_hash, {}), self._prefix_of(task_hash)
        for index in sorted(waiting):
            if not (prefix.counts(index) or (all_count and not prefix.leaves_out(index))):
                continue
            episode, former = waiting.pop(index), self._best.get(task_hash)
            best = self._best[task_hash] = episode if former is None else ranked([former, episode])[0]
            if former is not None:
                yield former if best is episode else episode
        if not waiting:
            self._open.pop(task_hash, None)

    def _lose(self, episode: Episode) -> Episode:
        snapshot_id = str(episode.final_snapshot_id)
        self._named.pop(snapshot_id, None)
        self._open.get(episode.task_hash, {}).pop(episode.index, None)
        self._going.append(snapshot_id)
        return _without(episode)


def _without(episode: Episode) -> Episode:
    return replace(episode, final_snapshot_id=None)
