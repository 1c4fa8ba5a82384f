"""Checkpoints of a sandbox in which a process never stops writing: each snapshot is one instant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.property.conftest import FORMS

from worldfork import Sandbox, SnapshotInfo
from worldfork.lineage.upper import Copied
from worldfork.records.sandbox import ProcessStatus

ROUNDS = 6
WRITER = """
import mmap, os, struct
def mapped(name):
    fd = os.open(name, os.O_RDWR)
    return mmap.mmap(fd, 8192)
first, second, still = mapped("first"), mapped("second"), mapped("still")
still[0] = 1
os.mkdir("dir")
log = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
count = struct.unpack_from("@Q", first, 4096)[0]
while True:
    count += 1
    struct.pack_into("@Q", first, 4096, count)
    struct.pack_into("@Q", second, 4096, count)
    os.write(log, b"%d\\n" % count)
    if count % 50:
        continue
    here, there = ("dir", "away") if os.path.isdir("dir") else ("away", "dir")
    with open(here + "/new", "w") as file:
        file.write(str(count))
    os.rename(here + "/new", here + "/last")
    os.rename(here, there)
"""
READER = """
import json, os, struct
def counter(name):
    with open(name, "rb") as file:
        return struct.unpack_from("@Q", file.read(), 4096)[0]
lines = open("log", "rb").read().split(b"\\n")
dirs = [name for name in ("dir", "away") if os.path.isdir(name)]
last = open(dirs[0] + "/last").read() if os.path.exists(dirs[0] + "/last") else "0"
print(json.dumps({"first": counter("first"), "second": counter("second"), "torn": lines[-1].decode(),
                  "log": [int(line) for line in lines[:-1]], "dirs": dirs, "last": last}))
"""


@pytest.fixture(scope="module", params=FORMS)
def world(request: pytest.FixtureRequest, home: object) -> Iterator[SnapshotInfo]:
    """Has the files that the writer maps in a lower layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLDFORK_FORM", request.param)
        with Sandbox.create(network="none") as box:
            for name in ("first", "second", "still"):
                box.write_file(f"/workspace/{name}", bytes(8192))
            snapshot = box.checkpoint(stop=True)
        yield snapshot


def read(box: Sandbox) -> dict[str, object]:
    result = box.run("python", ["-I", "-S", "-c", READER], check=True)
    found: dict[str, object] = json.loads(result.stdout)
    return found


def count_in(box: Sandbox) -> int:
    return int.from_bytes(box.read_file("/workspace/second")[4096:4104], "little")


def wait_past(box: Sandbox, writer: int, count: int) -> int:
    while (present := count_in(box)) <= count:
        assert box.get_process(writer).status == ProcessStatus.RUNNING, box.get_stderr(writer).lines
    return present


def suspects(home: Path, box: Sandbox) -> set[str]:
    """Files whose times a further checkpoint will not trust, by what the last one noted."""
    (notes,) = (home / "run" / box.sandbox_id).glob("copied.*")
    return {path for path, entry in Copied.load(notes).entries.items() if entry.suspect}


def test_each_snapshot_is_one_instant(world: SnapshotInfo, home: Path) -> None:
    with Sandbox.create(snapshot_id=world.snapshot_id) as box:
        writer = box.start_process("python", ["-I", "-S", "-c", WRITER])
        reached = 0
        snapshots = []
        for _ in range(ROUNDS):
            present = wait_past(box, writer.pid, reached + 100)
            snapshots.append((present, box.checkpoint()))
            reached = count_in(box)
            assert {f"workspace/{name}" for name in ("first", "second", "still", "log")} <= suspects(home, box)
        for at_least, snapshot in snapshots:
            with Sandbox.create(snapshot_id=snapshot.snapshot_id) as child:
                found = read(child)
            first, second, log = found["first"], found["second"], found["log"]
            assert isinstance(first, int)
            assert isinstance(log, list)
            assert first >= at_least
            assert first - 1 <= second <= first, found
            assert log == list(range(1, len(log) + 1))
            assert second - 1 <= len(log) <= second
            assert found["torn"] == ""
            assert len(found["dirs"]) == 1
            assert int(found["last"]) in (len(log) // 50 * 50, (len(log) // 50 - 1) * 50)
        firsts = [at_least for at_least, _ in snapshots]
        assert firsts == sorted(set(firsts))
