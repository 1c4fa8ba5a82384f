"""Commands: what is run, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.conformance.conftest import Pace, Sandboxes
from tests.conformance.inside import processes, python, shell, told, wait_for

from worldfork import AsyncSandbox, CommandExitReason, ConfigError, Sandbox, SandboxError
from worldfork.core.errors import CommandFailed, CommandTimeout

Needs = Callable[[str], None]


@pytest.mark.behaviour("command-1")
def test_arguments_arrive_as_they_are(box: Sandbox) -> None:
    odd = ["", " ", "$HOME", "*", "a\nb", "'", '"', "\\", "é😀", "-n", "; echo no"]
    assert told(box, "import json, sys; print(json.dumps(sys.argv[1:]))", *odd) == odd
    result = box.run("echo", ["$HOME;", "`id`"])
    assert (result.stdout, result.stderr, result.exit_code) == ("$HOME; `id`\n", "", 0)
    assert (result.reason, result.signal, result.ok) == (CommandExitReason.EXITED, None, True)


@pytest.mark.behaviour("command-2")
def test_every_exit_code_is_a_result(box: Sandbox) -> None:
    for code in (0, 1, 2, 77, 126, 127, 128, 137, 255):
        result = box.run("sh", ["-c", f"exit {code}"])
        assert (result.exit_code, result.reason, result.signal) == (code, CommandExitReason.EXITED, None)


@pytest.mark.behaviour("command-3")
def test_a_deadly_signal_is_a_result(box: Sandbox) -> None:
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGPIPE):
        result = box.run("sh", ["-c", f"echo before; kill -{int(number)} $$"])
        assert (result.exit_code, result.signal, result.reason) == (-number, number, CommandExitReason.SIGNALED)
        assert result.stdout == "before\n"


@pytest.mark.behaviour("command-4")
def test_check_turns_results_into_errors(box: Sandbox, pace: Pace) -> None:
    with pytest.raises(CommandFailed) as failed:
        box.run("sh", ["-c", "echo out; exit 3"], check=True)
    assert (failed.value.result.exit_code, failed.value.result.stdout) == (3, "out\n")
    with pytest.raises(CommandTimeout) as late:
        box.sh("echo out; sleep 60", timeout=pace.seconds(0.2), check=True)
    assert late.value.result.stdout == "out\n"
    assert isinstance(late.value, TimeoutError)
    assert box.run("true", check=True).ok


@pytest.mark.behaviour("command-5")
def test_a_time_limit_keeps_what_was_printed(box: Sandbox, pace: Pace) -> None:
    began = time.monotonic()
    limit_s = pace.seconds(0.3)
    result = box.run("sh", ["-c", "echo out; echo err >&2; sleep 60"], timeout=limit_s)
    assert limit_s <= time.monotonic() - began < 10
    assert (result.reason, result.timed_out, result.ok) == (CommandExitReason.TIMED_OUT, True, False)
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", -signal.SIGKILL)
    assert 0.2 <= result.wall_s < 10  # counted from its start, the limit from the call
    assert box.run("echo", ["on"]).stdout == "on\n"


# Each leaves a process behind in another way: in a session of its own, orphaned, twice orphaned, deaf to TERM.
ESCAPES = {
    "child": "sleep 1000 & wait",
    "setsid": "setsid sleep 1000 & wait",
    "orphan": "(sleep 1000 &) ; sleep 1000",
    "double fork": "setsid sh -c '(setsid sleep 1000 &) & exit 0' ; sleep 1000",
    "deaf": "trap '' TERM INT HUP; setsid sh -c 'trap \"\" TERM; sleep 1000' & wait; sleep 1000",
}


@pytest.mark.behaviour("command-6")
@pytest.mark.parametrize("way", ESCAPES)
def test_a_time_limit_takes_the_whole_tree(box: Sandbox, way: str, pace: Pace) -> None:
    result = box.run("sh", ["-c", f"echo begun; {ESCAPES[way]}"], timeout=pace.seconds(0.3))
    assert (result.reason, result.stdout) == (CommandExitReason.TIMED_OUT, "begun\n")
    assert processes(box) == 0


@pytest.mark.behaviour("command-6")
def test_a_tree_that_grows_while_it_is_killed_goes_whole(box: Sandbox, pace: Pace) -> None:
    program = (
        "import os, time\n"
        "while True:\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(1000)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "    time.sleep(0.002)\n"
    )
    result = box.run("python", ["-c", program], timeout=pace.seconds(0.5))
    assert result.reason is CommandExitReason.TIMED_OUT
    assert processes(box) == 0


@pytest.mark.behaviour("command-7")
def test_a_command_that_is_not_there_is_127(box: Sandbox) -> None:
    for program in ("no-such-program", "/usr/bin/no-such-program", "./no/such"):
        result = box.run(program)
        assert (result.exit_code, result.reason) == (127, CommandExitReason.NOT_STARTED)
        assert program in result.stderr
        assert "No such file" in result.stderr
    box.write_file("/workspace/script", b"#!/no/such/interpreter\n", mode=0o755)
    assert box.run("/workspace/script").exit_code == 127


@pytest.mark.behaviour("command-7")
def test_the_program_is_found_on_its_own_path(box: Sandbox) -> None:
    box.write_file("/opt/tools/greet", b"#!/bin/sh\necho hello\n", mode=0o755)
    assert box.run("greet").exit_code == 127
    assert box.run("greet", env={"PATH": "/opt/tools:/usr/bin:/bin"}).stdout == "hello\n"


@pytest.mark.behaviour("command-8")
def test_what_cannot_be_executed_is_126(box: Sandbox) -> None:
    box.write_file("/workspace/plain", b"#!/bin/sh\ntrue\n", mode=0o644)
    for path in ("/workspace", "/etc", "/workspace/plain"):
        result = box.run(path)
        assert (result.exit_code, result.reason) == (126, CommandExitReason.NOT_STARTED)
        assert path in result.stderr


@pytest.mark.behaviour("command-9")
def test_many_arguments_pass_and_one_that_is_too_long_says_so(box: Sandbox) -> None:
    many = ["x" * 1000] * 700
    assert told(box, "import json, sys; print(json.dumps([len(sys.argv), set(map(len, sys.argv[1:])).pop()]))", *many) \
        == [701, 1000]  # fmt: skip
    assert python(box, "import sys; print(len(sys.argv[1]))", "y" * 131_000) == "131000\n"
    result = box.run("echo", ["z" * 131_072])
    assert (result.exit_code, result.reason) == (126, CommandExitReason.NOT_STARTED)
    assert "128 KiB" in result.stderr
    with pytest.raises(ConfigError):
        box.run("true", ["w" * 1000] * 20_000)
    assert box.run("true").ok


@pytest.mark.behaviour("command-10")
def test_variables_are_the_sandbox_s_and_the_command_s(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "1")
    box = sandboxes.create(env={"A": "sandbox", "B": "sandbox"})
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    seen = told(box, show, env={"B": "command", "EMPTY": "", "LINES": "a\nb=c", "LONG": "l" * 100_000})
    assert (seen["A"], seen["B"], seen["EMPTY"], seen["LINES"], len(seen["LONG"])) == (
        "sandbox", "command", "", "a\nb=c", 100_000,
    )  # fmt: skip
    assert "SECRET_OF_THE_CALLER" not in seen
    own = {"PATH", "HOME", "LANG", "WORLDFORK_SANDBOX_ID", "WORLDFORK_FORK_INDEX", "WORLDFORK_SEED"}
    assert set(told(box, show)) - {"LC_CTYPE"} == own | {"A", "B"}
    for name in ("", "A=B", "A\0"):
        with pytest.raises(ConfigError):
            box.run("true", env={name: "x"})


@pytest.mark.behaviour("command-11")
def test_stdin_is_sent_whole_and_ends(box: Sandbox) -> None:
    data = bytes(range(256)) * 20_000
    result = box.run("cat", stdin=data)
    assert (result.stdout_bytes == data, result.exit_code) == (True, 0)
    assert box.run("cat", stdin="é").stdout == "é"
    assert box.run("cat").stdout == ""
    assert box.run("sh", ["-c", "[ -p /dev/stdin ] || readlink /proc/self/fd/0"]).stdout == "/dev/null\n"
    # Nobody reads it, and nobody waits for that.
    assert box.run("true", stdin=data).exit_code == 0
    assert box.run("head", ["-c", "3"], stdin=data).stdout_bytes == b"\0\1\2"


@pytest.mark.behaviour("command-12")
def test_users_are_those_of_the_world(sandboxes: Sandboxes, needs: Needs) -> None:
    needs("other_users")
    box = sandboxes.create()
    shell(box, "echo tester:x:1234:55::/workspace:/bin/sh >> /etc/passwd; echo pals:x:77:tester >> /etc/group")
    ids = ["-c", 'echo "$(id -u):$(id -g):$(id -G | tr " " ,)"']
    assert box.run("sh", ids).stdout == "0:0:0\n"
    assert box.run("sh", ids, user="tester").stdout == "1234:55:55,77\n"
    assert box.run("sh", ids, user="1234").stdout == "1234:55:55,77\n"
    assert box.run("sh", ids, user="4321:99").stdout == "4321:99:99\n"
    assert box.run("cat", ["/root/x"], user="tester").exit_code == 1
    mine = sandboxes.create(user="4321:99")
    assert mine.run("sh", ids).stdout == "4321:99:99\n"
    assert mine.run("sh", ids, user="0").stdout == "0:0:0\n"


@pytest.mark.behaviour("command-12")
def test_an_unknown_user_is_an_error(box: Sandbox) -> None:
    with pytest.raises(SandboxError) as error:
        box.run("true", user="nobody-of-this-name")
    assert "nobody-of-this-name" in str(error.value)
    assert box.run("true").ok


@pytest.mark.behaviour("command-13")
def test_the_working_directory(sandboxes: Sandboxes) -> None:
    box = sandboxes.create()
    assert box.run("pwd").stdout == "/workspace\n"
    assert box.run("pwd", working_dir="/usr").stdout == "/usr\n"
    box.make_directory("/workspace/below/it")
    assert box.run("pwd", working_dir="below/it").stdout == "/workspace/below/it\n"
    result = box.run("true", working_dir="/no/such/place")
    assert (result.exit_code, result.reason) == (127, CommandExitReason.NOT_STARTED)
    assert "/no/such/place" in result.stderr
    box.write_file("/workspace/file", b"")
    assert box.run("true", working_dir="/workspace/file").reason is CommandExitReason.NOT_STARTED
    assert sandboxes.create(working_dir="/tmp").run("pwd").stdout == "/tmp\n"


@pytest.mark.behaviour("command-14")
def test_a_cancelled_call_kills_the_tree(sandboxes: Sandboxes, driver: str) -> None:
    async def test() -> None:
        async with await AsyncSandbox.create(driver=driver, network="none") as box:
            line = "setsid sleep 1000 & (sleep 1000 &); touch /tmp/begun; sleep 1000"
            call = asyncio.ensure_future(box.run("sh", ["-c", line]))
            await box.run("sh", ["-c", "until [ -e /tmp/begun ]; do sleep 0.005; done"], timeout=20)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await box.info()).processes == 0
            assert (await box.run("echo", ["on"])).stdout == "on\n"

    asyncio.run(test())


@pytest.mark.behaviour("command-15")
def test_a_background_child_does_not_hold_the_call_up(box: Sandbox) -> None:
    began = time.monotonic()
    result = box.run("sh", ["-c", "sleep 1000 & echo done"])
    assert time.monotonic() - began < 10
    assert (result.stdout, result.exit_code, result.reason) == ("done\n", 0, CommandExitReason.EXITED)
    assert processes(box) == 1


SERVER = (
    "import socket, sys\n"
    "listening = socket.create_server(('127.0.0.1', 8123))\n"
    "open('/tmp/listening', 'w').close()\n"
    "while True:\n"
    "    peer, _ = listening.accept()\n"
    "    print('somebody came', flush=True)\n"
    "    peer.sendall(b'served')\n"
    "    peer.close()\n"
)
ASK = "import socket; print(socket.create_connection(('127.0.0.1', 8123), 10).recv(100).decode())"


@pytest.mark.behaviour("command-16")
@pytest.mark.parametrize("way", ["{} &", "setsid {} &", "({} &)", "nohup {} > /tmp/log 2>&1 &"])
def test_a_server_left_in_the_background_lives_on(box: Sandbox, way: str) -> None:
    box.write_file("/workspace/server.py", SERVER)
    assert box.run("sh", ["-c", way.format("python /workspace/server.py")], timeout=30).ok
    wait_for(box, "/tmp/listening")
    # It prints into a pipe that nobody reads any more, which must neither kill nor stop it.
    for _ in range(3):
        assert python(box, ASK) == "served\n"
    assert processes(box) >= 1


@pytest.mark.behaviour("command-17")
def test_two_thousand_commands_each_have_their_exit_code(box: Sandbox, driver: str, pace: Pace) -> None:
    for number in range(pace.times(100)):
        assert box.run("sh", ["-c", f"exit {number % 256}"]).exit_code == number % 256

    async def test() -> None:
        async with await AsyncSandbox.create(driver=driver, network="none") as many:

            async def one(number: int) -> Any:
                return await many.run("true" if number % 2 else "false")

            for start in range(0, pace.times(2000), 50):
                results = await asyncio.gather(*(one(number) for number in range(start, start + 50)))
                assert [r.exit_code for r in results] == [1, 0] * 25
                assert {r.reason for r in results} == {CommandExitReason.EXITED}
            info = await many.info()
            assert (info.commands, info.processes) == (0, 0)

    asyncio.run(test())


@pytest.mark.behaviour("command-18")
def test_a_thousand_orphans_leave_no_zombie(box: Sandbox, pace: Pace) -> None:
    program = (
        "import os\n"
        f"for _ in range({pace.times(1000)}):\n"
        "    if os.fork() == 0:\n"
        "        if os.fork() == 0:\n"
        "            os._exit(0)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    python(box, program)
    # What ends last is reaped while this looks.
    look = (
        "import glob, time\n"
        "end = time.monotonic() + 10\n"
        "while True:\n"
        "    states = []\n"
        "    for path in glob.glob('/proc/[0-9]*/stat'):\n"
        "        try:\n"
        "            states.append(open(path).read().rpartition(')')[2].split()[0])\n"
        "        except OSError:\n"
        "            pass\n"
        "    if 'Z' not in states or time.monotonic() > end:\n"
        "        break\n"
        "    time.sleep(0.01)\n"
        "print(states.count('Z'), len(states) < 10)\n"
    )
    assert python(box, look) == "0 True\n"


@pytest.mark.behaviour("command-19")
def test_threads_get_their_own_results(box: Sandbox) -> None:
    def ask(number: int) -> tuple[int, str]:
        result = box.run("sh", ["-c", f"echo {number}; exit {number}"])
        return result.exit_code, result.stdout

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(ask, range(100))) == [(number, f"{number}\n") for number in range(100)]


@pytest.mark.behaviour("command-20")
def test_a_command_that_cannot_be_is_refused_before_anything_starts(box: Sandbox) -> None:
    for call in (
        lambda: box.run(""),
        lambda: box.run("a\0b"),
        lambda: box.run("true", ["a\0b"]),
        lambda: box.run("true", timeout=0),
        lambda: box.run("true", timeout=-1),
        lambda: box.run("true", timeout=float("nan")),
        lambda: box.run("true", max_output_bytes=-1),
        lambda: box.run("true", working_dir="a\0b"),
    ):
        with pytest.raises(ConfigError):
            call()
    assert processes(box) == 0


@pytest.mark.behaviour("command-21")
def test_a_command_begins_in_a_clean_state(box: Sandbox) -> None:
    program = "#!/bin/sh\numask; cat /proc/self/status; ps -o pid=,sid= -p $$; echo $$\n"
    box.write_file("/workspace/told", program, mode=0o755)
    mask, *status, numbers, pid = box.run("./told", working_dir="/workspace").stdout.splitlines()
    marks = dict(line.split(":", 1) for line in status)
    assert (mask, int(marks["SigBlk"], 16), numbers.split()) == ("0022", 0, [pid, pid])
    assert int(marks["SigIgn"], 16) & ~(3 << 31) == 0  # 32 and 33 are the C library's own
    assert shell(box, "ls /proc/self/fd").split() == ["0", "1", "2", "3"]


@pytest.mark.behaviour("command-22")
def test_a_line_of_shell(sandboxes: Sandboxes) -> None:
    box = sandboxes.create()
    result = box.sh("cd /usr && echo $((6 * 7)) | tr 4 5; pwd; false")
    assert (result.stdout, result.exit_code) == ("52\n/usr\n", 1)
    assert box.sh("a=(x y z); echo ${a[1]}").stdout == "y\n"
    # A world without bash has sh.
    world = sandboxes.create(env={"PATH": "/opt/few"})
    program = "import os; os.makedirs('/opt/few'); os.symlink('/bin/sh', '/opt/few/sh')"
    python(world, program, env={"PATH": "/opt/venv/bin:/usr/bin"})
    assert world.sh("echo $0").stdout == "sh\n"
