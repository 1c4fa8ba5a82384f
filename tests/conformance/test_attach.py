"""Attaching: several clients, of several processes, on one sandbox."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys

import pytest
from tests.conformance.conftest import Elsewhere, Sandboxes, finish
from tests.conformance.inside import processes, shell, wait_for
from tests.conformance.test_lifetime import eventually

from worldfork import NotFound, Sandbox, SandboxDied
from worldfork.lineage.place import place


@pytest.mark.behaviour("attach-1")
def test_another_process_attaches_by_id_or_name(sandboxes: Sandboxes, elsewhere: Elsewhere) -> None:
    box = sandboxes.create(name="to be found", env={"A": "1"}, working_dir="/srv")
    box.write_file("f", b"here")
    program = (
        "import sys\n"
        "from worldfork import Sandbox\n"
        "box = Sandbox.connect(sys.argv[1])\n"
        "seen = box.run('sh', ['-c', 'echo $A $(pwd)']).stdout.strip()\n"
        "print(box.sandbox_id, box.name, seen, box.read_file('f').decode())\n"
        "box.write_file('g', b'there')\n"
    )
    for name in (box.sandbox_id, "to be found"):
        assert finish(elsewhere(program, name)) == f"{box.sandbox_id} to be found 1 /srv here\n"
    assert box.read_file("g") == b"there"


@pytest.mark.behaviour("attach-2")
def test_who_is_not_there_is_not_found(box: Sandbox) -> None:
    for name in ("sb-aaaaaaaaaaaaaaaa", "nobody", "", "../../etc"):
        with pytest.raises(NotFound):
            Sandbox.connect(name)
    box.terminate()
    with pytest.raises(NotFound):
        Sandbox.connect(box.sandbox_id)


@pytest.mark.behaviour("attach-3")
def test_letting_go_leaves_it_alive(box: Sandbox) -> None:
    with Sandbox.connect(box.sandbox_id) as attached:
        assert attached.run("true").ok
        assert attached.bind_outcome == "attached"
    other = Sandbox.connect(box.sandbox_id)
    other.close()
    assert box.run("true").ok


@pytest.mark.behaviour("attach-4")
def test_several_clients_at_once(box: Sandbox, elsewhere: Elsewhere) -> None:
    program = (
        "import sys\n"
        "from worldfork import Sandbox\n"
        "box = Sandbox.connect(sys.argv[1])\n"
        "for number in range(40):\n"
        "    result = box.run('sh', ['-c', f'echo {sys.argv[2]} {number}; exit {number}'])\n"
        "    assert (result.exit_code, result.stdout) == (number, f'{sys.argv[2]} {number}\\n'), result\n"
        "    box.write_file(f'/srv/{sys.argv[2]}', str(number))\n"
        "print('good')\n"
    )
    clients = [elsewhere(program, box.sandbox_id, f"c{number}") for number in range(4)]
    for number in range(40):
        assert box.run("sh", ["-c", f"exit {number}"]).exit_code == number
    assert [finish(client) for client in clients] == ["good\n"] * 4
    assert shell(box, "cat /srv/c0 /srv/c1 /srv/c2 /srv/c3") == "39393939"


@pytest.mark.behaviour("attach-5")
def test_a_client_that_dies_takes_its_commands_along(box: Sandbox, elsewhere: Elsewhere) -> None:
    program = (
        "import sys\n"
        "from worldfork import Sandbox\n"
        "box = Sandbox.connect(sys.argv[1])\n"
        "box.start_process('sh', ['-c', 'touch /srv/kept; exec sleep 2000'])\n"
        "box.run('sh', ['-c', 'setsid sleep 1000 & touch /srv/begun; sleep 1000'])\n"
    )
    client = elsewhere(program, box.sandbox_id)
    wait_for(box, "/srv/begun")
    wait_for(box, "/srv/kept")
    assert eventually(lambda: processes(box) == 4)
    client.kill()
    client.wait()
    # What was started to stay stays, and the sandbox with it.
    assert eventually(lambda: processes(box) == 1)
    assert [row.args for row in box.list_processes()] == [("-c", "touch /srv/kept; exec sleep 2000")]
    assert box.run("true").ok


@pytest.mark.behaviour("attach-6")
def test_an_attached_one_checkpoints_and_forks(sandboxes: Sandboxes, box: Sandbox, elsewhere: Elsewhere) -> None:
    box.write_file("/srv/f", b"1")
    program = (
        "import sys\n"
        "from worldfork import Sandbox\n"
        "box = Sandbox.connect(sys.argv[1])\n"
        "first = box.checkpoint()\n"
        "box.write_file('/srv/g', b'2')\n"
        "children = box.fork(2).unwrap()\n"
        "print(first.snapshot_id, *[child.run('cat', ['/srv/f', '/srv/g']).stdout for child in children])\n"
        "[child.terminate() for child in children]\n"
    )
    snapshot_id, *contents = finish(elsewhere(program, box.sandbox_id)).split()
    assert contents == ["12", "12"]
    # The owner goes on where the other one left off: same files, next layer.
    assert shell(box, "cat /srv/f /srv/g") == "12"
    box.write_file("/srv/h", b"3")
    after = sandboxes.restore(box.checkpoint())
    assert (shell(after, "cat /srv/f /srv/g /srv/h"), after.info().layers >= 2) == ("123", True)
    assert shell(sandboxes.create(snapshot_id=snapshot_id), "ls /srv") == "f"


@pytest.mark.behaviour("attach-7")
def test_any_client_may_end_it(box: Sandbox, elsewhere: Elsewhere) -> None:
    program = "import sys; from worldfork import Sandbox; Sandbox.connect(sys.argv[1]).terminate()"
    finish(elsewhere(program, box.sandbox_id))
    with pytest.raises(SandboxDied):
        box.run("true")
    with pytest.raises(NotFound):
        Sandbox.connect(box.sandbox_id)


@pytest.mark.behaviour("attach-8")
def test_its_door_is_its_owner_s_alone(box: Sandbox) -> None:
    run = place().home.run / box.sandbox_id
    for path in (place().home.run, run):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert path.stat().st_uid == os.geteuid()
    assert stat.S_ISSOCK((run / "sock").stat().st_mode)


INTRUDER = """
import os, socket, sys
os.chdir(sys.argv[1])
os.setgid(54321); os.setuid(54321)
peer = socket.socket(socket.AF_UNIX)
peer.settimeout(5)
try:
    peer.connect("sock")
    print("answered" if peer.recv(1) else "hung up")
