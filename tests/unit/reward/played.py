"""A sandbox that is played by a test: it keeps files in memory and answers commands with what it was told."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from worldfork.core.errors import PathError
from worldfork.records.cpu import CpuUse
from worldfork.records.death import Death, LimitHits
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.sandbox import DirectoryEntry, ListDirectoryResponse, SandboxStatus
from worldfork.records.task import Task
from worldfork.sandbox.command import CommandResult, Reason


def a_task(**changes: Any) -> Task:
    values: dict[str, Any] = {
        "task_id": "played/one",
        "prompt": "",
        "files": {"a.py": "old", "b.py": "kept"},
        "editable": ("a.py", "new.py"),
        "hidden_tests": {"test_a.py": "hidden"},
        "test_args": ("--timeout=8", "test_a.py"),
        "solution": {"a.py": "right"},
    }
    return Task(**{**values, **changes})


def report(*facts: dict[str, Any], ready: bool = True, finished: bool = True) -> bytes:
    rows = [*([{"ready": 1}] if ready else []), *facts, *([{"finished": 0}] if finished else [])]
    return b"".join(json.dumps(each).encode() + b"\n" for each in rows)


def row(name: str, outcome: str = "passed", **seconds: float) -> dict[str, Any]:
    return {"id": name, "outcome": outcome, **seconds}


def a_result(stdout: bytes, **changes: Any) -> CommandResult:
    values: dict[str, Any] = {
        "exit_code": 0,
        "stdout_bytes": stdout,
        "stderr_bytes": b"",
        "reason": Reason.EXITED,
        "signal": None,
        "wall_s": 1.0,
        "cpu_s": 0.9,
        "max_rss_bytes": 0,
    }
    return CommandResult(**{**values, **changes})


class PlayedSandbox:
    """Answers `run` with the next of its results; an exception is raised instead."""

    def __init__(self, *results: CommandResult | Exception, files: dict[str, bytes] | None = None) -> None:
        self.sandbox_id = "sb-played"
        self.fork_index = 0
        self.results = list(results)
        self.files = dict(files or {})
        self.calls: list[dict[str, Any]] = []
        self.seen: list[dict[str, bytes]] = []
        """The files at each call."""
        self.life = SandboxStatus.RUNNING
        self.death: Death | None = None
        self.hits = LimitHits()
        self.uses: list[CpuUse] = []
        """What its cgroup counts, look by look; none where empty."""

    async def write_file(self, path: str, content: bytes | str, *, mode: int | None = None) -> None:
        self.files[path] = content.encode() if isinstance(content, str) else content

    async def delete_file(self, path: str, *, recursive: bool = False) -> None:
        gone = [each for each in self.files if each == path or (recursive and each.startswith(path + "/"))]
        if not gone:
            raise PathError("no such file", path=path, errno=2)
        for each in gone:
            del self.files[each]

    async def lay_files(
        self, directory: str, files: Mapping[str, tuple[bytes, int]], *, removed: Iterable[str] = ()
    ) -> None:
        for path in (*removed, *files):
            try:
                await self.delete_file(f"{directory}/{path}", recursive=True)
            except PathError as error:
                if error.errno != errno.ENOENT:
                    raise
        for path, (content, mode) in files.items():
            await self.write_file(f"{directory}/{path}", content, mode=mode)

    async def stat_file(self, path: str, *, follow_links: bool = True) -> DirectoryEntry:
        content = await self.read_file(path)
        return DirectoryEntry(path, False, len(content), 0.0)

    async def cause_of_death(self) -> Death | None:
        return self.death

    async def limit_hits(self) -> LimitHits:
        return self.hits

    async def cpu_use(self) -> CpuUse | None:
        return self.uses.pop(0) if self.uses else None

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        if path not in self.files:
            raise PathError("no such file", path=path, errno=2)
        return self.files[path]

    async def list_directory(self, path: str) -> ListDirectoryResponse:
        names = {each.removeprefix(path + "/").split("/")[0] for each in self.files if each.startswith(path + "/")}
        return ListDirectoryResponse(path, tuple(DirectoryEntry(name, True, None, 0.0) for name in sorted(names)))

    async def run(self, command: str, args: list[str], **options: Any) -> CommandResult:
        self.calls.append({"command": command, "args": args, **options})
        self.seen.append(dict(self.files))
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def status(self) -> SandboxStatus:
        return self.life


class PlayedStart:
    """A starting state whose forks are the sandboxes that it was given, in turn.

    Args:
        forks: the first two are those of a calibration, where there are two.
        task: whose.
        twice: whether the first comes again as the third, since a calibration tries the reference twice.
    """

    snapshot_id = "sn-played"

    def __init__(self, *forks: PlayedSandbox | Exception, task: Task | None = None, twice: bool = False) -> None:
        task = task or a_task()
        self.forks = [*forks[:2], *([copy.deepcopy(forks[0])] if twice and len(forks) > 1 else []), *forks[2:]]
        self.ended = 0
        self.asked: list[dict[str, Any]] = []
        self.stilled_ones: list[Any] = []
        """The forks that were ended for what they left on their disks."""
        self.stands_in_the_way: Exception | None = None
        """Of ending one."""
        self.tests = {path: text.encode() for path, text in task.hidden_tests.items()}
        self.solution = Edits({path: EditedFile(text.encode()) for path, text in task.solution.items()})
        self.originals = {path: task.files[path].encode() for path in task.editable if path in task.files}

    @contextlib.asynccontextmanager
    async def stilled(self, sandbox: Any) -> AsyncIterator[str]:
        self.stilled_ones.append(sandbox)
        if isinstance(self.stands_in_the_way, Exception):
            raise self.stands_in_the_way
        yield "sn-stilled"

    @contextlib.asynccontextmanager
    async def fork(self, index: int = 0, **options: Any) -> AsyncIterator[Any]:
        self.asked.append({"index": index, **options})
        # What was left on a disk is as it was; so one goes on as the other.
        fork = self.stilled_ones[-1] if options.get("snapshot_id") == "sn-stilled" else self.forks.pop(0)
        if isinstance(fork, Exception):
            raise fork
        try:
            yield fork
        finally:
            self.ended += 1
