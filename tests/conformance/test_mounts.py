"""Mounts: directories of the host and of snapshots that a sandbox shows read-only, and that are no part of its disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conformance.conftest import Sandboxes
from tests.conformance.differences import able

from worldfork import Sandbox, SnapshotStore
from worldfork.core.errors import ConfigError, LaunchFailed, NotFound
from worldfork.lineage.place import place
from worldfork.records.origin import Mount, Origin
from worldfork.sandbox.driver import Capabilities


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory of the host."""
    (tmp_path / "set" / "deep").mkdir(parents=True)
    (tmp_path / "set" / "file").write_text("of the host\n")
    (tmp_path / "set" / "deep" / "file").write_text("deep\n")
    for path in (tmp_path / "set", tmp_path / "set" / "deep", tmp_path):
        path.chmod(0o755)
    return tmp_path / "set"


def of(directory: Path, target: str = "/data/set") -> Mount:
    return Mount(target, Origin(directory=str(directory)))


@pytest.fixture
def tools(sandboxes: Sandboxes) -> str:
    """A snapshot with a program in it, in more than one layer."""
    box = sandboxes.create()
    box.sh("mkdir -p /opt/agent/bin && echo gone > /opt/agent/gone && echo low > /opt/agent/low", check=True)
    box.checkpoint()
    program = "printf '#!/bin/sh\\necho tool\\n' > /opt/agent/bin/tool && chmod 755 /opt/agent/bin/tool"
    box.sh(f"rm /opt/agent/gone && {program}", check=True)
    snapshot = box.checkpoint()
    box.terminate()
    return str(snapshot.snapshot_id)


@pytest.mark.behaviour("mount-1")
def test_a_directory_of_the_host_is_shown_and_cannot_be_changed(
    sandboxes: Sandboxes, data: Path, capabilities: Capabilities
) -> None:
    box = sandboxes.create(mounts=[of(data)])
    assert box.read_file("/data/set/file") == b"of the host\n"
    assert box.sh("cat /data/set/deep/file").stdout == "deep\n"
    told = box.sh(
        "cd /data/set; touch new; echo x >> file; rm -f file; mv file other; mkdir d; chmod 777 .; ln file l; "
        "mount -o remount,rw /data/set; umount /data/set"
    )
    assert told.exit_code != 0
    assert sorted(path.name for path in data.rglob("*")) == ["deep", "file", "file"]
    assert (data / "file").read_text() == "of the host\n"
    # What the host changes is seen, or is not there until the next start.
    (data / "later").write_text("later\n")
    seen = box.sh("ls /data/set").stdout.split()
    assert ("later" in seen) == able(capabilities, "live_mounts")
    assert sandboxes.create(mounts=[of(data)]).read_file("/data/set/later") == b"later\n"


@pytest.mark.behaviour("mount-1")
def test_nothing_of_it_gives_rights(sandboxes: Sandboxes, data: Path) -> None:
    program = data / "program"
    program.write_text("#!/bin/sh\ntrue\n")
    program.chmod(0o4755)
    box = sandboxes.create(mounts=[of(data)])
    options = box.sh("grep ' /data/set ' /proc/self/mountinfo").stdout.split()[5].split(",")
    assert {"ro", "nosuid", "nodev"} <= set(options)
    assert box.run("/data/set/program").ok


@pytest.mark.behaviour("mount-2")
def test_a_directory_of_a_snapshot_is_shown(sandboxes: Sandboxes, tools: str) -> None:
    mounts = [Mount("/opt/tools", Origin(snapshot=tools), "/opt/agent"), Mount("/whole", Origin(snapshot=tools))]
    box = sandboxes.create(mounts=mounts)
    assert box.run("/opt/tools/bin/tool").stdout == "tool\n"
    assert box.sh("ls /opt/tools").stdout.split() == ["bin", "low"]
    assert box.sh("ls /whole/opt/agent").stdout.split() == ["bin", "low"]
    assert not box.sh("touch /opt/tools/new").ok
    assert not box.sh("rm /whole/opt/agent/low").ok
    # The snapshot may go; what is shown stays for as long as the sandbox lives.
    Sandbox.delete_snapshot(tools)
    place().store.collect()
    assert box.run("/opt/tools/bin/tool").stdout == "tool\n"


@pytest.mark.behaviour("mount-2")
def test_a_snapshot_is_named_by_its_name_too(sandboxes: Sandboxes, tools: str) -> None:
    SnapshotStore().tag(tools, "the-tools")
    box = sandboxes.create(mounts=[Mount("/t", Origin(snapshot="the-tools"), "/opt/agent")])
    assert box.read_file("/t/low") == b"low\n"
    assert [(shown.source, shown.fingerprint) for shown in box.mounts] == [(f"snapshot:{tools}/opt/agent", tools)]
    SnapshotStore().untag("the-tools")


