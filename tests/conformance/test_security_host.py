"""Security: what of the host can be seen and reached from inside, and what others on the host reach."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.attack import (
    NOBODY,
    ROOT,
    Factory,
    attacked,
    cells,
    facts,
    in_form,
    init_pid,
    pids_inside,
    prisons,
)
from tests.conformance.differences import able
from tests.conformance.inside import shell, told
from tests.roots import make_small_root

import worldfork
from worldfork import ConfigError, Sandbox
from worldfork.sandbox.driver import Capabilities

pytestmark = pytest.mark.timeout(240)
cell = cells()
prison = prisons()

SECRETS = (
    "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "HF_TOKEN", "GITHUB_TOKEN", "SSH_AUTH_SOCK",
    "KUBECONFIG", "LD_PRELOAD_NOT", "PYTHONSTARTUP_NOT", "WANDB_API_KEY",
)  # fmt: skip


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the host with something to steal."""
    path = tmp_path / "secret"
    path.write_text(f"secret-{secrets.token_hex(8)}")
    return path


@pytest.mark.behaviour("security-19")
def test_namespaces_are_its_own(cell: Sandbox) -> None:
    kinds = ["ipc", "uts", "pid", "cgroup", "mnt", "net"] + (["user"] if facts(cell).form == "user" else [])
    inside = attacked(cell, "tell({kind: os.readlink(f'/proc/self/ns/{kind}') for kind in sys.argv[1:]})", *kinds)
    shared = [kind for kind in kinds if inside[kind] == os.readlink(f"/proc/self/ns/{kind}")]
    assert shared == []


@pytest.mark.behaviour("security-19")
def test_processes_of_the_host_do_not_exist(cell: Sandbox) -> None:
    with subprocess.Popen(["sleep", "1000"]) as mine:
        try:
            hosts = [os.getpid(), mine.pid, os.getppid()]
            program = """
import signal
def line_of(pid):
    fd = attempt(os.open, f"/proc/{pid}/cmdline", os.O_RDONLY)
    return os.read(fd, 4096).decode(errors="replace") if isinstance(fd, int) else ""
seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
lines = [line_of(pid) for pid in seen]
tell([max(seen), lines, [attempt(os.kill, int(pid), 0) for pid in sys.argv[1:] if int(pid) > max(seen) + 1000],
      [attempt(os.kill, -int(pid), 9) for pid in sys.argv[1:] if int(pid) > max(seen) + 1000]])
"""
            _, lines, answers, groups = attacked(cell, program, *map(str, hosts))
            assert not [line for line in lines if "pytest" in line or line == "sleep\0001000\0"]
            assert set(answers) | set(groups) <= {"ESRCH"}
            assert mine.poll() is None
        finally:
            mine.kill()


@pytest.mark.behaviour("security-19")
def test_shared_memory_and_names_of_the_host_are_not_seen(cell: Sandbox) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    key = secrets.randbits(30)
    segment = libc.shmget(key, 4096, 0o1666)
    assert segment >= 0
    try:
        program = """
key = int(sys.argv[1])
listed = [line.split()[0] for line in open("/proc/sysvipc/shm").read().splitlines()[1:]]
ctypes.set_errno(0)
tell([libc.shmget(key, 4096, 0o666), errno.errorcode[ctypes.get_errno()], listed, os.uname().nodename])
"""
        found, error, listed, name = attacked(cell, program, str(key))
        assert (found, error, listed) == (-1, "ENOENT", [])
        assert name != socket.gethostname()
    finally:
        libc.shmctl(segment, 0, None)


