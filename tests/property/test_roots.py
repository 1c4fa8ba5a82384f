"""What is done to the root directory itself, the one entry of a world that no layer holds by name."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from tests.property.conftest import FORMS

from worldfork import Sandbox, SnapshotInfo

ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHi", *entry) for entry in [(1, 7, -1), (2, 6, 0), (4, 5, -1), (16, 7, -1), (32, 5, -1)]
)
CHANGES = {
    "mode": "os.chmod('/', 0o711)",
    "closed": "os.chmod('/', 0o000)",
    "read only": "os.chmod('/', 0o555)",
    "time": "os.utime('/', ns=(1, 1_234_567_890_123_456_789))",
    "attribute": "os.setxattr('/', 'user.k', b'v')",
    "access list": f"os.setxattr('/', 'system.posix_acl_access', {ACL!r})",
    "default list": f"os.setxattr('/', 'system.posix_acl_default', {ACL!r})",
    "entry": "open('/new', 'w').write('x')",
    "deletion": "os.rmdir('/srv')",
    "closed after a change": "open('/new', 'w').write('x'); os.setxattr('/', 'user.k', b'v'); os.chmod('/', 0o500)",
}
LOOK = """
import json, os
info = os.stat("/")
facts = [info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, sorted(os.listdir("/")),
         {name: os.getxattr("/", name).hex() for name in os.listxattr("/")}]
print(json.dumps(facts))
"""


@pytest.fixture(scope="module", params=FORMS)
def world(request: pytest.FixtureRequest, home: object) -> Iterator[SnapshotInfo]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLDFORK_FORM", request.param)
        with Sandbox.create(network="none") as box:
            box.write_file("/first", b"")
            snapshot = box.checkpoint(stop=True)
        yield snapshot


def facts_of(box: Sandbox, change: str = "") -> Any:
    result = box.run("python", ["-I", "-S", "-c", f"import os\n{change}\n{LOOK}"], working_dir="/")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


WAYS = [(what, way) for what in CHANGES for way in ("idle", "busy")] + [("mode", "stopped"), ("read only", "stopped")]


@pytest.mark.parametrize(("what", "way"), WAYS)
def test_root_survives(world: SnapshotInfo, what: str, way: str) -> None:
    with Sandbox.create(snapshot_id=world.snapshot_id) as box:
        before = facts_of(box)
        if way == "busy":
            box.start_process("sleep", ["1000"])
        changed = facts_of(box, CHANGES[what])
        assert changed != before
        snapshot = box.checkpoint(stop=way == "stopped")
        assert snapshot.layers == world.layers + 1
        if way != "stopped":
            assert facts_of(box) == changed
        with Sandbox.create(snapshot_id=snapshot.snapshot_id) as child:
            assert facts_of(child) == changed
            if what != "closed" or os.geteuid() == 0:  # an ordinary user cannot look into it and compare
                assert child.checkpoint().layers == snapshot.layers
