"""Sandboxes in the workers of multiprocessing pools, started in each way.

Argument: a base. The home comes from the process environment.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from pathlib import Path

from tests.victims import start_afresh, wait_clean

from worldfork import Sandbox
from worldfork.lineage import place as places


def use(job: tuple[Sandbox, str, str, int]) -> str:
    """In a worker: through a handle that travelled, in a restore of its own, and in a fresh sandbox."""
    handle, base, snapshot_id, number = job
    shared = handle.run("cat", ["/f"]).stdout
    with Sandbox.create(snapshot_id=snapshot_id) as own, Sandbox.create(base=base, network="none") as fresh:
        own.write_file("/n", str(number).encode())
        return f"{shared}{own.read_file('/n').decode()}{fresh.run('true').exit_code}"


def main() -> None:
    base, home = sys.argv[1], Path(os.environ["WORLDFORK_HOME"])
    # Python warns of forking with threads about, which is what is tried here.
    warnings.simplefilter("ignore", DeprecationWarning)
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        snapshot_id = sandbox.checkpoint().snapshot_id
        for method in ("fork", "spawn", "forkserver"):
            jobs = [(sandbox, base, snapshot_id, number) for number in range(6)]
            with multiprocessing.get_context(method).Pool(3) as pool:
                assert pool.map(use, jobs) == [f"first{number}0" for number in range(6)], method
            # Workers are ended by a signal, as multiprocessing does it.
            start_afresh()
            left = wait_clean(home, living=[sandbox.sandbox_id])
            assert left == [], (method, left)
            assert sandbox.run("true").ok, method
    places.close_places()


if __name__ == "__main__":
    main()
