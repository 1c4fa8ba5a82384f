"""What the tests of security share: a sandbox of each form, and programs that try things from inside."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.inside import python

from worldfork import Sandbox
from worldfork.core.errors import WorldforkError
from worldfork.lineage.live import Live
from worldfork.records.sandbox import SandboxFacts

FORMS = ("trusted", "user") if os.geteuid() == 0 else ("user",)
"""Root starts sandboxes of both forms; an ordinary user only the second."""
X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="calls of 32-bit and x32 programs are x86's")
ROOT = pytest.mark.root
NOBODY = 65534
INIT = "wf-init\0launch\0"
"""The command line of PID 1 and of supervisors."""

TRY = """
import ctypes, errno, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    answer = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    return "done" if answer >= 0 else errno.errorcode[ctypes.get_errno()]
def attempt(action, *arguments, **named):
    try:
        return action(*arguments, **named)
    except OSError as error:
        return errno.errorcode[error.errno]
def tell(answer):
    print(json.dumps(answer))
def is_ours(pid):
    try:
        return open(f"/proc/{pid}/cmdline").read() == "wf-init\\0launch\\0"
    except OSError:
        return False  # it ended meanwhile
supervisors = [int(p) for p in os.listdir("/proc") if p.isdigit() and p != "1" and is_ours(p)]
"""
"""Begins a program inside: `call` makes a system call, `attempt` anything else; both answer with the error's name."""

Factory = Callable[..., Sandbox]


def attacked(box: Sandbox, program: str, *arguments: str, **options: Any) -> Any:
    """Run a program that begins with `TRY` and ends with `tell(...)`; return what it told."""
    return json.loads(python(box, TRY + program, *arguments, **options))


def cells() -> Any:
    """A fixture for a module's `cell = cells()`: one sandbox of each form, for attacks that leave it as it was."""

    @pytest.fixture(scope="module", params=FORMS)
    def cell(request: pytest.FixtureRequest, home: Path, driver: str) -> Iterator[Sandbox]:
        with in_form(request.param), Sandbox.create(driver=driver, network="none") as box:
            yield box

    return cell


def prisons() -> Any:
    """A fixture for a module's `prison = prisons()`: makes sandboxes of each form, which end with the test."""

    @pytest.fixture(params=FORMS)
    def prison(request: pytest.FixtureRequest, home: Path, driver: str) -> Iterator[Factory]:
        made: list[Sandbox] = []

        def create(**arguments: Any) -> Sandbox:
            arguments.setdefault("network", "none")
            made.append(Sandbox.create(driver=driver, **arguments))
            return made[-1]

        with in_form(request.param):
            yield create
            for box in reversed(made):
                box.terminate()

    return prison


@contextlib.contextmanager
def in_form(form: str) -> Iterator[None]:
    """Have sandboxes started in a form."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLDFORK_FORM", form)
        yield


def live(box: Sandbox) -> Live:
    """What this process holds of a sandbox that it started."""
    return box._inner._live


def facts(box: Sandbox) -> SandboxFacts:
    """What is known of a sandbox: its directory, cgroups, layers."""
    return live(box).facts


def init_pid(box: Sandbox) -> int:
    """The host's number of a sandbox's PID 1."""
    pid = live(box)._pid
    assert pid is not None
    return pid


def pids_inside(box: Sandbox) -> dict[int, str]:
    """The host's numbers of a sandbox's processes, PID 1 among them, and their command lines; the dead have none."""
    parents, lines = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            lines[int(name)] = Path(f"/proc/{name}/cmdline").read_text()
    inside, added = set[int](), {init_pid(box)}
    while added:
        inside |= added
        added = {pid for pid, parent in parents.items() if parent in inside} - inside
    return {pid: lines[pid] for pid in inside if lines.get(pid)}


@functools.cache
def call_numbers(names: tuple[str, ...]) -> dict[str, int]:
    """The numbers of system calls by name, as the compiler knows them; those that this machine lacks are left out."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the numbers of system calls come from a C compiler, and there is none")
    text = "#include <sys/syscall.h>\n" + "".join(f"@{name} SYS_{name}\n" for name in names)
    done = subprocess.run([compiler, "-E", "-P", "-"], input=text, capture_output=True, text=True, check=True)
    pairs = [line[1:].split() for line in done.stdout.splitlines() if line.startswith("@")]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def works_or_fails_typed(create: Callable[[], Sandbox]) -> Sandbox | None:
    """Start a sandbox that may be impossible: it answers, or the error is one of ours."""
    try:
        box = create()
    except WorldforkError:
        return None
    assert box.run("sh", ["-c", "echo on"], working_dir="/").stdout == "on\n"
    return box


def tree(top: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below a directory of the host: mode, size and content or target, to compare before and after."""
    found = {}
    for directory, names, files in os.walk(top):
        for name in [*names, *files]:
            path = Path(directory, name)
            info = path.lstat()
            content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
            found[str(path.relative_to(top))] = (info.st_mode, info.st_size if path.is_file() else 0, content)
    return found
