"""Processes that outlive the call that started them."""

from __future__ import annotations

import json
import signal

import pytest
from tests.conformance.conftest import Elsewhere, finish
from tests.conformance.inside import processes, shell, wait_for
from tests.conformance.test_lifetime import eventually

from worldfork import ConfigError, Sandbox, SandboxError


def ended(box: Sandbox, p: int | str) -> list[tuple[str, str]]:
    """Follow a process to its end; return (stream, line) of all that it printed."""
    return [(event.stream, event.line) for event in box.follow_output(p)]


@pytest.mark.behaviour("process-1")
def test_a_started_process_outlives_the_call(box: Sandbox) -> None:
    info = box.start_process("sh", ["-c", "echo up; sleep 1000; true"], env={"A": "b"}, working_dir="/usr")
    assert (info.status, info.command, info.args) == ("running", "sh", ("-c", "echo up; sleep 1000; true"))
    assert (info.exit_code, info.signal, info.ended_at, info.stdin_writable) == (None, None, None, False)
    assert info.started_at > 1.6e9
    assert next(iter(box.follow_output(info.pid))).line == "up"  # /proc shows it whole only after its exec
    environ = shell(box, f"tr '\\0' '\\n' < /proc/{info.pid}/environ; readlink /proc/{info.pid}/cwd").splitlines()
    assert "A=b" in environ
    assert environ[-1] == "/usr"
    assert box.get_process(info.pid).status == "running"
    assert [row.pid for row in box.list_processes()] == [info.pid]
    assert eventually(lambda: processes(box) == 2)  # the shell and its sleep


@pytest.mark.behaviour("process-2")
def test_processes_have_names(box: Sandbox) -> None:
    info = box.start_process("sleep", ["1000"], name="sleeper")
    assert box.get_process("sleeper").pid == info.pid
    assert box.list_processes()[0].name == "sleeper"
    assert box.get_process(str(info.pid)).pid == info.pid
    box.kill_process("sleeper")
    for nobody in ("another", 99_999):
        with pytest.raises(SandboxError):
            box.get_process(nobody)


@pytest.mark.behaviour("process-3")
def test_input_reaches_a_process_and_ends(box: Sandbox) -> None:
    cat = box.start_process("cat", stdin_mode="pipe")
    assert cat.stdin_writable
    box.write_stdin(cat.pid, b"one\n")
    lines = box.follow_stdout(cat.pid)
    assert next(lines).line == "one"
    box.write_stdin(cat.pid, b"two\n")
    assert next(lines).line == "two"
    box.write_stdin(cat.pid, b"z" * 300_000 + b"\n")
    assert next(lines).line == "z" * 300_000
    box.close_stdin(cat.pid)
    assert list(lines) == []
    assert box.get_process(cat.pid).exit_code == 0
    with pytest.raises(SandboxError):
        box.write_stdin(cat.pid, b"late")


@pytest.mark.behaviour("process-3")
def test_a_process_without_a_pipe_takes_no_input(box: Sandbox) -> None:
    info = box.start_process("sleep", ["1000"])
    with pytest.raises(SandboxError):
        box.write_stdin(info.pid, b"x")
    with pytest.raises(ConfigError):
        box.start_process("true", stdin_mode="socket")
    box.kill_process(info.pid)


@pytest.mark.behaviour("process-4")
def test_what_was_printed_can_be_asked_for(box: Sandbox) -> None:
    info = box.start_process("sh", ["-c", "echo a; echo b >&2; printf c; touch /tmp/printed; exec sleep 1000"])
    wait_for(box, "/tmp/printed")
    assert box.get_stdout(info.pid).lines == ("a", "c")
    assert box.get_stderr(info.pid).lines == ("b",)
    assert sorted(box.get_output(info.pid).lines) == ["a", "b", "c"]
    assert box.get_output(info.pid).line_count == 3
    box.kill_process(info.pid)
    assert box.get_stdout(info.pid).lines == ("a", "c")


@pytest.mark.behaviour("process-5")
def test_following_is_live_and_ends_with_the_process(box: Sandbox) -> None:
    talk = box.start_process("sh", ["-c", "echo ready; while read x; do echo out $x; echo err $x >&2; done; echo bye"],
                             stdin_mode="pipe")  # fmt: skip
    lines = box.follow_output(talk.pid)
    assert next(lines).line == "ready"
    for word in ("a", "b"):
        box.write_stdin(talk.pid, word.encode() + b"\n")
        pair = [next(lines), next(lines)]
        assert {(event.stream, event.line) for event in pair} == {("stdout", f"out {word}"), ("stderr", f"err {word}")}
        assert all(event.timestamp > 1.6e9 for event in pair)
    box.close_stdin(talk.pid)
    assert [event.line for event in lines] == ["bye"]
    assert [event.line for event in box.follow_stderr(talk.pid)] == ["err a", "err b"]
    assert [event.line for event in box.follow_stdout(talk.pid)] == ["ready", "out a", "out b", "bye"]


