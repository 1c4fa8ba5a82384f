"""Every call while so many descriptors are left, for every small number.

Argument: a base. The home comes from the process environment.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from tests.victims import wait_clean

from worldfork import Sandbox
from worldfork.core.errors import LaunchFailed, SandboxDied, SandboxError, StoreError
from worldfork.lineage import place as places

LIMIT = 200


def take_all_but(left: int) -> list[int]:
    """Open descriptors until only so many more can be opened."""
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        for _ in range(min(left, len(taken))):
            os.close(taken.pop())
    return taken


def attempt(call: Callable[[], object], left: int) -> Exception | None:
    taken = take_all_but(left)
    try:
        call()
    except (LaunchFailed, StoreError, SandboxError) as error:
        return error
    finally:
        for fd in taken:
            os.close(fd)
    return None


def expect_told(error: Exception | None, what: str) -> None:
    if error is not None:
        assert not isinstance(error, SandboxDied), (what, repr(error))
        words = f"{error}"
        assert "ulimit -n" in words, (what, repr(error))


def main() -> None:
    base, home = sys.argv[1], Path(os.environ["WORLDFORK_HOME"])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Sandbox.create(base=base, network="none") as source:
        source.write_file("/f", b"first")
        snapshot = source.checkpoint(wait_until="completed")
        busy = Sandbox.create(snapshot_id=snapshot.snapshot_id)
        busy.start_process("sleep", ["1000"])
        living = [source.sandbox_id, busy.sandbox_id]
        resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
        outcomes = set()
        for left in range(24):
            made: list[Sandbox] = []
            error = attempt(lambda made=made: made.append(Sandbox.create(base=base, network="none")), left)
            expect_told(error, f"create with {left}")
            outcomes.add(error is None)
            for sandbox in made:
                assert sandbox.run("true").ok, left
                sandbox.terminate()
            places.place().sweep()
            assert wait_clean(home, living=living) == [], left
            for one in (source, busy):
                one.write_file("/n", str(left).encode())
                expect_told(attempt(one.checkpoint, left), f"checkpoint with {left}")
                assert one.read_file("/n") == str(left).encode()
                assert one.run("true").ok, left
        assert outcomes == {False, True}, outcomes
        busy.terminate()
        assert wait_clean(home, living=living[:1]) == []
    places.close_places()


if __name__ == "__main__":
    main()
