"""Sandboxes of an ordinary user who has a range of ids; told by tests/stories/id_ranges.py as such a user.

The user has no account on this machine: a mount namespace of its own shows other files of accounts and ranges.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests import machines as guests
from tests.roots import make_small_root
from tests.stories.id_ranges import FIRST

from worldfork.core.idmap import Extent, IdMap, covers, find_id_map
from worldfork.core.remove import remove_tree

pytestmark = pytest.mark.root

ROOT = Path(__file__).resolve().parents[2]
USER = 64322
"""No account has it, and no other test works as it."""
RANGE = f"{USER}:{FIRST}:65536\n"
_ENTER = (
    'for one in passwd group subuid subgid; do mount --bind "$1/$one" "/etc/$one" || exit 9; done; shift; exec "$@"'
)
_CANDIDATES = (sys.executable, str(ROOT / ".venv-user/bin/python"), "/usr/bin/python3", "/usr/local/bin/python3")


class Person:
    """An ordinary user with a home, whose files of accounts and ranges can be exchanged."""

    def __init__(self, directory: Path, python: str) -> None:
        self.directory = directory
        self.python = python
        self.home = directory / "home" / "worldfork"
        for name in ("home", "tmp"):
            (directory / name).mkdir()
            os.chown(directory / name, USER, USER)
        for name, line in (("passwd", f"ranger:x:{USER}:{USER}::{directory}/home:/bin/sh\n"), ("group", "")):
            (directory / name).write_text(Path("/etc", name).read_text() + (line or f"ranger:x:{USER}:\n"))
        self.ranges(RANGE)

    def ranges(self, uids: str, gids: str | None = None) -> None:
        """Have these lines in /etc/subuid and /etc/subgid."""
        (self.directory / "subuid").write_text(uids)
        (self.directory / "subgid").write_text(uids if gids is None else gids)

    def command(self, *arguments: str, **environ: str) -> list[str]:
        """A command line of this user's."""
        variables = {
            "HOME": str(self.directory / "home"),
            "TMPDIR": str(self.directory / "tmp"),
            "WORLDFORK_HOME": str(self.home),
            "WORLDFORK_ID_RANGE": "auto",
            "WORLDFORK_UPKEEP": "off",
            "PYTHONPATH": f"{ROOT}/src:{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": os.defpath,
            **environ,
        }
        own = ("unshare", "--mount", "--propagation", "private", "sh", "-c", _ENTER, "enter", str(self.directory))
        become = ("setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups")
        return [*own, *become, "env", "-i", *(f"{name}={value}" for name, value in variables.items()), *arguments]

    def tells(self, story: str, *arguments: str, **environ: str) -> str:
        """Have a story told, which must come through; return what it printed last."""
        command = self.command(self.python, "-m", "tests.stories.id_ranges", story, *arguments, **environ)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip().rpartition("\n")[2]

    def shell(self, *arguments: str, **environ: str) -> str:
        """What a command of worldfork prints, which must come through."""
        command = self.command(self.python, "-m", "worldfork.cli.main", *arguments, **environ)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def processes() -> list[str]:
    """What runs as the user or as one of its ids."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                uid = os.stat(f"/proc/{entry.name}").st_uid
                line = Path(entry.path, "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if uid == USER or FIRST <= uid < FIRST + 65536:
                found.append(f"{entry.name} {uid} {line[:100]}")
    return found


def wait_until(holds: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    end_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def person(home: Path) -> Iterator[Person]:
    """Somebody with a range; nothing of theirs may run afterwards."""
    for name in ("newuidmap", "newgidmap", "setpriv", "unshare"):
        if shutil.which(name) is None:
            pytest.skip(f"there is no {name} (Debian packages uidmap, util-linux)")
    directory = Path(tempfile.mkdtemp(prefix="worldfork-ids-", dir=home.parent))
    directory.chmod(0o755)
    python = next((path for path in _CANDIDATES if _serves(directory, path)), None)
    if python is None:
        remove_tree(directory)
        pytest.skip("no Python of 3.11 or newer with the package that an ordinary user can run")
    yield Person(directory, python)
    left = [] if wait_until(lambda: not processes()) else processes()
    remove_tree(directory)
    assert left == []


def _serves(directory: Path, python: str) -> bool:
    """Whether the user can run it, and it has what seals a layer."""
    become = ("setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups")
    program = "import sys; assert sys.version_info >= (3, 11); import blake3, worldfork.content.compression"
    command = [*become, "env", f"PYTHONPATH={ROOT}/src", python, "-c", program]
    try:
        return subprocess.run(command, cwd=directory, capture_output=True, timeout=60, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.timeout(300)
@pytest.mark.parametrize("story", ["owners", "checkpoints", "apart", "calls", "disk_limit", "store"])
def test_with_a_range(person: Person, story: str) -> None:
    person.tells(story)


@pytest.mark.timeout(300)
def test_overlays_mounted_the_older_way(person: Person) -> None:
    person.tells("checkpoints", WORLDFORK_OVERLAY="legacy")


@pytest.mark.timeout(300)
def test_a_snapshot_with_a_range_needs_it(person: Person) -> None:
    kept = person.tells("keeps")
    plain = person.tells("without", kept, WORLDFORK_ID_RANGE="off")
    # Another range, a shorter one, none at all: never a tree of files that are nobody's.
    for ranges in (f"{USER}:{FIRST - 70000}:65536\n", f"{USER}:{FIRST}:2000\n"):
        person.ranges(ranges)
        person.tells("refused_outside", kept)
    person.ranges("")
    person.tells("without", kept)
    person.tells("refused_outside", kept)
    # By the account's name, and with more ids than before; and what had no range is restored with one.
    person.ranges(f"# comment\nother:1:2\nranger:{FIRST}:65535\nranger:{FIRST + 100000}:500\n")
    person.tells("restores", kept)
    person.tells("restores", plain, "echo here")


@pytest.mark.timeout(300)
def test_a_root_file_system_with_files_of_the_range(person: Person) -> None:
    top = person.directory / "tmp" / "root"
    make_small_root(top)
    (top / "given").touch()
    for path in (top, *top.rglob("*")):
        os.chown(path, USER, USER, follow_symlinks=False)
    os.chown(top / "given", FIRST + 6, FIRST + 6)
    person.tells("on_a_base", str(top), "7:7")


@pytest.mark.timeout(300)
def test_the_doctor_says_what_is_missing(person: Person) -> None:
    person.tells("doctor", f"True uids 1 to 65535 are {FIRST} to {FIRST + 65534} here; used")
    person.tells("doctor", "not used", WORLDFORK_ID_RANGE="off")
    person.ranges(RANGE, "")
    person.tells("doctor", "usermod --add-subuids")
    person.ranges(f"{USER}:{USER - 10}:65536\n")  # among them its own
    person.tells("doctor", "False /etc/subuid")


@pytest.mark.timeout(300)
def test_a_killed_owner_leaves_no_process(person: Person) -> None:
    command = person.command(person.python, "-m", "tests.stories.id_ranges", "dies")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        assert len(processes()) > 2
        owner.send_signal(signal.SIGKILL)  # every program on the way was replaced by the next
    assert wait_until(lambda: not processes()), processes()
    person.tells("owners")  # which finds nothing that could not be removed


@pytest.mark.timeout(300)
def test_the_command_line_sees_what_is_inside(person: Person) -> None:
    kept = person.tells("keeps")
    assert person.shell("cat", kept, "/workspace/d/e/f") == "it\n"
    assert "---------" in person.shell("files", kept, "/workspace/d/e")
    assert json.loads(person.shell("store", "upkeep", "--json"))["sealed"]
    assert json.loads(person.shell("store", "check", "--read-data", "--json"))["sound"]
    changed = person.tells("changes", kept)
    assert [row["path"] for row in json.loads(person.shell("diff", kept, changed, "--json"))] == ["/workspace/d/e/f"]
    subprocess.run(person.command("rm", "-rf", str(person.home)), capture_output=True, check=False)
    assert person.home.exists()
    subprocess.run(person.command(person.python, "-m", "worldfork.core.remove", str(person.home)), cwd=ROOT, check=True)
    assert not person.home.exists()


@pytest.mark.timeout(300)
def test_an_archive_keeps_owners(person: Person) -> None:
    kept = person.tells("keeps")
    archive = person.directory / "tmp" / "archive"
    elsewhere = {"WORLDFORK_HOME": str(person.directory / "home" / "other")}
    person.shell("export", kept, str(archive))
    assert json.loads(person.shell("import", str(archive), "--json", **elsewhere))["snapshot_id"] == kept
    person.shell("export", kept, f"{archive}.2", **elsewhere)
    assert archive.read_bytes() == Path(f"{archive}.2").read_bytes()
    person.tells("restores", kept, "stat -c %u:%g d/e/f | grep -x 33:44", **elsewhere)


@pytest.mark.timeout(300)
def test_programs_move_snapshots(person: Person) -> None:
    kept = person.tells("keeps")
    archive, remote = str(person.directory / "tmp" / "archive"), str(person.directory / "tmp" / "remote")
    person.tells("moves", kept, archive, remote)
    for number, source in enumerate((archive, remote)):
        person.tells("arrives", kept, source, WORLDFORK_HOME=str(person.directory / "home" / f"other{number}"))
    # Without the range what belongs to others is refused by its path, and nothing stays of it.
    command = person.command(
        person.python, "-m", "worldfork.cli.main", "import", archive, WORLDFORK_ID_RANGE="off",
        WORLDFORK_HOME=str(person.directory / "home" / "last"),
    )  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, "workspace/d" in done.stderr) == (2, True), done.stderr


@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(guests.missing()), reason=guests.missing())
def test_machines_have_the_same_ids(person: Person) -> None:
    images = guests.prepare_images(person.directory / "images")
    shutil.copytree(images / "kernels", person.home / "images" / "kernels", symlinks=True)
    root = person.directory / "root"
    make_small_root(root)
    subprocess.run(["chown", "-R", f"{USER}:{USER}", person.home, root], check=True)
    person.tells("machines", str(root), WORLDFORK_ALLOW_TCG="1")


def test_maps_are_told_apart() -> None:
    small = IdMap((Extent(0, 1000, 1), Extent(1, 100000, 2000)), (Extent(0, 1000, 1), Extent(1, 100000, 2000)))
    large = IdMap((Extent(0, 1000, 1), Extent(1, 100000, 65535)), (Extent(0, 1000, 1), Extent(1, 100000, 65535)))
    moved = IdMap((Extent(0, 1000, 1), Extent(1, 100001, 65535)), large.gids)
    assert IdMap.parse(large.text) == large
    assert covers(large.text, small.text)
    assert not covers(small.text, large.text)
    assert not covers(moved.text, small.text)
    assert covers("", "")
    assert covers(large.text, "")
    assert not covers("", small.text)
    assert not covers(large.text, "nonsense")
    assert "root" in find_id_map().reason  # type: ignore[union-attr]  # root has none
