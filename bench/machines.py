"""What the figures of virtual machines share: a root for guests, a guest at rest, its QEMU, and rows of two columns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Options, Skip, bar, figure, say
from bench.rootfs import small_root
from bench.worlds import TRUE, checked, library

GUEST_MEMORY_MB = 192
"""What the sandbox may use; with what the guest's kernel takes for itself the machine has 256 MiB."""
GUEST_RAM_BYTES = 256 << 20
PROGRAMS = ("date", "dd", "head", "kill", "ls", "od", "rm", "seq", "sha256sum", "sync", "tr")
"""That the checks of these figures call, beside those of the small root."""
WARM_PROGRAM = 'while read -r line; do echo "$((count += 1)) $line"; done'
"""Lives in the memory of the frozen guest: counts the lines that it is sent."""

_CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_REST_SHARE = 0.03
_REST_LOOK_S = 0.3
_REST_LIMIT_S = 30.0


@dataclass(frozen=True)
class Row:
    """One line of the table: a value under the machine driver, its bar, and the namespace driver's beside it."""

    what: str
    unit: str
    """As in the names of JSON fields: `ms`, `s`, `mib`, `n`."""
    microvm: float
    limit: float | None = None
    """What the value must stay under; None where it is only reported."""
    namespace: float | None = None
    """None where the row means nothing there."""
    strict: bool = True

    def bar(self) -> dict[str, Any] | None:
        """The bar of this row, as other figures have theirs."""
        if self.limit is None:
            return None
        return bar(self.what, self.microvm, self.limit, unit=self.unit, strict=self.strict)

    def to_json(self) -> dict[str, Any]:
        """One row of the printed table."""
        judged = self.bar()
        return {
            "what": self.what,
            "unit": self.unit,
            "bar": self.limit,
            "microvm": round(self.microvm, 3),
            "namespace": None if self.namespace is None else round(self.namespace, 3),
            "passed": None if judged is None else judged["passed"],
        }


def row_figure(
    name: str,
    title: str,
    accel: str,
    values: dict[str, Any],
    rows: Sequence[Row],
    more: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """The result of a figure that has rows; the bars are thresholds of interpreted machines."""
    bars = [judged for row in rows if (judged := row.bar()) is not None]
    note = "the bars are thresholds for machines that are interpreted (TCG)"
    if accel != "tcg":
        note += f"; this one ran with {accel}"
    taken = figure(name, title, {"accel": accel, **values}, [*bars, *more], note)
    return {**taken, "rows": [row.to_json() for row in rows]}


def guest_root(options: Options) -> str:
    """The base of all sandboxes here, under either driver."""
    return f"dir:{small_root(options, name='rootfs-guest', more=PROGRAMS)}"


def machine_library(options: Options) -> Any:
    """Import worldfork for figures of machines: what runs in them is ours, so that no wall is needed round it."""
    os.environ.setdefault("WORLDFORK_ALLOW_TCG", "1")
    door = library(options)
    from worldfork.core.errors import WorldforkError
    from worldfork.sandbox.microvm.guest_image import fetch_kernel, find_kernel

    images = options.home / "home" / "images"
    if find_kernel(images) is None:
        if not options.set_up:
            raise Skip(f"{images} has no kernel for guests; --set-up fetches the distribution's")
        say("fetching a kernel for guests ...")
        images.mkdir(parents=True, exist_ok=True)
        try:
            fetch_kernel(images)
        except WorldforkError as error:
            raise Skip(f"{error}; {error.remedy}") from error
    return door


def start_guest(options: Options, driver: str = "microvm", **create: Any) -> Any:
    """A fresh sandbox of the small root under a driver; without what machines need the figure is skipped."""
    door = machine_library(options)
    from worldfork.core.errors import DriverUnavailable

    create = {"memory_mb": GUEST_MEMORY_MB, "network": "none", **create}
    try:
        return door.Sandbox.create(base=guest_root(options), driver=driver, **create)
    except DriverUnavailable as error:
        raise Skip(f"{error}; {error.remedy}") from error


@dataclass(frozen=True)
class Machine:
    """The QEMU of a live sandbox, as the driver tells of it."""

    pid: int
    accel: str
    ram_bytes: int
    ram_fd: int
    """Its number in QEMU."""

    @classmethod
    def of(cls, options: Options, sandbox: Any) -> Machine:
        """Read what the driver wrote beside the sandbox's sockets."""
        from worldfork.sandbox.microvm.manifest import read_running

        told = read_running(options.home / "home" / "run" / sandbox.sandbox_id)
        return cls(told.qemu_pid, told.build.accel, told.build.ram_bytes, told.ram_fd)

    def cpu_s(self) -> float:
        """Processor time that QEMU has used."""
        words = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(words[11]) + int(words[12])) * _CLOCK_TICK_S

    def private_bytes(self) -> int:
        """What the guest has changed of the memory that it shares with its siblings."""
        from worldfork.sandbox.microvm.ram import private_bytes

        fd = os.open(f"/proc/{self.pid}/fd/{self.ram_fd}", os.O_RDONLY)
        try:
            return private_bytes(self.pid, fd)
        finally:
            os.close(fd)

    def own_bytes(self) -> int:
        """Memory of QEMU itself: its heap, its page tables and what it translated; the guest's memory is not in it."""
        lines = [line.split() for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()]
        own = sum(int(words[1]) * 1024 for words in lines if words and words[0] in ("RssAnon:", "VmPTE:"))
        return own - self.private_bytes()


