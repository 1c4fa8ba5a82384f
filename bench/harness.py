"""What every figure needs: percentiles, bars, A B A B order, host facts, the bare program, the leak check."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent


class Skip(Exception):
    """A figure that this machine cannot give; the message is the reason."""


@dataclass(frozen=True)
class Options:
    """How the figures are to be taken."""

    quick: bool = False
    """Few samples: shows that a bench works; its figures are not to be quoted."""
    home: Path = Path(f"/var/tmp/worldfork-bench-{os.getuid()}")
    """The store that the benches use, kept between runs (large worlds are made once)."""
    data: Path = CHECKOUT.parent / "shared" / "data"
    """Where the task sets lie."""
    set_up: bool = False
    """May fetch what a comparison needs (its own virtual environment)."""

    def samples(self, full: int, quick: int) -> int:
        """The number of samples to take: `full`, or `quick` with --quick."""
        return quick if self.quick else full


def percentile(samples: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; `share` in [0, 1]."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary_ms(samples_s: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99, extremes and n of samples in seconds, told in milliseconds."""
    return {
        "p50_ms": round(percentile(samples_s, 0.50) * 1e3, 3),
        "p90_ms": round(percentile(samples_s, 0.90) * 1e3, 3),
        "p99_ms": round(percentile(samples_s, 0.99) * 1e3, 3),
        "min_ms": round(min(samples_s) * 1e3, 3),
        "max_ms": round(max(samples_s) * 1e3, 3),
        "n": len(samples_s),
    }


def ratio(a: Sequence[float], b: Sequence[float], share: float = 0.5) -> float:
    """The percentile of `a` over that of `b`."""
    return percentile(a, share) / percentile(b, share)


def bar(what: str, value: float, limit: float, *, unit: str, strict: bool = True) -> dict[str, Any]:
    """One bar: passed when `value` is under `limit` (or at most, when not strict)."""
    passed = value < limit if strict else value <= limit
    return {"what": what, f"value_{unit}": round(value, 4), f"bar_{unit}": limit, "passed": bool(passed)}


def must(what: str, passed: bool, *, said: str = "") -> dict[str, Any]:
    """A bar without a number."""
    return {"what": what, "said": said, "passed": bool(passed)}


def figure(
    name: str, title: str, values: Mapping[str, Any], bars: Sequence[dict[str, Any]], *notes: str
) -> dict[str, Any]:
    """The result of a bench; `status` is fail when any bar is missed."""
    return {
        "figure": name,
        "title": title,
        "status": "pass" if all(b["passed"] for b in bars) else "fail",
        "bars": list(bars),
        "values": dict(values),
        "notes": list(notes),
    }


def interleave(rounds: int, parts: Mapping[str, Callable[[], Sequence[float]]]) -> dict[str, list[float]]:
    """Run all parts in every round, every second round in reverse, so that drift of the machine meets all alike."""
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for index in range(rounds):
        for name in list(parts)[:: 1 if index % 2 == 0 else -1]:
            taken[name].extend(parts[name]())
    return taken


def repeat(count: int, one: Callable[..., float], *arguments: Any) -> Callable[[], list[float]]:
    """A part for `interleave` that takes `count` samples."""
    return lambda: [one(*arguments) for _ in range(count)]


def available_memory_bytes() -> int:
    """MemAvailable."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def own_memory_bytes(pid: int | str = "self") -> int:
    """Anonymous and shared memory of a process, and its page tables.

    Pages of files are left out: how many of them count as a process's own depends on who else maps them just then.
    """
    wanted = {"RssAnon:", "RssShmem:", "VmPTE:"}
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(words[1]) * 1024 for words in lines if words and words[0] in wanted)


def host_facts(home: Path) -> dict[str, Any]:
    """The machine under the figures. Every result carries it."""
    text = Path("/proc/cpuinfo").read_text()
    models = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    where = os.path.realpath(home if home.exists() else home.parent)
    under = [m for m in mounts if where == m[1] or where.startswith(m[1].rstrip("/") + "/")]
    cgroup_kinds = {m[2] for m in mounts if m[2].startswith("cgroup")}
    commit = subprocess.run(
        ["git", "-C", str(CHECKOUT), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
    )
    return {
        "cpu_model": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "memory_total_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_available_bytes": available_memory_bytes(),
        "kernel": platform.release(),
        "home_file_system": max(under, key=lambda m: len(m[1]))[2] if under else "unknown",
        "cgroups": {frozenset({"cgroup"}): "v1", frozenset({"cgroup2"}): "v2"}.get(
            frozenset(cgroup_kinds), "hybrid" if cgroup_kinds else "none"
        ),
        "uid": os.geteuid(),
        "load_before_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "taken_at_unix_s": int(time.time()),
    }


def python_lines(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter of the same kind on `code`; raises when it fails."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )


def say(text: str) -> None:
    """Progress, to standard error."""
    print(text, file=sys.stderr, flush=True)


def write_json(path: Path, value: object) -> None:
    """Write `value` for people and programs."""
    path.write_text(json.dumps(value, indent=2) + "\n")
