"""Isolation: what a sandbox has for itself, and what it shares with the host. What it resists: `test_security_*`."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from tests.conformance.conftest import Sandboxes
from tests.conformance.inside import python, shell, told

from worldfork import ConfigError, Sandbox
from worldfork.sandbox.driver import Capabilities


@pytest.mark.behaviour("isolation-1")
def test_only_its_own_processes_are_there(sandboxes: Sandboxes) -> None:
    one, two = sandboxes.create(), sandboxes.create()
    sleeper = one.start_process("sh", ["-c", "echo ready; exec sleep 1234567"])
    assert next(one.follow_stdout(sleeper.pid)).line == "ready"
    seen = shell(one, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
    assert "sleep 1234567" in seen
    assert "1234567" not in shell(two, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
    numbers = [int(name) for name in shell(two, "ls /proc").split() if name.isdigit()]
    assert len(numbers) < 10
    assert max(numbers) < 200


@pytest.mark.behaviour("isolation-2")
def test_mounts_stay_on_their_side(box: Sandbox, tmp_path: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    (tmp_path / "host-file").write_text("x")
    assert box.run("ls", [str(tmp_path)]).exit_code != 0
    inside = shell(box, "cut -d' ' -f5 /proc/self/mountinfo").splitlines()
    assert "/" in inside
    assert not [point for point in inside if point.startswith(("/home", "/var", "/boot", str(tmp_path)))]
    # The run directory of the sandbox is neither among them nor reachable.
    assert Path("/proc/self/mountinfo").read_text() == before
    home = os.environ["WORLDFORK_HOME"]
    assert box.run("ls", [home]).exit_code != 0


@pytest.mark.behaviour("isolation-3")
def test_network_none_is_loopback_alone(sandboxes: Sandboxes) -> None:
    box = sandboxes.create(network="none")
    assert [line.split(":")[0].strip() for line in shell(box, "tail -n +3 /proc/net/dev").splitlines()] == ["lo"]
    listening = socket.create_server(("127.0.0.1", 0))
    program = (
        "import socket, sys\n"
        "def try_(address):\n"
        "    try:\n"
        "        socket.create_connection(address, 3); return 'connected'\n"
        "    except OSError:\n"
        "        return 'refused'\n"
        "print(try_(('127.0.0.1', int(sys.argv[1]))), try_(('192.0.2.1', 80)))\n"
    )
    with listening:
        assert python(box, program, str(listening.getsockname()[1])) == "refused refused\n"
    own = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\n"
        "client.sendall(b'x'); print(server.accept()[0].recv(1))\n"
    )
    assert python(box, own) == "b'x'\n"


@pytest.mark.behaviour("isolation-4")
def test_local_sockets_and_ipc_are_its_own(sandboxes: Sandboxes) -> None:
    name = f"\0worldfork-test-{os.getpid()}"
    program = "import socket, sys; socket.socket(socket.AF_UNIX).connect('\\0' + sys.argv[1])"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)
        listening.listen()
        assert sandboxes.create().run("python", ["-c", program, name[1:]]).exit_code == 1
    one, two = sandboxes.create(), sandboxes.create()
    assert shell(one, "ipcmk -M 4096 | grep -c id; ipcs -m | grep -c 4096") == "1\n1"
    assert shell(two, "ipcs -m | grep -c 4096 || true") == "0"


@pytest.mark.behaviour("isolation-5")
def test_network_host_is_the_host_s(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:1")
    monkeypatch.setenv("SECRET_TOKEN", "1")
    box = sandboxes.create(network="host")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        python(box, f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
    environ = told(box, "import json, os; print(json.dumps(dict(os.environ)))")
    assert environ["HTTPS_PROXY"] == "http://proxy.invalid:1"
    assert "SECRET_TOKEN" not in environ
    assert box.read_file("/etc/resolv.conf") == Path("/etc/resolv.conf").read_bytes()
    assert box.info().network == "host"
    few = sandboxes.create(network="host", host_settings=())
    assert "HTTPS_PROXY" not in told(few, "import json, os; print(json.dumps(dict(os.environ)))")


@pytest.mark.behaviour("isolation-6")
def test_a_fresh_sandbox_is_on_the_network_unless_told_otherwise(driver: str, sandboxes: Sandboxes) -> None:
    assert sandboxes.keep(Sandbox.create(driver=driver)).info().network == "host"
    assert sandboxes.keep(Sandbox.create(driver=driver, allow_internet_access=False)).info().network == "none"
    with pytest.raises(ConfigError):
        Sandbox.create(driver=driver, network="some")


@pytest.mark.behaviour("isolation-7")
def test_the_host_base_shows_the_userland_and_no_secret(box: Sandbox) -> None:
    assert box.run("sh", ["-c", "echo x > /usr/bin/new"]).exit_code != 0
    for path in ("/etc/shadow", "/etc/gshadow", "/etc/ssl/private", "/etc/ssh", "/etc/sudoers"):
        assert box.run("test", ["-e", path]).exit_code == 1, path
    assert shell(box, "find /etc -perm /6000 | wc -l; find /etc -type f -not -perm /o+r | wc -l") == "0\n0"
    assert shell(box, "ls -A /home /root | grep -v : | tr -d '\\n'") in ("", ".pyenv")
    passwd = Path("/etc/passwd").read_bytes()
    box.write_file("/etc/passwd", b"root:x:0:0::/root:/bin/sh\n")
    assert Path("/etc/passwd").read_bytes() == passwd
    assert python(box, "import sys; print(sys.prefix)") == "/opt/venv\n"
    assert shell(box, "command -v pip") == "/opt/venv/bin/pip"


@pytest.mark.behaviour("isolation-8")
def test_all_but_dev_is_on_the_disk(box: Sandbox) -> None:
    places = ("/tmp", "/var/tmp", "/run", "/root", "/workspace", "/etc", "/opt", "/srv", "/home", "/var/log")
    devices = told(box, "import json, os, sys; print(json.dumps([os.stat(p).st_dev for p in sys.argv[1:]]))",
                   "/", *places)  # fmt: skip
    assert set(devices) == {devices[0]}
    for place in places:
        box.write_file(f"{place}/written", b"x")
    snapshot = box.checkpoint()
    assert snapshot.warnings == ()
    assert shell(box, "stat -c %a /tmp /var/tmp /root /workspace") == "1777\n1777\n700\n755"


@pytest.mark.behaviour("isolation-9")
def test_a_command_is_nobody_s_but_its_own(box: Sandbox, capabilities: Capabilities) -> None:
    assert shell(box, "id -u; id -g") == "0\n0"
    groups = shell(box, "grep ^Groups: /proc/self/status").split()[1:]
    if capabilities.other_users:
        assert groups == []
    # In the user form it is raised from outside, at once after the start.
    shell(box, "until [ $(cat /proc/$$/oom_score_adj) = 500 ]; do sleep 0.005; done", timeout=10)
    assert shell(box, "cat /proc/self/loginuid 2>/dev/null || echo none") in ("4294967295", "none", "0")
    # No descriptor of the host, and nothing to reach one through.
    assert shell(box, "readlink /proc/self/fd/* | grep -v -e '^pipe:' -e '^/dev/null' -e '^/proc/' | wc -l") == "0"
