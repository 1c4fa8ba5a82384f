"""What is known of an open rollout, on disk, so that another process can attach to it by id.

::

    scratch/rollouts/<sandbox id>/facts.json    what it is of
                                  steps.jsonl   what was done by each handle, until it is graded
                                  end.json      what the policy left, once that was carried out
                                  episode.json  the result, once it is there
                                  death.json    how the sandbox ended, where its process saw that
                                  ending.json   when somebody began to stop the sandbox to read what is left
                                  failed.json   the last grading that failed for a moment's reason
                                  to_add.json   what the episode names, until it is in the run that it belongs to
                                  closed        that nobody wants it any more
                                  lock          held by whoever grades or closes it
    scratch/rollouts/tasks/<task hash>.json     the tasks that these are of
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from worldfork.core.errors import ConfigError, Locked, NotFound
from worldfork.core.ids import check_id
from worldfork.records.death import Death, DeathCause
from worldfork.records.edits import Edits
from worldfork.records.episode import Episode
from worldfork.records.task import Task
from worldfork.rollout.flocks import close_lock, open_lock, try_lock

REMEMBERED_S = 86_400.0
"""How long after its lease a rollout can still be asked for its episode."""

LOOK_EVERY_S = 60.0
"""How often a process looks for rollouts that may be forgotten."""

_RETRY_S = 0.02
_ALONE_S = 30.0
"""How long to wait for others who keep a task; each takes milliseconds."""
_TASKS = "tasks"
_looked_s: dict[Path, float] = {}


@dataclass(frozen=True)
class Facts:
    """What an open rollout is of."""

    sandbox_id: str
    task_hash: str
    verifier_id: str
    """What is to grade it."""
    policy_id: str
    index: int
    seed: int
    attempt: int
    opened_s: float
    """Seconds since the Unix epoch, as is the next."""
    ends_s: float
    """When its lease is over."""
    world: str | None = None
    """The snapshot that the task's files were laid over, where one was named."""
    run: str | None = None
    """The directory of the run to which the episode is added."""
    start_snapshot_id: str | None = None
    """The starting state that the sandbox was forked from: what a task stands on may mean another one later."""
    group_id: str = ""

    def expect(self, verifier_id: str) -> None:
        """Refuse another verifier than the one that is to grade.

        Raises:
            ConfigError: it is another one.
        """
        if verifier_id != self.verifier_id:
            given = "ScoreVerifier(SCORE) of the function" if self.verifier_id.startswith("score:") else "the one"
            raise ConfigError(
                f"{self.sandbox_id} was opened to be graded by {self.verifier_id}, not by {verifier_id}",
                remedy=f"attach with `verifier=` {given} that it was opened with, or say other_verifier=True",
                field="verifier",
            )


@dataclass(frozen=True)
class End:
    """What was carried out of a policy's sandbox."""

    edits: Edits | None
    """None where the sandbox did not live to give any, by the policy's own doing."""
    end_snapshot_id: str | None
    policy_end: str


