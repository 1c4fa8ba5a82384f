"""Processes that die in the middle of something, and a look at what is left of them and in their home."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.stores import exit_code_of, start_child

from worldfork.core.ids import new_id
from worldfork.core.settings import load_settings
from worldfork.lineage import place as places
from worldfork.lineage.snapshots import SnapshotInfo
from worldfork.store import faultpoints
from worldfork.store.home import open_home
from worldfork.store.store import Store

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_PR_SET_CHILD_SUBREAPER = 36
_GONE_S = 5.0
_BEHIND = ("trash:removed", "make_durable:", "sweep:", "collect:", "recover:")
"""Steps of threads in the background, which fall anywhere among those of the work."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Death:
    """How a victim ended."""

    code: int
    """Its exit code, or minus the signal that ended it."""
    step: str
    """The named step at which it was killed; empty if it came through."""
    gone_s: float
    """From its end until the last process that it had started was gone."""
    left: list[str] = field(default_factory=list)
    """Processes that were still there after a while; they are killed."""
    told: list[str] = field(default_factory=list)
    """What it had announced."""


def die_at(step: int, prepare: Callable[[], object], work: Callable[[Tell], object], *, outlive: int = 0) -> Death:
    """Let a process of its own run `prepare`, then kill it at the `step`-th named step of `work`.

    Args:
        step: from 1; 0 kills it nowhere, and it ends without any cleaning up when `work` is through.
        prepare: makes what `work` needs; what it returns is dropped, so it keeps what must live in a closure.
        work: gets a function to announce what has been promised.
        outlive: how many of its processes may outlive it.
    """
    reader, writer = os.pipe()

    def guard() -> None:
        # What the victim leaves becomes a child of this process: nobody can be overlooked.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        victim = start_child(lambda: _live(step, prepare, work, writer))
        code = exit_code_of(victim)
        began_s = time.monotonic()
        left = _wait_for_children(began_s + _GONE_S, outlive)
        _say(writer, {"code": code, "gone_s": time.monotonic() - began_s, "left": left})

    child = start_child(guard)
    os.close(writer)
    lines = [json.loads(line) for line in _read_all(reader).splitlines()]
    assert exit_code_of(child) == 0
    facts = lines[-1]
    told = [line["told"] for line in lines if "told" in line]
    step_name = next((line["step"] for line in lines if "step" in line), "")
    return Death(facts["code"], step_name, facts["gone_s"], facts["left"], told)


def deaths(prepare: Callable[[], object], work: Callable[[Tell], object], *, outlive: int = 0) -> Iterator[Death]:
    """Yield a death at each step in turn, until the work comes through."""
    step = 0
    while True:
        step += 1
        death = die_at(step, prepare, work, outlive=outlive)
        yield death
        if not death.step:
            assert death.code == 0, death
            return


def _live(step: int, prepare: Callable[[], object], work: Callable[[Tell], object], writer: int) -> None:
    kept = prepare()
    passed = 0

    def hook(name: str) -> None:
        nonlocal passed
        if name.startswith(_BEHIND):
            return
        passed += 1
        if passed == step:
            _say(writer, {"step": name})
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()

    faultpoints.install(hook)
    work(lambda text: _say(writer, {"told": text}))
    del kept
    os._exit(0)


def _say(writer: int, facts: dict[str, object]) -> None:
    # Short writes to a pipe are whole.
    os.write(writer, json.dumps(facts).encode() + b"\n")


def _read_all(reader: int) -> str:
    with os.fdopen(reader, encoding="utf-8") as lines:
        return lines.read()


def _wait_for_children(deadline_s: float, spared: int) -> list[str]:
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        mine = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if len(mine) <= spared:
            return []
        if time.monotonic() > deadline_s:
            for pid in mine:
                os.kill(int(pid), signal.SIGKILL)
            return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in mine]
        time.sleep(0.002)


def start_afresh() -> None:
    """Do what the next process does that opens the home: it settles what the dead left."""

    def visit() -> None:
        places.place()
        places.close_places()

    code = exit_code_of(start_child(visit))
    assert code == 0


def wait_clean(home: Path, *, living: Iterable[str] = (), deadline_s: float = 5.0) -> list[str]:
    """Return what `left_in` finds once it finds nothing, or at the deadline: trash is emptied in the background."""
    end_s = time.monotonic() + deadline_s
    while (left := left_in(home, living=living)) and time.monotonic() < end_s:
        time.sleep(0.01)
    return left


def left_in(home: Path, *, living: Iterable[str] = ()) -> list[str]:
    """Return what a home still holds of sandboxes that are not `living`, and layers that no snapshot uses."""
    # A store of its own, since a place settles its home in the background when it is opened.
    with closing(Store.open(open_home(load_settings()))) as store:
        found = [f"{room}/{name}" for room in ("run", "trash") for name in os.listdir(home / room)]
        found += [f"locks/{name}" for name in os.listdir(home / "locks") if not store.is_alive(name)]
        holders, records = store.holders(), store.snapshots()
        found += [f"lease of {holder.holder_id}" for holder in holders]
        used = {layer for record in records for layer in record.layers}
        used |= {layer for holder in holders for layer in holder.layers}
        found += [f"layers/{name}" for name in os.listdir(home / "layers") if name not in used]
        found += [f"lost layer {layer} of a snapshot" for layer in used if not store.layer_path(layer).is_dir()]
    return [words for words in found if not any(sandbox_id in words for sandbox_id in living)]


def init_of(home: Path, sandbox_id: str) -> int:
    """Return the pid of a sandbox's PID 1 as the host sees it: it holds the sandbox's lock."""
    with open(home / "locks" / sandbox_id, "rb") as file:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return int(_FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))[4])


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def deepen(taken: SnapshotInfo, depth: int) -> str:
    """Publish a snapshot of so many layers, those on top of the taken one's being empty."""
    store = places.place().store
    record = store.snapshot(taken.snapshot_id)
    drafts = [store.begin_layer(form=record.form) for _ in range(depth - len(record.layers))]
    for draft in drafts:
        draft.path.mkdir()
    layers = tuple(draft.layer_id for draft in drafts)
    deep = replace(record, snapshot_id=new_id("sn"), layers=layers + record.layers)
    store.publish(deep, layers)
    return deep.snapshot_id
