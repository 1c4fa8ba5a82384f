"""Security: worlds made to harm whoever starts, copies or removes them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conformance.attack import ROOT, Factory, attacked, facts, live, prisons, tree, works_or_fails_typed
from tests.conformance.differences import able
from tests.conformance.inside import python, shell, wait_for
from tests.roots import make_small_root

from worldfork import Sandbox
from worldfork.core.errors import PathError, SandboxError, WorldforkError
from worldfork.sandbox.driver import Capabilities

pytestmark = pytest.mark.timeout(240)
prison = prisons()


@pytest.fixture(scope="module")
def small_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system to copy."""
    return make_small_root(tmp_path_factory.mktemp("root") / "small")


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A directory of the host that nothing may touch; looked at again afterwards, as are the mounts of the host."""
    directory = tmp_path / "victim"
    (directory / "below").mkdir(parents=True)
    (directory / "below" / "file").write_text("precious")
    (directory / "hostname").write_text("precious")
    before, mounts = tree(directory), Path("/proc/self/mountinfo").read_text()
    yield directory
    assert tree(directory) == before
    assert Path("/proc/self/mountinfo").read_text() == mounts


def copy_of(small_root: Path, target: Path) -> Path:
    shutil.copytree(small_root, target, symlinks=True, copy_function=os.link)
    return target


@pytest.fixture(autouse=True)
def opened_again(tmp_path: Path) -> Iterator[None]:
    """Give the directories of mode 000 back to whoever clears the temporary ones away."""
    yield
    for directory, names, _ in os.walk(tmp_path):
        for name in names:
            path = Path(directory, name)
            if not path.is_symlink() and not stat.S_IMODE(path.lstat().st_mode):
                path.chmod(0o755)


def put(path: Path, kind: str, victim: Path) -> None:
    """Put something hostile in the place of whatever is at a path."""
    if path.is_dir() and not path.is_symlink():
        path.chmod(0o700)
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "link to the host":
        path.symlink_to(victim)
    elif kind == "link upwards":
        path.symlink_to("../" * 40 + str(victim).lstrip("/"))
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "dangling link":
        path.symlink_to("/nowhere/at/all")
    elif kind == "file":
        path.write_text("no directory")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o666)
    elif kind == "closed directory":
        path.mkdir(mode=0)
    elif kind == "directory":
        path.mkdir()


KINDS = (
    "link to the host", "link upwards", "link to itself", "dangling link", "file", "fifo", "socket", "closed directory",
    "nothing",
)  # fmt: skip
DIRECTORIES = ("proc", "sys", "dev", "etc", "tmp", "run", "root", "var", "workspace")


@pytest.mark.behaviour("security-27")
@pytest.mark.parametrize("kind", KINDS)
def test_a_base_with_traps_for_directories(
    prison: Factory, small_root: Path, victim: Path, tmp_path: Path, kind: str
) -> None:
    for name in DIRECTORIES:
        root = copy_of(small_root, tmp_path / f"base-{name}")
        put(root / name, kind, victim)
        before = tree(root) if kind != "closed directory" else {}
        box = works_or_fails_typed(lambda root=root: prison(base=f"dir:{root}"))  # type: ignore[misc]
        if box is not None:
            box.terminate()
        # A base is only read.
        assert (tree(root) if kind != "closed directory" else {}) == before


@pytest.mark.behaviour("security-27")
@pytest.mark.parametrize("kind", [*KINDS, "directory"])
def test_a_base_with_traps_for_files(
    prison: Factory, small_root: Path, victim: Path, tmp_path: Path, kind: str
) -> None:
    root = copy_of(small_root, tmp_path / "base")
    for name in ("hostname", "hosts", "resolv.conf", "machine-id", "passwd", "group"):
        put(root / "etc" / name, kind, victim / "hostname")
    if kind == "closed directory":
        for name in ("passwd", "group"):
            put(root / "etc" / name, "nothing", victim)
    box = works_or_fails_typed(lambda: prison(base=f"dir:{root}"))
    if box is not None:
        # Looking a user up reads those files, and must neither wait for a FIFO nor follow a link out.
        with contextlib.suppress(SandboxError):
            assert "precious" not in box.run("id", user="somebody", timeout=20).stderr
        for name in ("hostname", "passwd"):
            assert (
                box.run("sh", ["-c", f"test ! -f /etc/{name} || head -c 100 /etc/{name}"], timeout=20).stdout
                != "precious"
            )
            with contextlib.suppress(PathError):
                box.write_file(f"/etc/{name}", b"overwritten")


def tampered(prison: Factory, change: Callable[[Path], None]) -> Callable[[], Sandbox]:
    """A way to start a sandbox from a snapshot whose layer was changed behind our back, as an imported one could be."""
    box = prison()
    box.write_file("/workspace/file", b"here")
    snapshot = box.checkpoint(wait_until="completed")
    box.terminate()
    place = live(box).place
    layer = place.store.layer_path(place.store.snapshot(snapshot.snapshot_id).layers[0])
    change(Path(layer))
    return lambda: prison(snapshot_id=snapshot.snapshot_id)


@pytest.mark.behaviour("security-27")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nothing"])
def test_a_snapshot_with_traps_where_mounts_go(
    prison: Factory, victim: Path, kind: str, of_the_host: tuple[str, ...]
) -> None:
    for name in ("proc", *(top[1:] for top in of_the_host), "etc/hostname"):

        def change(layer: Path, name: str = name) -> None:
            (layer / name).parent.mkdir(exist_ok=True)
            put(layer / name, kind, victim)

        box = works_or_fails_typed(tampered(prison, change))
        if box is not None:
            assert box.read_file("/workspace/file") == b"here"
            assert "precious" not in box.run("sh", ["-c", "head -c 100 /etc/hostname"], timeout=20).stdout


@pytest.mark.behaviour("security-27")
@ROOT
def test_a_snapshot_with_devices_and_set_id_programs(prison: Factory) -> None:
    disk = os.stat("/").st_dev

    def change(layer: Path) -> None:
        os.mknod(layer / "memory", stat.S_IFCHR | 0o666, os.makedev(1, 1))
        os.mknod(layer / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        os.mknod(layer / "disk", stat.S_IFBLK | 0o666, disk)
        shutil.copy("/usr/bin/env", layer / "tool")
        (layer / "tool").chmod(0o6755)

    box = works_or_fails_typed(tampered(prison, change))
    if box is None:
        return
    program = "tell([attempt(os.open, path, mode) for path in ('/memory', '/zero', '/disk') for mode in (0, 1, 2)])"
    assert set(attacked(box, program)) <= {"EACCES", "EPERM", "ENXIO"}
    if facts(box).form == "trusted":
        assert shell(box, "/tool sh -c 'grep ^Uid /proc/self/status'", user="1234:1234").split()[1:] == ["1234"] * 4


@pytest.mark.behaviour("security-27")
def test_what_a_policy_does_to_mount_points_hurts_only_itself(
    prison: Factory, victim: Path, of_the_host: tuple[str, ...]
) -> None:
    box = prison()
    points = " ".join(("/proc", "/dev", "/sys", *of_the_host))
    shell(box, f"for d in {points}; do mv $d $d.old; rmdir $d; rm -rf $d; ln -s {victim} $d; done 2>/dev/null; true")
    assert (
        sorted(shell(box, "ls /proc/self /dev /sys /usr | wc -l; test -L /proc -o -L /usr || echo no").split())[-1]
        == "no"
    )
    shell(box, f"mv /etc /etc.old && ln -s {victim} /etc; mv /tmp /tmp.old && ln -s {victim} /tmp")
    for step in (lambda: box.checkpoint(), lambda: box.fork(1).unwrap()[0]):
        with contextlib.suppress(WorldforkError):
            result = step()
            if isinstance(result, Sandbox):
                with result:
                    assert "precious" not in result.run("sh", ["-c", "head -c 100 /etc/hostname"]).stdout
    assert box.run("echo", ["on"]).stdout == "on\n"


@pytest.mark.behaviour("security-27")
def test_moving_what_mounts_lie_in_keeps_nobody_from_a_snapshot(prison: Factory) -> None:
    box = prison()
    points = shell(box, "cut -d' ' -f5 /proc/self/mountinfo").splitlines()
    tops = {f"/{point.split('/')[1]}" for point in points if point.count("/") > 1} - {"/dev", "/proc", "/sys", "/usr"}
    assert "/etc" in tops
    # Longer than a line of text that one would set aside for a path.
    deep = f"/{'x' * 200}/{'y' * 200}/{'z' * 200}"
    shell(box, f"mkdir -p {deep}; mv {' '.join(sorted(tops))} {deep}; echo one > /workspace/file")
    first = box.checkpoint()
    box.write_file("/workspace/file", b"two")
    second = box.checkpoint()
    for snapshot, content in ((first, b"one\n"), (second, b"two")):
        with prison(snapshot_id=snapshot.snapshot_id) as restored:
            assert restored.read_file("/workspace/file") == content
            assert restored.run("sh", ["-c", f"test -d {deep}/etc"]).ok


@pytest.mark.behaviour("security-28")
def test_paths_are_resolved_inside_whatever_links_say(prison: Factory, victim: Path, tmp_path: Path) -> None:
    box = prison()
    shell(box, f"ln -s {victim} out; ln -s {victim}/hostname file; ln -s / top; ln -s {'../' * 40}{str(victim)[1:]} up")
    for path in (
        f"{victim}/hostname",
        "out/hostname",
        "file",
        f"top{victim}/hostname",
        "up/hostname",
        "/proc/1/root/etc",
    ):
        with pytest.raises(PathError):
            box.read_file(path)
    for path in ("out", "up", f"top{victim}"):
        with pytest.raises(PathError):
            box.list_directory(path)
    box.write_file(f"{victim}/hostname", b"inside")
    box.write_file("file", b"inside too")
    box.write_file("up/new", b"inside as well")
    local = tmp_path / "local"
    (local / "sub").mkdir(parents=True)
    (local / "sub" / "hostname").write_text("uploaded")
    box.upload_directory(local, "out")
    box.upload_file(local / "sub" / "hostname", "out/hostname")
    assert box.read_file(f"{victim}/hostname") == b"uploaded"
    assert shell(box, f"ls {victim}").split() == ["hostname", "new", "sub"]
    for path in ("file", "out", "up", "top"):
        box.delete_file(path, recursive=True)
    assert shell(box, f"ls {victim}").split() == ["hostname", "new", "sub"]


@pytest.mark.behaviour("security-28")
def test_deleting_never_crosses_a_mount(prison: Factory, of_the_host: tuple[str, ...]) -> None:
    box = prison()
    shell(box, "echo kept > /dev/shm/kept")
    for path in ("/dev", "/dev/shm", "/proc", "/sys", *of_the_host):
        with pytest.raises(PathError):
            box.delete_file(path, recursive=True)
    assert shell(box, "cat /dev/shm/kept") == "kept"
    assert os.path.exists("/usr/bin")


@pytest.mark.behaviour("security-29")
def test_a_download_writes_only_below_its_target(prison: Factory, victim: Path, tmp_path: Path) -> None:
    box = prison()
    lines = (
        f"mkdir -p give/sub give/dir; echo new > give/sub/file; echo new > give/file; ln -s {victim} give/link",
        f"ln -s {victim}/hostname give/filelink; mkfifo give/fifo; cp /usr/bin/env give/tool; chmod 6777 give/tool",
        "chmod 1777 give/dir; printf x > \"$(printf 'give/\\377\\nodd')\"",
    )
    shell(box, "; ".join(lines))
    target = tmp_path / "target"
    box.download_directory("give", target)
    assert os.readlink(target / "link") == str(victim)
    assert stat.S_IMODE((target / "tool").stat().st_mode) == 0o777
    assert b"\xff\nodd" in os.listdir(os.fsencode(target))
    assert not (target / "fifo").exists()
    # What lies there already and leads elsewhere is replaced or refused.
    for name, ours in (("sub", victim), ("file", victim / "hostname")):
        other = tmp_path / f"target-{name}"
        other.mkdir()
        (other / name).symlink_to(ours)
        if name == "sub":
            with pytest.raises(OSError):
                box.download_directory("give", other)
        else:
            box.download_directory("give", other)
            assert not (other / name).is_symlink()
    (tmp_path / "single").symlink_to(victim / "hostname")
    box.download_file("give/file", tmp_path / "single")
    assert not (tmp_path / "single").is_symlink()


@pytest.mark.behaviour("security-29")
def test_a_download_of_a_tree_that_changes_writes_only_below_its_target(
    prison: Factory, victim: Path, tmp_path: Path
) -> None:
    box = prison()
    program = f"""
