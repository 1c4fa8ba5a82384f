"""Each call of the system fails once, at each place in the code that makes it: a typed error, and a store in order."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path

import pytest
from tests.deeds import WORKS, Diary, attempt, expect_order_after
from tests.failing import ALL, OPENING, WRITING, Failing, Site
from tests.stores import home_at, in_child

from worldfork.core.errors import OutOfSpace, StoreError, WorldforkError
from worldfork.store.store import Store

ERRORS = {
    "EIO": (errno.EIO, (*ALL, "sqlite")),
    "ENOSPC": (errno.ENOSPC, (*WRITING, "sqlite")),
    "EMFILE": (errno.EMFILE, OPENING),
}
DEEDS = [name for name in WORKS if name not in ("upgrade", "many at once", "layers alone")]


def expect_told(number: int, error: WorldforkError) -> None:
    assert str(error)
    if number == errno.ENOSPC:
        assert isinstance(error, OutOfSpace), repr(error)
        assert error.remedy, repr(error)
    else:
        assert isinstance(error, StoreError), repr(error)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", DEEDS)
def test_a_call_that_fails(name: str, error: str, memory: Path) -> None:
    work = WORKS[name]
    template, first = memory / "template", Diary(memory / "first")

    def prepare() -> None:
        work.prepare(Store.open(home_at(template)), first)

    assert in_child(prepare) == 0
    number, calls = ERRORS[error]
    kept = {path.name for path in memory.iterdir()}

    def run(site: Site | None) -> tuple[Failing, str]:
        home, diary = memory / "home", Diary(memory / "diary")
        subprocess.run(["cp", "-a", template, home], check=True)
        shutil.copyfile(first.path, diary.path)
        failing = Failing(number, calls, site)
        try:
            outcome = attempt(work, home, diary, failing.in_force(), partial(expect_told, number))
            assert site is not None or outcome == "done"
            expect_order_after(home, diary, heals=work.heals and outcome != "done")
        finally:
            for left in memory.iterdir():
                if left.name not in kept:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
        return failing, outcome

    def fail_each() -> None:
        run(None)  # some calls are made once in a process
        sites = list(run(None)[0].seen)
        assert len(sites) >= 3, sites
        failures = told = 0
        for site in sites:
            try:
                failing, outcome = run(site)
                assert site in failing.seen, "it did not come there"
                told += outcome != "done"
            except Exception:
                failures += 1
                print(f"{name}: {error} of {site}")
                traceback.print_exc(limit=-6, chain=failures < 3)
        assert failures == 0
        # Some are made up for, others are told in reports that these works do not look at.
        assert told > 0

    assert in_child(fail_each) == 0


@pytest.mark.root
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_is_almost_full(tmp_path: Path, kind: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["unshare", "-m", "--propagation", "private", sys.executable, "-m", "tests.stories.full_store"]
    done = subprocess.run(
        [*command, str(disk), kind], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
