from __future__ import annotations

import json

import pytest
from tests.unit.cli import played
from tests.unit.cli.conftest import Invoke

from worldfork.cli.execute import command_exit_code
from worldfork.sandbox.command import Reason

Library = type[played.PlayedSandbox]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"exit_code": 0}, 0),
        ({"exit_code": 7}, 7),
        ({"exit_code": 255}, 255),
        ({"exit_code": -15, "signal": 15, "reason": Reason.SIGNALED}, 143),
        ({"exit_code": -9, "signal": 9, "reason": Reason.OOM_KILLED}, 137),
        ({"exit_code": -9, "signal": 9, "reason": Reason.TIMED_OUT}, 124),
        ({"exit_code": 127, "reason": Reason.NOT_STARTED}, 127),
        ({"exit_code": 126, "reason": Reason.NOT_STARTED}, 126),
    ],
)
def test_the_exit_code_is_the_one_a_shell_would_give(changes: dict[str, object], code: int) -> None:
    assert command_exit_code(played.command_result(**changes)) == code


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_what_follows_the_id_is_the_command(library: Library, invoke: Invoke, dashes: list[str]) -> None:
    result = invoke("exec", "--json", "-e", "A=1", "-w", "/tmp", "sb-a", *dashes, "ls", "-l", "--json", "-e")
    assert result.exit_code == 0
    options = {"env": {"A": "1"}, "user": None, "working_dir": "/tmp", "timeout": None}
    assert library.calls == [("run", ("ls", ["-l", "--json", "-e"], options))]


def test_as_json_the_end_of_the_command_is_data(library: Library, invoke: Invoke) -> None:
    library.result = played.command_result(exit_code=3, stderr_bytes=b"\xff")
    result = invoke("exec", "--json", "sb-a", "false")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "exit_code": 3,
        "reason": "exited",
        "signal": None,
        "stdout": "out\n",
        "stderr": "�",
        "wall_s": 0.1,
        "cpu_s": 0.05,
        "max_rss_bytes": 1 << 20,
    }


@pytest.mark.parametrize("arguments", [("sb-a", "--"), ("sb-a",), ("-t", "sb-a", "bash")])
def test_what_cannot_be_run_ends_with_2(library: Library, invoke: Invoke, arguments: tuple[str, ...]) -> None:
    assert invoke("exec", *arguments).exit_code == 2
    assert library.calls == []


def test_a_sandbox_that_is_not_there_ends_with_13(library: Library, invoke: Invoke) -> None:
    assert invoke("exec", "--json", "sb-missing", "true").exit_code == 13
