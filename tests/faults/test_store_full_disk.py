"""A full disk: errors with a name, a clean store, and deletion that still works."""

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
from tests.stores import add_snapshot, home_at, problems, record_of
from worldfork.core.errors import OutOfSpace
from worldfork.core.ids import new_id
from worldfork.store.leases import Holder
from worldfork.store.store import Store
place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(place)], check=True)

def fill():
    with open(place / "filler", "ab", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 4096)
        except OSError as error:
            assert error.errno == errno.ENOSPC

def fails(call):
    # What is allotted to the log already may take some more commits.
    for _ in range(3000):
        try:
            call()
        except OutOfSpace as error:
            assert error.scope == "host" and error.remedy, error
            return
    raise AssertionError("the disk never filled")

store = Store.open(home_at(place / "home"))
keep = add_snapshot(store)
store.make_durable(keep.snapshot_id)
big = []
for _ in range(3):
    draft = store.begin_layer(form="trusted")
    draft.path.mkdir()
    (draft.path / "file").write_text(draft.layer_id)
    (draft.path / "large").write_bytes(b"x" * (1 << 20))
    record = record_of((draft.layer_id,))
    store.publish(record, [draft.layer_id])
    big.append(record)
draft = store.begin_layer(form="trusted")
draft.path.mkdir()
fill()
held = []
def hold():
    held.append(new_id("sb"))
    store.hold([Holder(held[-1], snapshot_id=keep.snapshot_id, facts='"' + "x" * 1000 + '"')])
fails(hold)
before = {record.snapshot_id for record in store.snapshots()}
fails(lambda: store.begin_layer(form="trusted"))
fails(lambda: store.set_name("x" * 100 + new_id("sb"), keep.snapshot_id))
assert {record.snapshot_id for record in store.snapshots()} == before

# Another process can open it, too.
child = os.fork()
if child == 0:
    other = Store.open(home_at(place / "home"))
    assert {record.snapshot_id for record in other.snapshots()} == before
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0

store.release(held)
store.delete_snapshot(big[0].snapshot_id)
report = store.collect()
assert report.layers == list(big[0].layers), report
assert report.failures == [], report
fill()
store.abandon_layer(draft.layer_id)
for record in big[1:]:
    fill()
    store.delete_snapshot(record.snapshot_id)
    assert store.collect().layers == list(record.layers)
fill()
assert store.sweep().failures == []
store.sweep()
assert problems(store) == [], problems(store)
assert store.snapshot(keep.snapshot_id).state == "durable"
os.unlink(place / "filler")
add_snapshot(store)
store.sweep()
assert problems(store) == []
assert (store.home.scratch / "ballast").stat().st_size > 0
store.close()

fill()
try:
    Store.open(home_at(place / "new"))
except OutOfSpace as error:
    assert error.remedy
else:
    raise AssertionError("a new store on a full disk")
"""


@pytest.mark.root
def test_a_full_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(homes.__file__).parents[2]), os.getcwd()])},
        check=False,
    )
    assert done.returncode == 0, done.stderr


EXHAUSTED = """
import os, resource, sys
from pathlib import Path
from tests.stores import add_snapshot, home_at, problems
from worldfork.core.errors import StoreError
from worldfork.core.ids import new_id
from worldfork.store.leases import Holder
from worldfork.store.store import Store
store = Store.open(home_at(Path(sys.argv[1])))
record = add_snapshot(store)
store.owner_id
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, limits[1]))
sandbox = new_id("sb")
store.hold([Holder(sandbox, snapshot_id=record.snapshot_id)])
for call in (lambda: store.make_durable(record.snapshot_id), store.collect, store.empty_trash,
             lambda: Store.open(store.home), lambda: store.single_flight("key").__enter__()):
    try:
        call()
    except StoreError as error:
        assert "ulimit" in error.remedy or "open" in str(error), error
    else:
        raise AssertionError(call)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
store.release([sandbox])
store.make_durable(record.snapshot_id)
assert store.sweep().failures == []
assert problems(store) == []
store.close()
"""


def test_no_descriptors_left(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXHAUSTED, str(tmp_path / "home")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(homes.__file__).parents[2]), os.getcwd()])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
