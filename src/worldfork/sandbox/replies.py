"""What init answers, as values: the decoded payloads of REPLY and of the file operations."""

from __future__ import annotations

import os
import signal
import struct
from dataclasses import dataclass
from typing import Final

from worldfork.core.errors import PathError, SandboxError
from worldfork.sandbox.command import CommandResult, Reason, signal_name
from worldfork.sandbox.wire import Cursor, MalformedFrame

_LISTED = struct.Struct("<IBBBxiiQQ")
_INFO = struct.Struct("<QIIIII")
_PAIR_U32 = struct.Struct("<II")
_PAIR_U64 = struct.Struct("<QQ")
_FILE = struct.Struct("<BIIIQqQI")
_STATUSES: Final = ("running", "exited", "signaled", "oom_killed")


@dataclass(frozen=True, slots=True)
class ListedProcess:
    """One command that runs in a sandbox, or a kept one that ended."""

    pid: int
    """As seen inside the sandbox."""
    status: str
    """"running", "exited", "signaled" or "oom_killed"."""
    keep: bool
    stdin_open: bool
    exit_code: int | None
    """None while it runs."""
    signal: int | None
    started_s: float
    """Unix time."""
    ended_s: float | None
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InitInfo:
    """How a sandbox's init is doing."""

    uptime_s: float
    running_commands: int
    processes: int
    """Every process inside but init and its supervisors."""
    clients: int
    held: bool
    frozen: bool


@dataclass(frozen=True, slots=True)
class HoldReport:
    """What still runs while new commands wait."""

    running_commands: int
    other_processes: int


@dataclass(frozen=True, slots=True)
class Account:
    """What the ended commands of a sandbox used."""

    cpu_s: float
    oom_kills: int


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One directory entry, or one file."""

    name: str
    kind: str
    """f file, d directory, l link, p FIFO, s socket, c character device, b block device."""
    mode: int
    """Permission bits, set-id and sticky bits included."""
    uid: int
    gid: int
    size_bytes: int
    mtime_ns: int
    inode: int
    links: int
    target: str
    """Where a link points, as written; empty for all else."""


def read_processes(payload: bytes) -> list[ListedProcess]:
    """LIST's answer."""
    cursor = Cursor(payload)
    return [_read_process(cursor) for _ in range(cursor.u32())]


def _read_process(cursor: Cursor) -> ListedProcess:
    pid, status, keep, stdin_open, exit_code, number, started_ms, ended_ms = cursor.take(_LISTED)
    if status >= len(_STATUSES):
        raise MalformedFrame(f"a process has the unknown status {status}")
    return ListedProcess(
        pid=pid,
        status=_STATUSES[status],
        keep=bool(keep),
        stdin_open=bool(stdin_open),
        exit_code=exit_code if status else None,
        signal=number or None,
        started_s=started_ms / 1000,
        ended_s=ended_ms / 1000 if ended_ms else None,
        argv=tuple([cursor.text() for _ in range(cursor.u32())]),
    )


def read_info(payload: bytes) -> InitInfo:
    """INFO's answer."""
    uptime_ms, commands, processes, clients, held, frozen = Cursor(payload).take(_INFO)
    return InitInfo(uptime_ms / 1000, commands, processes, clients, bool(held), bool(frozen))


def read_hold(payload: bytes) -> HoldReport:
    """HOLD's answer."""
    commands, processes = Cursor(payload).take(_PAIR_U32)
    return HoldReport(commands, processes)


def read_account(payload: bytes) -> Account:
    """ACCOUNT's answer."""
    cpu_us, oom_kills = Cursor(payload).take(_PAIR_U64)
    return Account(cpu_us / 1e6, oom_kills)


def read_mapped(payload: bytes) -> list[tuple[int, int]]:
    """MAPPED's answer: (device, inode) of each file."""
    cursor = Cursor(payload)
    pairs = [cursor.take(_PAIR_U64) for _ in range(cursor.u32())]
    return [(device, inode) for device, inode in pairs]


def read_files(data: bytes) -> list[FileRecord]:
    """What the file operations `list` and `stat` print."""
    cursor = Cursor(data)
    records = []
    while not cursor.at_end:
        kind, mode, uid, gid, size_bytes, mtime_ns, inode, links = cursor.take(_FILE)
        name, target = cursor.text(), cursor.text()
        records.append(FileRecord(name, chr(kind), mode & 0o7777, uid, gid, size_bytes, mtime_ns, inode, links, target))
    return records


def read_file(data: bytes) -> FileRecord:
    """What the file operation `stat` prints."""
    records = read_files(data)
    if len(records) != 1:
        raise MalformedFrame(f"{len(records)} files where one was asked for")
    return records[0]


_SENTENCES: Final = {
    "read": "cannot read",
    "write": "cannot write",
    "list": "cannot list",
    "stat": "cannot look at",
    "delete": "cannot delete",
    "mkdir": "cannot make the directory",
    "symlink": "cannot make the link",
    "chmod": "cannot change the mode of",
    "rename": "cannot rename",
    "lay": "cannot lay files below",
}


def builtin_error(result: CommandResult, operation: str, path: str, *, sandbox_id: str) -> SandboxError | None:
    """The error that a file operation's result stands for; None when it succeeded."""
    if result.ok:
        return None
    said = result.stderr.strip()
    what = f"{_SENTENCES.get(operation, operation)} {path}"
    if result.reason is Reason.EXITED:
        why = said or os.strerror(result.exit_code)
        return PathError(f"{what}: {why}", path=path, errno=result.exit_code, sandbox_id=sandbox_id)
    if result.reason is Reason.OUTPUT_LIMIT:
        said = "the answer is larger than this call's limit"
    elif result.reason is Reason.SIGNALED:
        said = f"the operation was ended by {signal_name(result.signal or signal.SIGKILL)}"
    return SandboxError(f"{what}: {said or result.reason.value}", sandbox_id=sandbox_id, path=path)
