"""Builds and runs `bare`: the kernel's own cost of one sandbox of the same shape."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.harness import CHECKOUT, Options, Skip

_SPECIAL = {"overlay", "proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "devtmpfs"}
_HIERARCHIES = ("memory", "pids", "cpu", "freezer", "cpuacct")


@dataclass(frozen=True)
class Shape:
    """What a root is made of: read-only layers, top first, and host paths bound read-only."""

    lowers: tuple[str, ...]
    binds: tuple[str, ...]


def shape_of(sandbox: Any) -> Shape:
    """Read the shape of a live sandbox from its own mount table, so that `bare` makes the same one."""
    table = sandbox.run("cat", ["/proc/self/mountinfo"]).stdout
    lowers: list[str] = []
    binds: list[str] = []
    for line in table.splitlines():
        left, right = line.split(" - ")
        place, kind, options = left.split()[4], right.split()[0], right.split()[2]
        if place == "/" and kind == "overlay":
            lowers = _lowers(options)
        elif kind not in _SPECIAL and not place.startswith(("/etc/", "/dev", "/proc", "/sys")):
            binds.append(place)
    missing = [path for path in (*lowers, *binds) if not os.path.isdir(path)]
    if not lowers or missing:
        raise Skip(f"the layers of a sandbox cannot be read from its mount table: {missing or table[:200]}")
    return Shape(tuple(lowers), tuple(binds))


def _lowers(options: str) -> list[str]:
    found: list[str] = []
    for option in options.split(","):
        key, _, value = option.partition("=")
        if key == "lowerdir+":
            found.append(value)
        elif key == "lowerdir":
            found.extend(value.split(":"))
    return found


class Bare:
    """A context: builds the program, makes its cgroup parents, removes them at the end."""

    def __init__(self, options: Options) -> None:
        if os.geteuid() != 0:
            raise Skip("bare needs root: it makes namespaces without a user namespace")
        self._directory = options.home / "bare"
        self._program = self._directory / "bare"
        self._groups: list[Path] = []
        self._unified = False

    def __enter__(self) -> Bare:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise Skip("no C compiler: apt-get install gcc libc6-dev")
        self._directory.mkdir(parents=True, exist_ok=True)
        sources = [str(CHECKOUT / "bench" / name) for name in ("bare.c", "bare_steps.c")]
        flags = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wshadow", "-pthread"]
        subprocess.run([compiler, *flags, "-o", str(self._program), *sources], check=True)
        self._make_groups()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in self._groups:
            for left in group.iterdir():
                if left.is_dir():
                    left.rmdir()
            group.rmdir()

    def latencies_s(
        self, shape: Shape, count: int, *, concurrency: int = 1, burst: bool = False, command: Sequence[str] = ()
    ) -> list[float]:
        """From before clone (with `burst`: from the start of the round) to wait returning."""
        flags = ["--burst"] if burst else []
        return self._run(
            [*self._shape_flags(shape), *flags, "--count", str(count), "--concurrency", str(concurrency)], command
        )

    def plain_s(self, count: int, command: Sequence[str] = ()) -> list[float]:
        """vfork, exec, wait on the host, nothing isolated."""
        return self._run(["--plain", "--count", str(count), "--warmup", "5"], command)

    def steps_us(self, shape: Shape, count: int) -> dict[str, float]:
        """The median microseconds of each step, one sandbox at a time, each namespace by a call of its own."""
        text = self._call([*self._shape_flags(shape), "--profile", "--count", str(count), "--warmup", "10"], ())
        rows = [line.split() for line in text.splitlines()]
        return {f"{name}_us": float(median) for name, median, _ in rows if median != "-"}

    def _run(self, flags: Sequence[str], command: Sequence[str]) -> list[float]:
        return [float(line) / 1e6 for line in self._call(flags, command).split()]

    def _call(self, flags: Sequence[str], command: Sequence[str]) -> str:
        tail = ["--", *command] if command else []
        done = subprocess.run([str(self._program), *flags, *tail], capture_output=True, text=True, timeout=320)
        if done.returncode:
            raise RuntimeError(f"bare failed: {done.stderr.strip()}")
        return done.stdout

    def _shape_flags(self, shape: Shape) -> list[str]:
        flags = ["--work", str(self._directory / f"work-{os.getpid()}")]
        for name, paths in (("--lower", shape.lowers), ("--bind", shape.binds), ("--cgroup", map(str, self._groups))):
            for path in paths:
                flags += [name, path]
        return flags + (["--unified"] if self._unified else [])

    def _make_groups(self) -> None:
        rows = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        places = {controllers: path for _, controllers, path in rows}
        root = Path("/sys/fs/cgroup")
        for name in _HIERARCHIES:
            path = places.get(name) or next((p for c, p in places.items() if name in c.split(",")), None)
            if path is not None and (root / name).is_dir():
                self._make_group(root / name / path.lstrip("/"))
        if not self._groups and (root / "cgroup.controllers").exists():
            self._unified = True
            self._make_group(root)
            if self._groups:
                (self._groups[0] / "cgroup.subtree_control").write_text("+memory +pids +cpu")

    def _make_group(self, parent: Path) -> None:
        group = parent / f"worldfork-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            return  # not writable here: the sandbox goes without this hierarchy too
        self._groups.append(group)
