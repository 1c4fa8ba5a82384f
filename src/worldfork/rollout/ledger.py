"""What is known of an open rollout, on disk, so that another process can attach to it by id.

::

    scratch/rollouts/<sandbox id>/facts.json    what it is of
                                  end.json      what the policy left, once that was carried out
                                  episode.json  the result, once it is there
                                  death.json    how the sandbox ended, where its process saw that
                                  closed        that nobody wants it any more
                                  lock          held by whoever grades or closes it
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from worldfork.core.errors import ConfigError, Locked, NotFound
from worldfork.core.ids import check_id
from worldfork.records.death import Death, DeathCause
from worldfork.records.edits import Edits
from worldfork.records.episode import Episode
from worldfork.records.task import Task

REMEMBERED_S = 86_400.0
"""How long after its lease a rollout can still be asked for its episode."""

_RETRY_S = 0.02


@dataclass(frozen=True)
class Facts:
    """What an open rollout is of."""

    sandbox_id: str
    task: dict[str, Any]
    """The task's JSON form."""
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

    def read_task(self) -> Task:
        """Return the task."""
        return Task.from_json(self.task)


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

    def begin(self, facts: Facts) -> None:
        """Write down a new rollout."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        """Let go of what the policy left: the episode is there, and the files may be large."""
        (self.path / "end.json").unlink(missing_ok=True)

    def set_episode(self, episode: Episode) -> None:
        """Write down the result."""
        self._write("episode.json", episode.to_json())

    def episode(self) -> Episode | None:
        """Return the result; None where there is none yet."""
        data = self._read("episode.json")
        return None if data is None else Episode.from_json(data)

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
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise NotFound(f"no open rollout is called {self.path.name}", sandbox_id=self.path.name) from None
        try:
            # Asked again and again: a waiting thread could not be cancelled.
            end_s = asyncio.get_running_loop().time() + wait_s
            while not _try_lock(lock):
                if asyncio.get_running_loop().time() >= end_s:
                    raise Locked(f"somebody grades {self.path.name}", remedy="ask again later", holders=[])
                await asyncio.sleep(_RETRY_S)
            yield
        finally:
            os.close(lock)

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        part = self.path / f".{name}.{os.getpid()}"
        part.write_text(json.dumps(data, ensure_ascii=True), encoding="ascii")
        part.replace(self.path / name)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            data = json.loads((self.path / name).read_text(encoding="ascii"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigError(f"{self.path / name} cannot be read: {error}", path=str(self.path / name)) from error
        return dict(data)


def forget_old(root: Path, now_s: float) -> None:
    """Remove the directories of rollouts whose lease was over long ago. Blocking; a look at each name."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if os.stat(f"{entry.path}/facts.json").st_mtime + REMEMBERED_S < now_s:
                    shutil.rmtree(entry.path)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
