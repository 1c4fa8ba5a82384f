"""Trees: what is on the disk survives checkpoints, restores and forks exactly."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conformance.conftest import Sandboxes
from tests.conformance.differences import able
from tests.conformance.inside import SLEEPER, python, shell, told
from tests.conformance.trees import Manifest, differences, plant_here, plant_inside, tell_here, tell_inside

from worldfork import Sandbox, SnapshotInfo
from worldfork.core.remove import remove_tree
from worldfork.sandbox.driver import Capabilities

Needs = Callable[[str], None]
WAYS = ("idle", "busy", "stopped", "mixed")
"""How checkpoints are taken: of an idle sandbox, of one with a process, of one that ends with it, in turns."""


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Path]:
    """A directory of the host that goes through the same steps."""
    yield tmp_path / "plain"
    remove_tree(tmp_path)


class Taker:
    """Takes checkpoints in one of the ways, and goes on in the sandbox or in a restore of it."""

    def __init__(self, sandboxes: Sandboxes, box: Sandbox, way: str) -> None:
        self.sandboxes, self.box, self.way = sandboxes, box, way
        self._sleeper = 0
        self._taken = 0

    def take(self) -> SnapshotInfo:
        way = ("busy", "idle", "busy", "stopped")[self._taken % 4] if self.way == "mixed" else self.way
        self._taken += 1
        if way == "busy" and not self._sleeper:
            self._sleeper = self.box.start_process(*SLEEPER).pid
        if way != "busy" and self._sleeper:
            self.box.kill_process(self._sleeper)
            self._sleeper = 0
        snapshot = self.box.checkpoint(stop=way == "stopped")
        if way == "stopped":
            self.box = self.sandboxes.restore(snapshot)
        return snapshot


def shown(manifest: Manifest, capabilities: Capabilities) -> Manifest:
    """What a restore tells of a tree: the image that a machine reads it from has holes, and counts none."""
    hidden = () if able(capabilities, "disk_on_host") else ("sparse",)
    return {path: {key: row[key] for key in row if key not in hidden} for path, row in manifest.items()}


@pytest.mark.behaviour("checkpoint-10", "restore-1")
@pytest.mark.parametrize("way", WAYS)
def test_a_tree_with_one_of_everything_survives(
    sandboxes: Sandboxes, capabilities: Capabilities, plain: Path, way: str
) -> None:
    top, owners = "/srv/tree", capabilities.other_users
    taker = Taker(sandboxes, sandboxes.create(), way)
    for step in ("first", "second", "third"):
        plant_here(step, plain, owners)
        plant_inside(step, taker.box, top, owners)
        wanted = tell_here(plain)
        assert differences(wanted, tell_inside(taker.box, top)) == [], f"before a checkpoint, after {step}"
        snapshot = taker.take()
        assert differences(wanted, tell_inside(taker.box, top)) == [], f"the source, after {step}"
        fork = sandboxes.restore(snapshot)
        found = shown(tell_inside(fork, top), capabilities)
        assert differences(shown(wanted, capabilities), found) == [], f"a restore, after {step}"
    # And what a fork's own snapshot holds.
    again = sandboxes.restore(fork.checkpoint())
    assert differences(shown(wanted, capabilities), shown(tell_inside(again, top), capabilities)) == []


@pytest.mark.behaviour("checkpoint-11")
@pytest.mark.parametrize("way", WAYS)
def test_deleted_files_of_the_base_stay_deleted(sandboxes: Sandboxes, way: str) -> None:
    taker = Taker(sandboxes, sandboxes.create(), way)
    shell(taker.box, "mkdir -p /opt/d/e; echo 1 > /opt/d/e/f; rm /etc/passwd; rm -r /etc/default; mkdir /etc/default")
    taker.take()
    shell(taker.box, "rm -r /opt/d; rm -r /etc/skel; echo new > /etc/skel")
    snapshot = taker.take()
    look = "ls -A /opt/d /etc/passwd /etc/default 2>&1 | sort; cat /etc/skel"
    for box in (taker.box, sandboxes.restore(snapshot)):
        assert box.sh("[ -e /etc/passwd ] || [ -e /opt/d ]").exit_code == 1
        assert shell(box, "ls -A /etc/default; cat /etc/skel") == "new"
        assert "f" not in box.sh(look).stdout.split()
    shell(taker.box, "mkdir -p /opt/d/e /etc/skel.d; rm /etc/skel; mkdir /etc/skel; echo 2 > /opt/d/g")
    snapshot = taker.take()
    for box in (taker.box, sandboxes.restore(snapshot)):
        assert shell(box, "cd /opt/d; find . | sort; ls -A /etc/skel") == ".\n./e\n./g"


@pytest.mark.behaviour("checkpoint-12")
@pytest.mark.parametrize("way", WAYS)
def test_directories_of_lower_layers_can_be_renamed(sandboxes: Sandboxes, needs: Needs, way: str) -> None:
    needs("rename_base_dirs")
    taker = Taker(sandboxes, sandboxes.create(), way)
    shell(taker.box, "mkdir -p /srv/a/b/c; echo 1 > /srv/a/b/c/f; echo 2 > /srv/a/top; mkdir /srv/other")
    taker.take()
    python(taker.box, "import os; os.rename('/srv/a', '/srv/moved'); os.rename('/etc/skel', '/srv/skel')")
    taker.take()
    python(taker.box, "import os; os.rename('/srv/moved/b', '/srv/other/b'); open('/srv/other/b/c/new', 'w').close()")
    taker.take()
    shell(taker.box, "rm /srv/other/b/c/f; mkdir /srv/a; echo 3 > /srv/a/fresh")
    python(taker.box, "import os; os.rename('/srv/moved', '/srv/again'); os.rename('/srv/other/b/c', '/srv/c')")
    wanted = sorted([
        "/srv/a", "/srv/a/fresh", "/srv/again", "/srv/again/top", "/srv/c", "/srv/c/new", "/srv/other", "/srv/other/b",
    ])  # fmt: skip
    snapshot = taker.take()
    for box in (taker.box, sandboxes.restore(snapshot), sandboxes.restore(sandboxes.restore(snapshot).checkpoint())):
        assert shell(box, "find /srv -mindepth 1 -path /srv/skel -prune -o -mindepth 1 -print | sort").split() == wanted
        assert shell(box, "ls -A /srv/skel | head -1") != ""
        assert box.run("test", ["-e", "/etc/skel"]).exit_code == 1
        assert box.read_file("/srv/again/top") == b"2\n"


@pytest.mark.behaviour("checkpoint-12")
def test_where_they_cannot_be_renamed_tools_copy(sandboxes: Sandboxes, capabilities: Capabilities) -> None:
    if capabilities.rename_base_dirs:
        pytest.skip("this driver can rename directories of lower layers")
    box = sandboxes.create()
    shell(box, "mkdir -p /srv/a/b; echo 1 > /srv/a/b/f")
    program = (
        "import errno, os\n"
        "try:\n"
        "    os.rename('/srv/a', '/srv/moved')\n"
        "except OSError as error:\n"
        "    print(errno.errorcode[error.errno])\n"
    )
    box.checkpoint()
    assert python(box, program) == "EXDEV\n"
    shell(box, "mv /srv/a /srv/moved")
    fork = sandboxes.restore(box.checkpoint())
    assert shell(fork, "find /srv -mindepth 1 | sort; cat /srv/moved/b/f").split() == [
        "/srv/moved", "/srv/moved/b", "/srv/moved/b/f", "1",
    ]  # fmt: skip


@pytest.mark.behaviour("checkpoint-13")
@pytest.mark.parametrize("way", WAYS)
def test_hard_links_split_when_written_from_an_earlier_layer(sandboxes: Sandboxes, way: str) -> None:
    taker = Taker(sandboxes, sandboxes.create(), way)
    shell(taker.box, "echo 1 > /srv/one; ln /srv/one /srv/two; ln /srv/one /srv/three")
    snapshot = taker.take()
    fork = sandboxes.restore(snapshot)
    look = "stat -c '%h %s' /srv/one /srv/two /srv/three; [ /srv/one -ef /srv/two ] && echo same"
    assert shell(fork, look).splitlines()[-1] == "same"
    shell(fork, "echo longer >> /srv/one")
    assert shell(fork, "cat /srv/two /srv/three; wc -l < /srv/one") == "1\n1\n2"
    # The two that were not written are the snapshot's own, and the snapshot is as it was.
    assert shell(sandboxes.restore(snapshot), "cat /srv/one /srv/two") == "1\n1"
    again = sandboxes.restore(fork.checkpoint())
    assert shell(again, "cat /srv/two /srv/three; wc -l < /srv/one") == "1\n1\n2"


@pytest.mark.behaviour("checkpoint-14")
@pytest.mark.parametrize("way", WAYS)
def test_the_root_itself_survives(sandboxes: Sandboxes, way: str) -> None:
    taker = Taker(sandboxes, sandboxes.create(), way)
    program = (
        "import os\nos.setxattr('/', 'user.root', b'1'); os.chmod('/', 0o711); os.utime('/', ns=(5, 1_234_567_891))\n"
    )
    look = (
        "import json, os\n"
        "i = os.stat('/')\n"
        "print(json.dumps([oct(i.st_mode), i.st_mtime_ns, os.getxattr('/', 'user.root').decode()]))\n"
    )
    python(taker.box, program)
    wanted = [oct(stat.S_IFDIR | 0o711), 1_234_567_891, "1"]
    assert told(taker.box, look) == wanted
    snapshot = taker.take()
    assert told(taker.box, look) == wanted
    assert told(sandboxes.restore(snapshot), look) == wanted


@pytest.mark.behaviour("checkpoint-15")
def test_a_file_that_is_open_while_it_is_copied(sandboxes: Sandboxes) -> None:
    box = sandboxes.create()
    program = (
        "import mmap, os, sys\n"
        "appended = open('/srv/log', 'ab', buffering=0)\n"
        "fd = os.open('/srv/mapped', os.O_RDWR | os.O_CREAT)\n"
        "os.ftruncate(fd, 4096)\n"
        "page = mmap.mmap(fd, 4096)\n"
        "page[0] = 0\n"
        "deleted = open('/srv/deleted', 'w+b', buffering=0)\n"
        "os.unlink('/srv/deleted')\n"
        "for word in sys.stdin:\n"
        "    appended.write(word.encode()); page[0] += 1; deleted.write(b'x')\n"
        "    print('done', flush=True)\n"
    )
    writer = box.start_process("python", ["-c", program], stdin_mode="pipe")
    lines = box.follow_stdout(writer.pid)
    for number in range(1, 6):
        box.write_stdin(writer.pid, b"%d\n" % number)
        assert next(lines).line == "done"
        fork = sandboxes.restore(box.checkpoint())
        # A page that is dirty already takes the next write without a new time, and still it is seen.
        assert fork.read_file("/srv/log") == b"".join(b"%d\n" % n for n in range(1, number + 1))
        assert fork.read_file("/srv/mapped")[0] == number
        assert fork.run("test", ["-e", "/srv/deleted"]).exit_code == 1
    assert box.get_process(writer.pid).status == "running"
    box.close_stdin(writer.pid)
    assert list(lines) == []
    assert box.get_process(writer.pid).exit_code == 0