@pytest.mark.behaviour("security-20")
def test_files_of_the_host_cannot_be_reached(cell: Sandbox, secret: Path) -> None:
    program = """
import subprocess
path, home = sys.argv[1:]
def read(path):
    return open(path).read()
ways = [path, home, f"/proc/self/root{path}", f"/proc/self/cwd/../../../../..{path}", f"/../../../..{path}",
        f"/proc/self/task/{os.getpid()}/root/..{path}", f"/dev/fd/../../..{path}"]
ways += [f"/proc/{pid}/{name}{path}" for pid in (1, *supervisors) for name in ("root", "cwd")]
ways += [f"/proc/self/fd/{fd}{path}" for fd in range(16)] + [f"/proc/self/map_files/..{path}"]
os.makedirs("/tmp/jail", exist_ok=True)
def escape():
    # The classical way out of a chroot: a working directory above the new root.
    child = os.fork()
    if child == 0:
        up = os.open("/", os.O_RDONLY)
        os.chroot("/tmp/jail")
        os.fchdir(up)
        for _ in range(64):
            os.chdir("..")
        os._exit(0 if os.path.exists("." + path) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
tell([{way: attempt(read, way) for way in ways}, escape()])
"""
    answers, escaped = attacked(cell, program, str(secret), os.environ["WORLDFORK_HOME"])
    assert {way: a for way, a in answers.items() if a not in ("ENOENT", "EACCES", "ENOTDIR", "EPERM")} == {}
    assert escaped == 1


@pytest.mark.behaviour("security-20")
def test_the_directories_that_mounts_name_are_not_there(cell: Sandbox) -> None:
    program = """
words = open("/proc/self/mountinfo").read().replace(",", " ").replace(":", " ").split()
tell([value for word in words for value in [word.partition("=")[2]]
      if value.startswith("/") and os.path.lexists(value)])
"""
    assert attacked(cell, program) == []


@pytest.mark.behaviour("security-20")
def test_etc_holds_no_secret(cell: Sandbox) -> None:
    program = """
found = []
for directory, names, files in os.walk("/etc"):
    found += [f"{directory}/{name}" for name in files + names]
tell(found)
"""
    found = attacked(cell, program)
    assert "/etc/passwd" in found
    hidden = ("/etc/shadow", "/etc/gshadow", "/etc/ssh", "/etc/ssl/private", "/etc/sudoers", "/etc/sudoers.d",
              "/etc/security/opasswd", "/etc/kubernetes", "/etc/docker", "/etc/wireguard", "/etc/letsencrypt",
              "/etc/pki/tls/private", "/etc/NetworkManager", "/etc/netplan", "/etc/cron.d", "/etc/environment",
              "/etc/pip.conf", "/etc/apt", "/etc/krb5.keytab")  # fmt: skip
    assert [path for path in found if path.startswith(hidden)] == []
    closed = [path for path in found if _is_closed_on_the_host(path)]
    assert closed == []


def _is_closed_on_the_host(path: str) -> bool:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISLNK(mode) and not mode & stat.S_IROTH