class Ledger:
    """The directory of one open rollout. Blocking, each call a few small files."""

    def __init__(self, root: Path, sandbox_id: str) -> None:
        self.path = root / check_id("sb", sandbox_id)
        self._tasks = root / _TASKS

    def begin(self, facts: Facts, task: Task) -> None:
        """Write down a new rollout."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._keep_task(task, facts.ends_s)
        # So that it can be closed on a disk that is full.
        (self.path / "lock").touch(mode=0o600)
        self._write("facts.json", asdict(facts))
        # So that nobody has to read it to learn when it may go.
        os.utime(self.path / "facts.json", (facts.ends_s, facts.ends_s))

    def facts(self) -> Facts:
        """Return what the rollout is of.

        Raises:
            NotFound: no rollout of this home is called so, or it was over long ago.
        """
        data = self._read("facts.json")
        if data is None:
            raise NotFound(f"no open rollout is called {self.path.name}", sandbox_id=self.path.name)
        return Facts(**{each.name: data[each.name] for each in fields(Facts) if each.name in data})

    def task(self) -> Task:
        """Return the problem.

        Raises:
            NotFound: as of `facts`.
        """
        data = _read(self._tasks / f"{self.facts().task_hash}.json")
        if data is None:
            raise NotFound(f"the task of {self.path.name} is gone", sandbox_id=self.path.name)
        return Task.from_json(data)

    def _keep_task(self, task: Task, until_s: float) -> None:
        """Keep a task for as long as a rollout of it can be asked for; once for all of them, since it may be large."""
        self._tasks.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._tasks / f"{task.task_hash}.json"
        with _alone(self._tasks):
            if not path.exists():
                _write(path, task.to_json())
                os.utime(path, (until_s, until_s))
            elif path.stat().st_mtime < until_s:
                os.utime(path, (until_s, until_s))

    def add_step(self, line: Mapping[str, Any]) -> None:
        """Write down a step, or another line of `Recorder.log`; what cannot be written is only missing."""
        with contextlib.suppress(OSError):
            steps = os.open(self.path / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # In one piece: others add to it too.
                text = json.dumps(line, separators=(",", ":"), ensure_ascii=False)
                os.write(steps, text.encode("utf-8", "replace") + b"\n")
            finally:
                os.close(steps)

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yield what was done by all handles, in the order in which it ended; what cannot be read is left out."""
        try:
            with (self.path / "steps.jsonl").open("rb") as file:
                for line in file:
                    with contextlib.suppress(ValueError):
                        data = json.loads(line)
                        if isinstance(data, dict):
                            yield data
        except FileNotFoundError:
            return

    def set_end(self, end: End) -> None:
        """Write down what the policy left."""
        edits = None if end.edits is None else base64.b64encode(end.edits.to_bytes()).decode("ascii")
        self._write("end.json", {"edits": edits, "snapshot": end.end_snapshot_id, "policy_end": end.policy_end})

    def end(self) -> End | None:
        """Return what the policy left; None where that is not known yet."""
        data = self._read("end.json")
        if data is None:
            return None
        edits = None if data["edits"] is None else Edits.from_bytes(base64.b64decode(data["edits"]))
        return End(edits, data["snapshot"], data["policy_end"])

    def forget_end(self) -> None:
        """Let go of what the policy left and did: the episode is there, and the files may be large."""
        for name in ("end.json", "steps.jsonl", "failed.json", "ending.json"):
            (self.path / name).unlink(missing_ok=True)

    def states(self) -> set[str] | None:
        """Return the final states that stay by what is written here; None while it may be graded yet."""
        if not self.path.exists():
            return set()
        episode = self.episode()
        if episode is None:
            return set() if self.closed and self._is_left() else None
        return set() if episode.final_snapshot_id is None else {episode.final_snapshot_id}

    def set_episode(self, episode: Episode) -> None:
        """Write down the result."""
        self._write("episode.json", episode.to_json())

    def episode(self) -> Episode | None:
        """Return the result; None where there is none yet."""
        data = self._read("episode.json")
        return None if data is None else Episode.from_json(data)

    def set_failed(self, episode: Episode, now_s: float) -> None:
        """Write down a failure that is not for ever, for those who wait already; what cannot be is only missing."""
        with contextlib.suppress(OSError):
            self._write("failed.json", {"episode": episode.to_json(), "at_s": now_s})

    def failed(self, since_s: float) -> Episode | None:
        """Return the failure of a grading that came to its end after this time since the Unix epoch."""
        data = self._read("failed.json")
        return None if data is None or data["at_s"] < since_s else Episode.from_json(data["episode"])

    def set_to_add(self, blobs: Sequence[bytes]) -> None:
        """Write down what an episode names that is to be added to its run; before the episode itself."""
        self._write("to_add.json", {"blobs": [base64.b64encode(each).decode("ascii") for each in blobs]})

    def to_add(self) -> list[bytes] | None:
        """Return what the episode names; None where it is in its run, or belongs to none."""
        data = self._read("to_add.json")
        return None if data is None else [base64.b64decode(each) for each in data["blobs"]]

    def set_added(self) -> None:
        """Write down that the episode is in its run."""
        (self.path / "to_add.json").unlink(missing_ok=True)

    def set_ending(self, now_s: float) -> None:
        """Write down that the sandbox is stopped from now on to read what is left: a death by that is no one's wish."""
        self._write("ending.json", {"at_s": now_s})

    @property
    def ending_s(self) -> float | None:
        """When somebody last began to stop the sandbox to read what is left, seconds since the Unix epoch; or None."""
        data = self._read("ending.json")
        return None if data is None else float(data["at_s"])

    def set_death(self, death: Death) -> None:
        """Write down how the sandbox ended, by whoever started it: nobody else can know."""
        with contextlib.suppress(FileNotFoundError):
            self._write("death.json", {"cause": death.cause.value, "detail": death.detail})

    def death(self) -> Death | None:
        """Return how the sandbox ended; None where that is not known yet."""
        data = self._read("death.json")
        return None if data is None else Death(DeathCause(data["cause"]), data["detail"])

    def set_closed(self) -> None:
        """Write down that nobody wants it any more."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / "closed").touch()

    @property
    def closed(self) -> bool:
        """Whether nobody wants it any more."""
        return (self.path / "closed").exists()

    @contextlib.asynccontextmanager
    async def turn(self, wait_s: float) -> AsyncIterator[None]:
        """Be the only one, of all threads and processes, that grades or closes this rollout.

        Raises:
            Locked: somebody else does so for longer than `wait_s`. NotFound: it was over long ago.
        """
        try:
            lock = open_lock(self.path / "lock", os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            raise NotFound(f"no open rollout is called {self.path.name}", sandbox_id=self.path.name) from None
        try:
            # Asked again and again: a waiting thread could not be cancelled.
            end_s = asyncio.get_running_loop().time() + wait_s
            while not try_lock(lock):
                if asyncio.get_running_loop().time() >= end_s:
                    raise Locked(f"somebody grades {self.path.name}", remedy="ask again later", holders=[])
                await asyncio.sleep(_RETRY_S)
            yield
        finally:
            close_lock(lock)

    def _is_left(self) -> bool:
        """Whether nobody grades or closes it now."""
        try:
            lock = open_lock(self.path / "lock", os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            return try_lock(lock)
        finally:
            close_lock(lock)

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        _write(self.path / name, data)

    def _read(self, name: str) -> dict[str, Any] | None:
        return _read(self.path / name)


def forget_old(root: Path, now_s: float) -> None:
    """Remove what is known of rollouts whose lease was over long ago. Blocking; looks once in a while only."""
    if now_s < _looked_s.get(root, 0.0) + LOOK_EVERY_S:
        return
    _looked_s[root] = now_s
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if os.stat(f"{entry.path}/facts.json").st_mtime + REMEMBERED_S < now_s:
                    shutil.rmtree(entry.path)
    with contextlib.suppress(OSError, Locked), _alone(root / _TASKS), os.scandir(root / _TASKS) as entries:
        for entry in entries:
            if entry.stat().st_mtime + REMEMBERED_S < now_s:
                os.unlink(entry)


def _write(path: Path, data: Mapping[str, Any]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(data, ensure_ascii=True), encoding="ascii")
    part.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}", path=str(path)) from error
    return dict(data)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Be the only one who adds to a directory or removes from it.

    Raises:
        Locked: somebody else does so for long.
    """
    lock = open_lock(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        pause, end_s = threading.Event(), time.monotonic() + _ALONE_S
        while not try_lock(lock):
            if time.monotonic() >= end_s:
                raise Locked(f"somebody holds {directory}", remedy="end the process that does", holders=[])
            pause.wait(_RETRY_S)
        yield
    finally:
        close_lock(lock)