@pytest.mark.behaviour("process-6")
def test_signals_reach_one_process(box: Sandbox) -> None:
    line = "trap 'echo caught' USR1; echo ready; while :; do sleep 0.01; done"
    info = box.start_process("sh", ["-c", line])
    lines = box.follow_stdout(info.pid)
    assert next(lines).line == "ready"
    box.send_signal(info.pid, signal.SIGUSR1)
    assert next(lines).line == "caught"
    assert box.get_process(info.pid).status == "running"
    box.send_signal(info.pid, signal.SIGTERM)
    assert list(lines) == []
    after = box.get_process(info.pid)
    assert (after.status, after.signal, after.exit_code) == ("signaled", signal.SIGTERM, -signal.SIGTERM)


@pytest.mark.behaviour("process-7")
def test_killing_takes_the_tree(box: Sandbox) -> None:
    line = "setsid sleep 1000 & (sleep 1000 &); trap '' TERM; echo ready; sleep 1000; sleep 1000"
    info = box.start_process("sh", ["-c", line])
    assert next(box.follow_stdout(info.pid)).line == "ready"
    box.kill_process(info.pid)
    assert processes(box) == 0
    after = box.get_process(info.pid)
    assert (after.status, after.signal) == ("signaled", signal.SIGKILL)


@pytest.mark.behaviour("process-8")
def test_how_a_process_ended_is_remembered(box: Sandbox) -> None:
    seven = box.start_process("sh", ["-c", "exit 7"]).pid
    assert ended(box, seven) == []
    info = box.get_process(seven)
    assert (info.status, info.exit_code, info.signal) == ("exited", 7, None)
    assert info.ended_at is not None
    assert info.ended_at >= info.started_at
    for number in range(260):
        pid = box.start_process("sh", ["-c", f"echo {number}"]).pid
        assert ended(box, pid) == [("stdout", f"{number}")]
    remembered = box.list_processes()
    assert len(remembered) == 256
    assert remembered[-1].args == ("-c", "echo 259")
    assert seven not in {row.pid for row in remembered}


@pytest.mark.behaviour("process-9")
def test_output_can_be_thrown_away(box: Sandbox) -> None:
    info = box.start_process("sh", ["-c", "echo out; echo err >&2"], stdout_mode="discard")
    assert ended(box, info.pid) == [("stderr", "err")]
    info = box.start_process("sh", ["-c", "echo out; echo err >&2"], stderr_mode="discard")
    assert ended(box, info.pid) == [("stdout", "out")]


@pytest.mark.behaviour("process-9")
def test_of_much_output_the_last_part_is_kept(box: Sandbox) -> None:
    info = box.start_process("seq", ["1000000"])
    assert list(box.follow_stderr(info.pid)) == []  # its end
    lines = box.get_stdout(info.pid).lines
    assert lines[-1] == "1000000"
    # Of the first one only a part may be left.
    assert [int(line) for line in lines[1:]] == list(range(1_000_002 - len(lines), 1_000_001))
    assert 900_000 < sum(len(line) + 1 for line in lines) <= 1 << 20


@pytest.mark.behaviour("process-10")
def test_a_process_that_cannot_start_is_an_error(box: Sandbox) -> None:
    with pytest.raises(SandboxError) as error:
        box.start_process("no-such-program")
    assert "no-such-program" in str(error.value)
    assert error.value.fields["exit_code"] == 127
    with pytest.raises(SandboxError):
        box.start_process("sleep", ["1"], user="nobody-of-this-name")
    assert processes(box) == 0


@pytest.mark.behaviour("process-11", "attach-1")
def test_all_of_it_from_another_process(box: Sandbox, elsewhere: Elsewhere) -> None:
    cat = box.start_process("sh", ["-c", "echo ready; cat"], stdin_mode="pipe")
    program = (
        "import json, sys\n"
        "from worldfork import Sandbox\n"
        "with Sandbox.connect(sys.argv[1]) as box:\n"
        "    pid = int(sys.argv[2])\n"
        "    info = box.get_process(pid)\n"
        "    box.write_stdin(pid, b'from afar\\n')\n"
        "    follow = box.follow_output(pid)\n"
        "    seen = [next(follow).line, next(follow).line]\n"
        "    follow.close()\n"
        "    own = box.start_process('sh', ['-c', 'echo mine; exec sleep 1000'])\n"
        "    mine = box.follow_stdout(own.pid)\n"
        "    next(mine); mine.close()\n"
        "    listed = sorted(row.pid for row in box.list_processes())\n"
        "print(json.dumps([info.status, seen, own.pid, listed]))\n"
    )
    status, seen, own, listed = json.loads(finish(elsewhere(program, box.sandbox_id, str(cat.pid))))
    assert (status, seen, listed) == ("running", ["ready", "from afar"], sorted([cat.pid, own]))
    # What the other process started lives on after its end.
    assert box.get_process(own).status == "running"
    assert box.get_stdout(own).lines == ("mine",)
    box.kill_process(own)
    box.close_stdin(cat.pid)
    assert ended(box, cat.pid) == [("stdout", "ready"), ("stdout", "from afar")]
