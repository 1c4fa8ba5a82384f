"""Fork plus first result against `runc run` of `true` on the same root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.harness import Options, Skip, bar, figure, interleave, ratio, repeat, summary_ms
from bench.rootfs import small_root
from bench.worlds import fork_and_first_result_s, library

BAR = 1 / 8


def _bundle(options: Options, root: Path) -> Path:
    bundle = options.home / "runc-bundle"
    bundle.mkdir(exist_ok=True)
    (bundle / "config.json").unlink(missing_ok=True)
    subprocess.run(["runc", "spec", "--bundle", str(bundle)], check=True, capture_output=True)
    config = json.loads((bundle / "config.json").read_text())
    config["root"] = {"path": str(root), "readonly": True}
    config["process"] |= {"terminal": False, "args": ["/usr/bin/true"]}
    # Raising a hard limit needs CAP_SYS_RESOURCE, which runc cannot take for granted in a guest.
    config["process"].pop("rlimits", None)
    (bundle / "config.json").write_text(json.dumps(config))
    return bundle


def _run_runc(bundle: Path, index: int) -> float:
    name = f"worldfork-bench-{os.getpid()}-{index}"
    start = time.perf_counter()
    done = subprocess.run(["runc", "run", "--bundle", str(bundle), name], capture_output=True, text=True, timeout=60)
    taken = time.perf_counter() - start
    if done.returncode:
        raise Skip(f"runc cannot run on this machine: {done.stderr.strip()[-300:]}")
    return taken


def run(options: Options) -> dict[str, Any]:
    """runc makes no writable layer and keeps no stack of layers here, so it does less than a fork does."""
    if shutil.which("runc") is None:
        raise Skip("runc is not installed: apt-get install runc")
    if os.geteuid() != 0:
        raise Skip("runc is compared as root")
    root = small_root(options)
    snapshot = library(options).world(f"bench-root-{root}", build=lambda sandbox: None, base=f"dir:{root}")
    bundle = _bundle(options, root)
    numbers = iter(range(1 << 30))
    parts = {
        "runc_run": repeat(3, lambda: _run_runc(bundle, next(numbers))),
        "fork_and_first_result": repeat(10, lambda: fork_and_first_result_s(snapshot)),
    }
    for part in parts.values():
        part()
    taken = interleave(options.samples(15, 2), parts)
    version = subprocess.run(["runc", "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    share = ratio(taken["fork_and_first_result"], taken["runc_run"])
    values: dict[str, Any] = {name: summary_ms(samples) for name, samples in taken.items()}
    values |= {"p50_ratio": round(share, 4), "runc": version, "root": str(root)}
    return figure(
        "versus_runc",
        "fork + first result against runc run",
        values,
        [bar("p50 against runc run", share, BAR, unit="ratio")],
    )