@pytest.mark.behaviour("security-21")
def test_variables_of_the_owner_are_not_inherited(prison: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    value = secrets.token_hex(16)
    for name in SECRETS:
        monkeypatch.setenv(name, value)
    for network in ("none", "host"):
        box = prison(network=network)
        assert value not in shell(box, "env; cat /proc/self/environ /proc/*/environ 2>/dev/null; true")
        for pid in pids_inside(box):
            # Seen from the host, where nothing is hidden from root.
            if os.geteuid() == 0:
                assert value.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    names = set(told(prison(), "import json, os; print(json.dumps(list(os.environ)))"))
    assert names <= {
        "PATH", "HOME", "LANG", "WORLDFORK_SANDBOX_ID", "WORLDFORK_FORK_INDEX", "WORLDFORK_SEED", "LC_CTYPE",
    }  # fmt: skip


@pytest.mark.behaviour("security-21")
def test_descriptors_of_the_owner_are_not_inherited(prison: Factory, secret: Path, capabilities: Capabilities) -> None:
    fd = os.open(secret, os.O_RDONLY)
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        # As a careless library leaves them.
        os.set_inheritable(fd, True)
        listener.set_inheritable(True)
        box = prison()
        box.start_process("sleep", ["1000"])
        program = (
            "tell([os.readlink(f'/proc/self/fd/{fd}') for fd in range(256) if os.path.lexists(f'/proc/self/fd/{fd}')])"
        )
        assert [target.split(":")[0] for target in attacked(box, program)] == ["/dev/null", "pipe", "pipe"]
        if os.geteuid() == 0:
            mine = os.fstat(listener.fileno()).st_ino
            looked_at = 0
            for pid in pids_inside(box):
                try:
                    targets = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
                except FileNotFoundError:
                    continue  # the program above was still on its way out
                looked_at += 1
                assert str(secret) not in targets
                assert f"socket:[{mine}]" not in targets
                if not able(capabilities, "host_processes"):
                    continue  # a machine has its images and sockets open, which nothing inside it can name
                # Nothing of the host's file system but its own cgroups and its lock.
                known = (f"/worldfork-{box.sandbox_id}/", f"/locks/{box.sandbox_id}")
                paths = [path for path in targets if path.startswith("/") and path not in ("/", "/proc", "/dev/null")]
                assert [path for path in paths if not any(name in path for name in known)] == []
            assert looked_at >= 2, "its init and the process in the background"
    finally:
        os.close(fd)
        listener.close()


@pytest.fixture
def services() -> Iterator[tuple[int, str]]:
    """A TCP port and an abstract socket of the host, both listening."""
    tcp = socket.create_server(("127.0.0.1", 0))
    name = f"worldfork-{secrets.token_hex(8)}"
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0" + name)
    abstract.listen()
    with tcp, abstract:
        yield tcp.getsockname()[1], name


REACH = """
import socket
port, name, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
def connect(family, address):
    with socket.socket(family) as one:
        one.settimeout(5)
        one.connect(address)
    return "connected"
interfaces = [name for _, name in socket.if_nameindex()]
routes = open("/proc/net/route").read().splitlines()[1:]
tell([interfaces, routes, attempt(connect, socket.AF_INET, ("127.0.0.1", port)),
      attempt(connect, socket.AF_UNIX, "\\0" + name), attempt(connect, socket.AF_UNIX, path),
      attempt(connect, socket.AF_INET, ("192.0.2.1", 80))])
"""


@pytest.mark.behaviour("security-22")
def test_network_none_reaches_nothing(cell: Sandbox, services: tuple[int, str], tmp_path: Path) -> None:
    port, name = services
    path = tmp_path / "sock"
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
        one.listen()
        answers = attacked(cell, REACH, str(port), name, str(path))
    assert answers == [["lo"], [], "ECONNREFUSED", "ECONNREFUSED", "ENOENT", "ENETUNREACH"]
    # No interface can be added or raised either.
    assert cell.run("sh", ["-c", "ip link add d0 type dummy || ip link set lo down"]).exit_code != 0
    program = "import fcntl, socket, struct\n" \
        "s = socket.socket()\ntell(attempt(fcntl.ioctl, s, 0x8914, struct.pack('16sh14x', b'lo', 0)))"  # fmt: skip
    assert attacked(cell, program) == "EPERM"


@pytest.mark.behaviour("security-22")
def test_network_host_is_the_hosts_as_the_documents_say(prison: Factory, services: tuple[int, str]) -> None:
    # What makes the test above one that can fail.
    port, name = services
    answers = attacked(prison(network="host"), REACH, str(port), name, "/nowhere")
    assert answers[2:5] == ["connected", "connected", "ENOENT"]


@pytest.mark.behaviour("security-23")
def test_what_lies_on_the_hosts_disk_is_closed_to_others(prison: Factory) -> None:
    box = prison()
    home = Path(os.environ["WORLDFORK_HOME"])
    run = Path(facts(box).run)
    for directory in (run, run.parent, home / "layers", home / "trash", home / "locks", home / "tmp"):
        info = directory.lstat()
        assert (stat.S_IMODE(info.st_mode), info.st_uid) == (0o700, os.geteuid()), directory
    for file in home.glob("db.sqlite*"):
        assert stat.S_IMODE(file.lstat().st_mode) == 0o600, file
    assert stat.S_ISSOCK((run / "sock").lstat().st_mode)


@pytest.mark.behaviour("security-23")
def test_a_home_that_others_could_read_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worldfork.core.settings import load_settings
    from worldfork.store.home import open_home
    from worldfork.store.store import Store

    tmp_path.chmod(0o755)
    for name in ("layers", "run", "trash", "locks"):
        (tmp_path / name).mkdir(mode=0o755)
    (tmp_path / "db.sqlite").touch(mode=0o644)
    monkeypatch.setenv("WORLDFORK_HOME", str(tmp_path))
    with_umask = os.umask(0)
    try:
        Store.open(open_home(load_settings())).close()
    finally:
        os.umask(with_umask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(modes, 0)


@pytest.mark.behaviour("security-23")
@ROOT
def test_the_home_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worldfork.core.errors import StoreError
    from worldfork.core.settings import load_settings
    from worldfork.store.home import open_home

    (tmp_path / "layers").mkdir()
    os.chown(tmp_path / "layers", NOBODY, NOBODY)
    monkeypatch.setenv("WORLDFORK_HOME", str(tmp_path))
    with pytest.raises(StoreError, match="another user"):
        open_home(load_settings())


OTHER_USER = """
import json, os, socket, sys
run, pid = sys.argv[1:]
directory = os.open(run, os.O_PATH)
os.setgroups([]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
def attempt(action, *arguments):
    try:
        return action(*arguments)
    except OSError as error:
        return error.strerror
def talk():
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(f"/proc/self/fd/{directory}/sock")
        one.settimeout(10)
        one.send(bytes(12))
        return one.recv(4096).hex()
names = ("mem", "environ", "maps", "root", "cwd", "exe", "fd/3", "ns/mnt", "auxv", "stack", "syscall")
files = [attempt(lambda: open(f"/proc/{pid}/{name}", "rb").read(1).hex()) for name in names]
print(json.dumps([attempt(talk), files, attempt(os.kill, int(pid), 0), attempt(os.listdir, run)]))
"""


def as_nobody(box: Sandbox) -> list[object]:
    line = [sys.executable, "-c", OTHER_USER, facts(box).run, str(init_pid(box))]
    return list(json.loads(subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout))


@pytest.mark.behaviour("security-24")
@ROOT
def test_another_user_of_the_host_gets_nowhere(prison: Factory) -> None:
    box = prison()
    talked, files, killed, listed = as_nobody(box)
    assert isinstance(files, list)
    assert (talked, killed, listed) == ("Permission denied", "Operation not permitted", "Permission denied")
    assert set(files) <= {"Permission denied", "Operation not permitted", "No such file or directory"}


@pytest.mark.behaviour("security-24")
@ROOT
def test_a_peer_of_another_user_is_turned_away_even_at_an_open_door(prison: Factory) -> None:
    box = prison()
    run = Path(facts(box).run)
    parents = [run, *run.parents]
    before = [(path, stat.S_IMODE(path.stat().st_mode)) for path in parents[: len(parents) - 1]]
    opened = [(path, mode) for path, mode in before if not mode & stat.S_IXOTH]
    try:
        for path, mode in opened:
            path.chmod(mode | stat.S_IXOTH)
        (run / "sock").chmod(0o777)
        talked = as_nobody(box)[0]
    finally:
        for path, mode in opened:
            path.chmod(mode)
    # The connection ends before a greeting.
    assert talked in ("", "Connection reset by peer", "Broken pipe")
    assert box.run("echo", ["on"]).stdout == "on\n"


OWNER_NOBODY = """
import os, sys
from worldfork import Sandbox
with Sandbox.create(base=f"dir:{sys.argv[1]}", network="none") as box:
    print(box._inner._live.facts.run, flush=True)
    sys.stdin.readline()
"""
STRANGER = """
import os, socket, sys
os.setgroups([]), os.setresgid(64999, 64999, 64999), os.setresuid(64999, 64999, 64999)
one = socket.socket(socket.AF_UNIX)
one.settimeout(10)
one.connect(sys.argv[1])
print(one.recv(4096).hex())
"""


def _python_of(uid: int) -> str:
    """A Python that this user can run, and that can import the package."""
    environ = {"PYTHONPATH": str(Path(worldfork.__file__).parents[1])}
    for candidate in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            line = [candidate, "-c", "import worldfork.lineage.place"]
            if subprocess.run(line, user=uid, env=environ, capture_output=True).returncode == 0:
                return candidate
    pytest.skip("no Python here can be run by another user")


@pytest.mark.behaviour("security-24")
@ROOT
def test_in_a_user_namespace_strangers_do_not_pass_for_the_owner() -> None:
    """Ids that a user namespace does not map all look like 65534 from inside, which may be the owner's own id."""
    with tempfile.TemporaryDirectory(prefix="wf-", dir="/var/tmp") as top:
        root, home = make_small_root(Path(top, "root")), Path(top, "home")
        home.mkdir(mode=0o711)
        for path in (Path(top), home):
            os.chown(path, NOBODY, NOBODY)
            path.chmod(0o711)
        source = str(Path(worldfork.__file__).parents[1])
        environ = {"WORLDFORK_HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": source}
        owner = subprocess.Popen(
            [_python_of(NOBODY), "-W", "ignore", "-c", OWNER_NOBODY, str(root)],
            **{"user": NOBODY, "group": NOBODY, "extra_groups": [], "env": environ, "text": True},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert owner.stdout is not None
            words = owner.stdout.readline().strip()
            run = Path(words)
            for path in (run, run.parent):
                path.chmod(0o711)
            (run / "sock").chmod(0o777)
            done = subprocess.run(
                [sys.executable, "-c", STRANGER, str(run / "sock")], capture_output=True, text=True, timeout=60
            )
            assert done.stdout in ("", "\n")
        finally:
            owner.communicate("end\n", timeout=60)
        assert owner.returncode == 0


@pytest.mark.behaviour("security-25")
def test_garbage_hurts_only_the_connection_that_sends_it(prison: Factory) -> None:
    box = prison()
    running = box.start_process("sleep", ["1000"])
    pieces = [
        b"\xff" * 4096,
        bytes(12),
        (0xFFFFFFFF).to_bytes(4, "little") + b"\x01\x00\x00\x00\x01\x00\x00\x00",
        (64).to_bytes(4, "little") + b"\x01\x00\x00\x00\x01\x00\x00\x00" + b"\xff" * 64,
        (8 << 20).to_bytes(4, "little") + b"\x01\x00\x00\x00\x01\x00\x00\x00" + b"\x00" * 1024,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        *(secrets.token_bytes(size) for size in (1, 11, 12, 13, 100, 5000)),
        *((4).to_bytes(4, "little") + bytes([kind, 0, 0, 0, 7, 0, 0, 0]) + b"\xff" * 4 for kind in range(256)),
    ]
    for piece in pieces:
        if piece[4:8] == bytes([14, 0, 0, 0]):
            continue  # SHUTDOWN is what a client may ask for
        with socket.socket(socket.AF_UNIX) as one:
            directory = os.open(facts(box).run, os.O_PATH)
            try:
                one.connect(f"/proc/self/fd/{directory}/sock")
            finally:
                os.close(directory)
            one.settimeout(20)
            one.sendall(piece)
            one.shutdown(socket.SHUT_WR)
            try:
                while one.recv(65536):
                    pass
            except ConnectionResetError:
                pass
    assert box.run("echo", ["on"], timeout=20).stdout == "on\n"
    assert box.get_process(running.pid).status == "running"


@pytest.mark.behaviour("security-26")
def test_a_base_never_shows_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worldfork.lineage.place import close_places

    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    home = root / "var" / "worldfork"
    with in_form("user" if os.geteuid() else "trusted"):
        monkeypatch.setenv("WORLDFORK_HOME", str(home))
        try:
            with pytest.raises(ConfigError, match="shows inside"):
                Sandbox.create(base=f"dir:{root}", network="none")
        finally:
            monkeypatch.undo()
            close_places()