except (PermissionError, ConnectionError):
    print("refused")
"""


@pytest.mark.root
@pytest.mark.behaviour("attach-8")
def test_another_user_is_not_answered(box: Sandbox) -> None:
    run = place().home.run / box.sandbox_id
    done = subprocess.run([sys.executable, "-c", INTRUDER, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout in ("refused\n", "hung up\n")
    (run / "sock").chmod(0o777)  # even with the door wide open
    done = subprocess.run([sys.executable, "-c", INTRUDER, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout in ("refused\n", "hung up\n")
    assert box.run("true").ok


@pytest.mark.behaviour("attach-9")
def test_nonsense_at_the_door_hurts_nobody(box: Sandbox) -> None:
    sleeper = box.start_process("sleep", ["1000"])
    directory = os.open(place().home.run / box.sandbox_id, os.O_PATH | os.O_DIRECTORY)
    try:
        for data in (b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"", b"\x10\0\0\0\x01\0\0\0"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(5)
                stranger.connect(f"/proc/self/fd/{directory}/sock")
                stranger.sendall(data)
        idle = []
        for _ in range(40):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(f"/proc/self/fd/{directory}/sock")
            idle.append(stranger)
        assert box.run("echo", ["on"]).stdout == "on\n"
        for stranger in idle:
            stranger.close()
    finally:
        os.close(directory)
    assert box.get_process(sleeper.pid).status == "running"
