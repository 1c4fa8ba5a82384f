"""Everything that a store does while its disk has a little room left, and none. Mounts, so it has its own namespace.

Arguments: a directory to mount on, and the kind of file system (`tmpfs`, `ext4`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.deeds import WORKS, Diary, Work, attempt, expect_order_after
from tests.stores import home_at, in_child, torn
from tests.stories.full_disk import fill, mount

from worldfork.core.errors import OutOfSpace, WorldforkError
from worldfork.keeping.check import check
from worldfork.store.store import Store

FREE_BYTES = (0, 16 << 10, 64 << 10, 160 << 10, 400 << 10)
DEEDS = [name for name in WORKS if name not in ("upgrade", "many at once", "layers alone")]


@contextmanager
def full(disk: Path, free_bytes: int) -> Iterator[None]:
    """Take all of a disk but a little."""
    with open(disk / "hole", "wb", buffering=0) as hole:
        if free_bytes:
            os.posix_fallocate(hole.fileno(), 0, free_bytes)
    fill(disk)
    (disk / "hole").unlink()
    try:
        yield
    finally:
        (disk / "filler").unlink()


def expect_out_of_space(error: WorldforkError) -> None:
    assert isinstance(error, OutOfSpace), repr(error)
    assert error.remedy, repr(error)


def expect_deletion_to_work(home: Path, diary: Diary, work: Work) -> None:
    """On the disk that is still full: nothing is torn, and what is deleted gives its room back."""
    with closing(Store.open(home_at(home))) as store:
        if not work.heals:
            assert check(store, read_data=True).findings == []
            for record in store.snapshots():
                assert torn(store, record) == []
        for record in store.snapshots()[:1]:
            diary.say("deleting", record.snapshot_id)
            store.delete_snapshot(record.snapshot_id)
        assert store.collect().failures == []


def tell(name: str, disk: Path, outcomes: Counter[str]) -> None:
    work = WORKS[name]
    # What is only looked at is on the same small disk, and so is what is written outside of the home.
    aside = disk / name.replace(" ", "-")
    aside.mkdir()
    template, first, home = aside / "template", Diary(aside / "first"), aside / "home"

    def prepare() -> None:
        work.prepare(Store.open(home_at(template)), first)

    assert in_child(prepare) == 0
    (template / "ballast").unlink()  # a copy of it would take no room
    kept = {path.name for path in aside.iterdir()}
    for free_bytes in FREE_BYTES:
        subprocess.run(["cp", "-a", template, home], check=True)
        Store.open(home_at(home)).close()
        diary = Diary(aside / "diary")
        diary.path.write_bytes(first.path.read_bytes() + b" " * 4096 + b"\n")
        with full(disk, free_bytes):
            outcome = attempt_full(work, home, diary)
            expect_deletion_to_work(home, diary, work)
        outcomes[outcome] += 1
        expect_order_after(home, diary, heals=work.heals and outcome != "done")
        for left in aside.iterdir():
            if left.name not in kept:
                subprocess.run(["rm", "-r", left], check=True)
    subprocess.run(["rm", "-r", aside], check=True)


def attempt_full(work: Work, home: Path, diary: Diary) -> str:
    @contextmanager
    def no_more() -> Iterator[None]:
        yield

    try:
        return attempt(work, home, diary, no_more(), expect_out_of_space)
    except OSError as error:
        # A deed writes an upper or an archive by itself.
        if "worldfork" in str(error.filename):
            raise
        return "OSError of the test"


def main() -> None:
    disk, kind = Path(sys.argv[1]), sys.argv[2]
    mount(disk, kind)
    outcomes: Counter[str] = Counter()
    for name in DEEDS:
        try:
            tell(name, disk, outcomes)
        except BaseException:
            print(f"{name} on {kind}", file=sys.stderr)
            raise
    print(outcomes)
    assert outcomes["done"] >= len(DEEDS), outcomes
    assert outcomes["OutOfSpace"] + outcomes["reported"] >= len(DEEDS), outcomes


if __name__ == "__main__":
    main()