import os, shutil
os.makedirs("/workspace/give")
os.close(os.open("/tmp/begun", os.O_CREAT | os.O_WRONLY))
while True:
    for name in ("a", "b", "c"):
        path = f"/workspace/give/{{name}}"
        os.mkdir(path)
        open(path + "/hostname", "w").write("x" * 1000)
        os.rename(path, path + "-")
        os.symlink("{victim}", path)
        os.unlink(path)
        shutil.rmtree(path + "-")
"""
    box.start_process("python", ["-c", program])
    wait_for(box, "/tmp/begun")
    target = tmp_path / "target"
    for _ in range(25):
        with contextlib.suppress(OSError, SandboxError):
            box.download_directory("/workspace/give", target)
        for path in target.rglob("*"):
            assert path.is_symlink() or path.resolve().is_relative_to(target)


@pytest.mark.behaviour("security-30")
def test_a_sandbox_is_removed_without_following_what_is_in_it(
    prison: Factory, victim: Path, capabilities: Capabilities
) -> None:
    box = prison()
    depth = 1500 if able(capabilities, "disk_on_host") else 250
    shell(
        box, f"mkdir -p a/b; ln -s {victim} a/out; ln -s / a/b/top; ln -s .. a/b/up; ln -s {victim}/below/file a/file"
    )
    shell(box, "mkdir closed; touch closed/file; chmod 000 closed; mkfifo a/fifo")
    program = f"""