@pytest.mark.behaviour("mount-3")
def test_no_mount_enters_a_checkpoint(sandboxes: Sandboxes, data: Path, tools: str) -> None:
    box = sandboxes.create(mounts=[of(data), Mount("/opt/tools", Origin(snapshot=tools), "/opt/agent")])
    before = box.checkpoint()
    assert before.layers == sandboxes.create().info().layers  # not even the places to mount on: nothing was written
    box.write_file("/root/own", "own\n")
    after = box.checkpoint()
    assert [change.path for change in SnapshotStore().diff(before.snapshot_id, after.snapshot_id)] == ["/root/own"]
    # It goes on with them, on whatever upper it stands.
    assert box.read_file("/data/set/file") == b"of the host\n"
    assert box.run("/opt/tools/bin/tool").stdout == "tool\n"
    sleeper = box.start_process("sleep", ["100"])
    box.write_file("/root/more", "more\n")
    busy = box.checkpoint()
    box.kill_process(sleeper.pid)
    for child in (sandboxes.restore(after), sandboxes.restore(busy), *sandboxes.fork(box, 1)):
        assert child.sh("ls -d /data /opt/tools 2>/dev/null").stdout == ""
        assert child.mounts == ()
    last = box.checkpoint(stop=True)
    changes = SnapshotStore().diff(before.snapshot_id, last.snapshot_id)
    assert [change.path for change in changes] == ["/root/more", "/root/own"]


@pytest.mark.behaviour("mount-3")
def test_a_fork_has_its_own_mounts(sandboxes: Sandboxes, data: Path, box: Sandbox) -> None:
    first, second = sandboxes.fork(box, 2, mounts=[of(data)])
    assert first.read_file("/data/set/file") == second.read_file("/data/set/file")
    assert [shown.target for shown in first.mounts] == ["/data/set"]


@pytest.mark.behaviour("mount-3")
def test_moving_what_a_mount_lies_in_breaks_no_checkpoint(
    sandboxes: Sandboxes, data: Path, capabilities: Capabilities
) -> None:
    box = sandboxes.create(mounts=[of(data, "/data/a/b")])
    moved = box.run("python", ["-c", "import os; os.rename('/data', '/moved')"])  # `mv` would copy
    assert moved.ok == capabilities.rename_base_dirs
    box.write_file("/root/own", "own\n")
    snapshot = box.checkpoint()
    at = "/moved" if moved.ok else "/data"
    assert box.read_file(f"{at}/a/b/file") == b"of the host\n"
    child = sandboxes.restore(snapshot)
    assert child.read_file("/root/own") == b"own\n"
    assert child.sh("find /moved /data -type f 2>/dev/null").stdout == ""
    assert SnapshotStore().digest(snapshot.snapshot_id)


@pytest.mark.behaviour("mount-4")
def test_each_has_a_fingerprint_of_what_it_shows(sandboxes: Sandboxes, data: Path) -> None:
    first = sandboxes.create(mounts=[of(data)]).mounts[0]
    assert (first.target, first.source) == ("/data/set", f"directory:{data.resolve()}")
    assert sandboxes.create(mounts=[of(data)]).mounts[0].fingerprint == first.fingerprint
    (data / "more").write_text("more")
    assert sandboxes.create(mounts=[of(data)]).mounts[0].fingerprint != first.fingerprint


@pytest.mark.behaviour("mount-5")
def test_what_cannot_be_mounted_starts_nothing(sandboxes: Sandboxes, tmp_path: Path, tools: str) -> None:
    with pytest.raises(ConfigError):
        sandboxes.create(mounts=[of(tmp_path / "nowhere")])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        sandboxes.create(mounts=[of(tmp_path / "file")])
    home = place().home.root
    for shows_the_store in (home, home.parent, home / "layers", Path("/")):
        with pytest.raises(ConfigError):
            sandboxes.create(mounts=[of(shows_the_store)])
    with pytest.raises(NotFound):
        sandboxes.create(mounts=[Mount("/a", Origin(snapshot="sn-aaaaaaaaaaaaaaaa"))])
    for path in ("/opt/nowhere", "/opt/agent/low/x", "/bin/x"):
        with pytest.raises(LaunchFailed):
            sandboxes.create(mounts=[Mount("/a", Origin(snapshot=tools), path)])


@pytest.mark.behaviour("mount-5")
def test_no_link_of_a_world_leads_a_mount_astray(sandboxes: Sandboxes, data: Path, box: Sandbox) -> None:
    box.sh("ln -s /etc /data && mkdir /was && echo file > /plain", check=True)
    snapshot = box.checkpoint()
    for target in ("/data/set", "/data", "/plain", "/plain/x"):
        with pytest.raises(LaunchFailed):
            sandboxes.restore(snapshot, mounts=[of(data, target)])
    assert sandboxes.restore(snapshot, mounts=[of(data, "/was")]).read_file("/was/file") == b"of the host\n"
