"""A home that cannot carry uppers, as in a container without a volume. Runs in a mount namespace of its own.

Arguments: an empty directory, and a base.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

from tests.victims import start_afresh, wait_clean

from worldfork import Sandbox
from worldfork.core.errors import StoreError
from worldfork.lineage import place as places


def live_a_life(base: str) -> str:
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        snapshot = sandbox.checkpoint(wait_until="completed")
        for child in snapshot.fork(2).unwrap():
            assert child.read_file("/f") == b"first"
            child.terminate()
    return snapshot.snapshot_id


def main() -> None:
    top, base = Path(sys.argv[1]), sys.argv[2]
    for name in ("lower", "upper", "work", "merged", "disk"):
        (top / name).mkdir()
    # A tmpfs of our own, so that the host's is not touched.
    subprocess.run(["mount", "-t", "tmpfs", "none", "/dev/shm"], check=True)
    options = f"lowerdir={top}/lower,upperdir={top}/upper,workdir={top}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, top / "merged"], check=True)
    os.environ["WORLDFORK_HOME"] = str(top / "merged" / "home")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        snapshot_id = live_a_life(base)
    (told,) = [str(one.message) for one in caught if "overlayfs" in str(one.message)]
    assert "WORLDFORK_SCRATCH" in told, told
    (scratch,) = Path(f"/dev/shm/worldfork-{os.geteuid()}").iterdir()
    assert wait_clean(scratch) == []
    places.close_places()
    warnings.simplefilter("ignore")
    start_afresh()
    with Sandbox.create(snapshot_id=snapshot_id) as restored:
        assert restored.read_file("/f") == b"first"
    places.close_places()

    os.environ["WORLDFORK_SCRATCH"] = str(top / "disk")
    warnings.simplefilter("error")
    live_a_life(base)
    assert wait_clean(top / "disk") == []
    places.close_places()

    # No place at all: the error says what to set.
    del os.environ["WORLDFORK_SCRATCH"]
    subprocess.run(["mount", "-o", "remount,ro", "/dev/shm"], check=True)
    try:
        Sandbox.create(base=base, network="none")
    except StoreError as error:
        print(error.remedy)
    else:
        raise AssertionError("it started")
    assert live_beside(top, base)


def live_beside(top: Path, base: str) -> str:
    """On an overlay chosen as scratch by name: refused."""
    os.environ["WORLDFORK_SCRATCH"] = str(top / "merged" / "scratch")
    try:
        live_a_life(base)
    except StoreError as error:
        return error.remedy
    raise AssertionError("an overlay was taken for scratch")


if __name__ == "__main__":
    main()