import os
name = "d" * 200
top = os.getcwd()
for _ in range({depth}):
    os.mkdir(name)
    os.chdir(name)
os.symlink({str(victim)!r}, "out")
open("x" * 255, "w").close()
"""
    python(box, program)
    snapshot = box.checkpoint(wait_until="completed")
    box.terminate()
    place = live(box).place
    layers = [place.store.layer_path(layer) for layer in place.store.snapshot(snapshot.snapshot_id).layers[:1]]
    Sandbox.delete_snapshot(snapshot.snapshot_id)
    place.store.collect()
    place.store.empty_trash()
    assert not [path for path in layers if Path(path).exists()]


MOUNTED = """
import os, subprocess, sys, warnings
from pathlib import Path
from worldfork import Sandbox
from worldfork.lineage.place import place
victim = sys.argv[1]
box = Sandbox.create(base=f"dir:{sys.argv[2]}", network="none")
run = Path(box._inner._live.facts.run)
point = run / "upper.0" / "workspace" / "mounted"
point.mkdir(parents=True)
subprocess.run(["mount", "--bind", victim, str(point)], check=True)
box.terminate()
place().sweep()
"""


@pytest.mark.behaviour("security-30")
@ROOT
def test_a_mount_in_the_way_of_a_removal_is_left_alone(small_root: Path, victim: Path, tmp_path: Path) -> None:
    # In a mount namespace of its own, so that no mistake here reaches the machine's mounts.
    home = tmp_path / "home"
    line = ["unshare", "-m", "--propagation", "private", sys.executable, "-W", "ignore", "-c", MOUNTED]
    environ = {**os.environ, "WORLDFORK_HOME": str(home)}
    subprocess.run([*line, str(victim), str(small_root)], env=environ, capture_output=True, timeout=120, check=False)
    # Out here nothing is mounted there any more: what is left is a plain, empty directory.
    left = [path for path in [*(home / "trash").rglob("*"), *(home / "run").rglob("*")] if path.name == "mounted"]
    assert all(list(path.iterdir()) == [] for path in left)
    assert not any((path / "below").exists() for path in left)


@pytest.mark.behaviour("security-31")
def test_odd_contents_are_read_as_what_they_are(prison: Factory) -> None:
    box = prison()
    shell(
        box,
        "mkfifo fifo; ln -s /dev/zero endless; ln -s loop loop; ln -s /proc/kmsg log; truncate -s 1T huge; mkdir dir",
    )
    answers = {
        "fifo": errno.EINVAL, "endless": errno.EINVAL, "loop": errno.ELOOP, "dir": errno.EISDIR, "log": errno.EINVAL,
        "/dev/pts/ptmx": errno.EINVAL, "huge": errno.EFBIG,
    }  # fmt: skip
    for path, number in answers.items():
        with pytest.raises(PathError) as refused:
            box.read_file(path)
        assert refused.value.errno == number, path
    for path in ("fifo", "endless", "dir", "/dev/null"):
        with pytest.raises(PathError):
            box.write_file(path, b"x")
