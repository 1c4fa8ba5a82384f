"""The worlds and the timed acts that several figures share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import Options, Skip

TRUE = "/usr/bin/true"


def library(options: Options) -> Any:
    """Import worldfork with the store of the benches as its home."""
    options.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.environ["WORLDFORK_HOME"] = str(options.home / "home")
    import worldfork

    return worldfork


def plain_world(options: Options, **create: Any) -> Any:
    """A snapshot of the untouched base; made once per store."""
    key = "bench-plain" + "".join(f"-{k}-{v}" for k, v in sorted(create.items()))
    return library(options).world(key, build=lambda sandbox: None, **create)


def fork_and_first_result_s(snapshot: Any) -> float:
    """Seconds from the call of fork to the result of the first command; the end of the sandbox is not in it."""
    start = time.perf_counter()
    child = snapshot.fork(1).unwrap()[0]
    result = child.run(TRUE)
    elapsed = time.perf_counter() - start
    child.terminate()
    if result.exit_code != 0:
        raise RuntimeError(f"true in a fork gave {result.exit_code}: {result.stderr}")
    return elapsed


@contextmanager
def one_fork(snapshot: Any) -> Iterator[Any]:
    """A sandbox of the snapshot that ends with the block."""
    sandbox = snapshot.fork(1).unwrap()[0]
    try:
        yield sandbox
    finally:
        sandbox.terminate()


def checked(result: Any, what: str) -> str:
    """The output of a command that must have worked."""
    if result.exit_code != 0:
        raise RuntimeError(
            f"{what} gave {result.exit_code} ({result.reason}): {result.stdout[-500:]}{result.stderr[-2000:]}"
        )
    text: str = result.stdout
    return text


def inside(sandbox: Any, code: str, *arguments: str, timeout_s: float = 600) -> str:
    """Run Python text in the sandbox."""
    return checked(sandbox.run("python3", ["-c", code, *arguments], timeout=timeout_s), "python3")


MAKE_FILES = """
import os, sys
root, first, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
block = os.urandom(65536)
for i in range(first, first + count):
    place = f"{root}/{i // 1000:04d}"
    if i % 1000 == 0 or i == first:
        os.makedirs(place, exist_ok=True)
    with open(f"{place}/{i:07d}.bin", "wb") as out:
        out.write(i.to_bytes(8, "little"))
        left = size - 8
        while left > 0:
            left -= out.write(block[:left])
"""


def make_files(sandbox: Any, root: str, count: int, size_bytes: int, first: int = 0, timeout_s: float = 900) -> None:
    """Write `count` files of `size_bytes` each, a thousand to a directory."""
    inside(sandbox, MAKE_FILES, root, str(first), str(count), str(size_bytes), timeout_s=timeout_s)


def drop_page_cache() -> None:
    """Empty the host's page, dentry and inode caches."""
    if os.geteuid() != 0:
        raise Skip("a cold page cache needs root")
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
