"""A sandbox's directory with something mounted in it, and links out of it. Runs in a mount namespace of its own.

Arguments: an empty directory, and a base.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.victims import start_afresh, wait_clean

from worldfork import Sandbox
from worldfork.lineage import place as places


def main() -> None:
    top, base = Path(sys.argv[1]), sys.argv[2]
    home, precious = top / "home", top / "precious"
    precious.mkdir()
    (precious / "file").write_text("precious")
    os.environ["WORLDFORK_HOME"] = str(home)
    sandbox = Sandbox.create(base=base, network="none")
    line = f"mkdir -p /inside /deep/er && ln -s {precious} /link && ln -s {precious}/file /deep/er/link"
    sandbox.sh(line, check=True)
    run = home / "run" / sandbox.sandbox_id
    inside = run / "upper.0" / "inside"
    assert inside.is_dir()
    subprocess.run(["mount", "--bind", precious, inside], check=True)
    sandbox.terminate()
    (failure,) = places.place().sweep().failures
    assert "mounted" in failure[1], failure
    assert (precious / "file").read_text() == "precious"
    places.close_places()
    start_afresh()
    assert (precious / "file").read_text() == "precious"
    # Once nothing is mounted there any more, it goes.
    mounted = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    (point,) = [path for path in mounted if path.startswith(str(home))]
    subprocess.run(["umount", point], check=True)
    start_afresh()
    left = wait_clean(home)
    assert left == [], left
    assert (precious / "file").read_text() == "precious"


if __name__ == "__main__":
    main()