def at_rest(machine: Machine) -> float:
    """Wait until the guest leaves its processor alone; seconds that this took."""
    began = time.perf_counter()
    used = machine.cpu_s()
    while time.perf_counter() - began < _REST_LIMIT_S:
        time.sleep(_REST_LOOK_S)
        used, before = machine.cpu_s(), used
        if used - before <= _REST_SHARE * _REST_LOOK_S:
            return time.perf_counter() - began
    raise RuntimeError(f"the guest is not idle after {_REST_LIMIT_S:.0f} s")


@dataclass(frozen=True)
class Frozen:
    """One guest at rest, frozen both ways; its disk is what the namespace driver forks too."""

    memory: Any
    disk: Any
    accel: str
    ram_bytes: int
    warm_pid: int
    """Of the process that lives on in every memory fork."""

    def forks(self, count: int = 1) -> dict[str, Callable[[], list[Any]]]:
        """By column: what makes `count` sandboxes."""
        return {
            "microvm": lambda: self.memory.fork(count).unwrap(),
            "microvm_disk": lambda: self.disk.fork(count, driver="microvm").unwrap(),
            "namespace": lambda: self.disk.fork(count, driver="namespace").unwrap(),
        }


@contextmanager
def frozen_guest(options: Options) -> Iterator[Frozen]:
    """Freeze a guest that has run a command, holds a live process and does nothing; both snapshots go afterwards."""
    with ExitStack() as stack:
        door = machine_library(options).Sandbox
        with start_guest(options) as source:
            warm = source.start_process("/bin/sh", ["-c", WARM_PROGRAM], stdin_mode="pipe")
            checked(source.run("/bin/sh", ["-c", "echo frozen > /workspace/mark; sync"]), "the mark")
            source.write_stdin(warm.pid, b"before\n")
            machine = Machine.of(options, source)
            at_rest(machine)
            made = []
            for kind in ("filesystem", "memory"):
                made.append(source.checkpoint(checkpoint_type=kind, wait_until="completed", outside="refuse"))
                stack.callback(door.delete_snapshot, made[-1].snapshot_id)
        yield Frozen(made[1], made[0], machine.accel, machine.ram_bytes, warm.pid)


def first_result_s(sandbox: Any) -> float:
    """Seconds of one `true`."""
    start = time.perf_counter()
    checked(sandbox.run(TRUE), "true")
    return time.perf_counter() - start
