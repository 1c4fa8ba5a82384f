"""A check on a full disk, where not even a lease can be written, tells damage all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worldfork.store import home as homes

FULL = """
import errno, os, subprocess, sys
from pathlib import Path
from tests.full_layers import add_full, flip_a_bit, keeping_times
from tests.stores import home_at
from worldfork.core.errors import OutOfSpace
from worldfork.keeping.check import check
from worldfork.store.store import Store
place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(place)], check=True)
store = Store.open(home_at(place / "home"))
records = [add_full(store, "trusted") for _ in range(3)]
damaged = records[1].layers[0]
os.truncate(store.layer_path(damaged) / "full/deep/more", 1)
keeping_times(store.layer_path(records[2].layers[0]), lambda root: flip_a_bit(root / "full/text"))
(place / "home" / "ballast").unlink()
with open(place / "filler", "ab", buffering=0) as filler:
    try:
        while True:
            filler.write(b"x" * 4096)
    except OSError as error:
        assert error.errno == errno.ENOSPC
refused = 0
try:
    for number in range(3000):
        store.begin_layer(form="trusted")
except OutOfSpace:
    refused += 1
assert refused
try:
    with store.reading(layers=[damaged], purpose="try"):
        pass
except OutOfSpace:
    refused += 1
assert refused == 2, "a lease found room"
report = check(store)
assert [(one.subject, one.path) for one in report.findings] == [(damaged, "/full/deep/more")], report
assert report.sealed == 3
report = check(store, read_data=True)
assert {one.subject for one in report.findings} == {damaged, records[2].layers[0]}, report
store.close()
"""


@pytest.mark.root
def test_a_check_on_a_full_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(homes.__file__).parents[2]), os.getcwd()])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
