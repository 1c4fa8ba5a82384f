"""The shipped policies in real sandboxes, with what they do written down."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from worldfork.core.errors import PolicyError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.task import Task
from worldfork.records.trajectory import Step
from worldfork.rollout.policies import CommandPolicy, MutatePolicy
from worldfork.rollout.recording import RecordedSandbox, Recorder
from worldfork.rollout.turn import Turn

SOURCE = "def f(a, b):\n    return a < b\n"

pytestmark = pytest.mark.filterwarnings("ignore:no cgroup of this host:RuntimeWarning")

TASK = Task(
    task_id="e2e/policies",
    prompt="Repair it.",
    files={"pkg/one.py": SOURCE},
    editable=("pkg/**/*.py",),
    hidden_tests={"test_one.py": ""},
)


def in_sandbox(act: Callable[[AsyncSandbox, Turn], Awaitable[Any]]) -> tuple[Step, ...]:
    """Give a turn in a fresh sandbox that holds the task's files; return its steps."""
    turn = Turn(0, 7, Recorder())

    async def run() -> None:
        async with await AsyncSandbox.create(network="none") as sandbox:
            for path, text in TASK.files.items():
                await sandbox.write_file(f"/workspace/{path}", text)
            await act(RecordedSandbox(sandbox, turn.recorder), turn)

    asyncio.run(run())
    return turn.recorder.trajectory().steps


def test_commands_files_and_processes_are_recorded_as_they_were() -> None:
    async def act(sandbox: AsyncSandbox, turn: Turn) -> None:
        assert (await sandbox.sh("echo out; echo err >&2; exit 3", working_dir="/workspace")).exit_code == 3
        assert (await sandbox.run("printf", ["%s", "a b"])).stdout == "a b"
        assert (await sandbox.sh("sleep 20", timeout=0.2)).timed_out
        await sandbox.write_file("new.txt", b"text")
        assert await sandbox.read_file("new.txt") == b"text"
        async for _ in await sandbox.stream(["true"]):
            pass
        await sandbox.start_process("true")
        await sandbox.delete_file("new.txt")

    steps = in_sandbox(act)
    assert [(step.kind, step.action, step.output, step.exit_code) for step in steps[:2]] == [
        ("command", "echo out; echo err >&2; exit 3", "out\nerr\n", 3),
        ("command", "printf %s 'a b'", "a b", 0),
    ]
    assert [step.reason for step in steps[2:]] == ["timed_out", "", "streamed", "started", "deleted"]
    assert steps[2].ended_s - steps[2].began_s >= 0.2
    assert (steps[3].kind, steps[3].action, steps[3].output) == ("write", "new.txt", "text")


def test_a_policy_that_looks_ahead_forks_its_sandbox_and_takes_on_the_better_state() -> None:
    async def act(sandbox: AsyncSandbox, turn: Turn) -> None:
        child = (await sandbox.fork(1)).unwrap()[0]
        async with child:
            await child.write_file("/workspace/found.txt", "better")
            snapshot = await child.checkpoint()
        await sandbox.adopt(snapshot.snapshot_id)
        assert await sandbox.read_file("/workspace/found.txt") == b"better"
        await sandbox.checkpoint(verify="grep better /workspace/found.txt")
        async with await type(sandbox).connect(sandbox.sandbox_id) as again:
            assert await again.read_file("/workspace/found.txt") == b"better"

    steps = in_sandbox(act)
    assert [(step.kind, step.action.split()[0]) for step in steps] == [
        ("note", "forked"),
        ("note", "adopted"),
        ("note", "checkpoint"),
    ]


def test_mutate_changes_a_file_that_a_pattern_means() -> None:
    async def act(sandbox: AsyncSandbox, turn: Turn) -> None:
        await sandbox.sh(
            "mkdir -p pkg/sub && cp pkg/one.py other.py && touch pkg/sub/empty.py", working_dir="/workspace"
        )
        await MutatePolicy(1).agent(sandbox, TASK, turn)
        assert await sandbox.read_file("/workspace/pkg/one.py") != SOURCE.encode()
        assert await sandbox.read_file("/workspace/other.py") == SOURCE.encode()

    assert in_sandbox(act)[-1].action == "/workspace/pkg/one.py"


def test_an_agent_inside_works_on_the_task_and_its_output_is_kept() -> None:
    code = "import os; print(open(os.environ['WORLDFORK_PROMPT_FILE']).read(), os.getcwd()); raise SystemExit(4)"

    async def act(sandbox: AsyncSandbox, turn: Turn) -> None:
        await CommandPolicy(["python3", "-c", code]).agent(sandbox, TASK, turn)

    last = in_sandbox(act)[-1]
    assert (last.output, last.exit_code) == ("Repair it. /workspace\n", 4)


def test_an_agent_that_is_not_inside_is_told() -> None:
    async def act(sandbox: AsyncSandbox, turn: Turn) -> None:
        with pytest.raises(PolicyError, match="no program"):
            await CommandPolicy("no-such-agent --x").agent(sandbox, TASK, turn)

    in_sandbox(act)


@pytest.mark.parametrize(("code", "said"), [("print('no key')", "no key"), ("", "it printed nothing")])
def test_an_agent_on_the_host_that_fails_is_told_with_its_last_words(code: str, said: str) -> None:
    async def act(sandbox: AsyncSandbox, turn: Turn) -> None:
        with pytest.raises(PolicyError, match=f"^the agent program ended with 1: {said}$"):
            await CommandPolicy([sys.executable, "-c", f"{code}\nraise SystemExit(1)"], where="host").agent(
                sandbox, TASK, turn
            )

    assert in_sandbox(act)[-1].exit_code == 1


def test_an_agent_on_the_host_attaches_to_its_sandbox_by_id() -> None:
    code = (
        "import os\n"
        "from worldfork import Sandbox\n"
        "sandbox = Sandbox.connect(os.environ['WORLDFORK_SANDBOX_ID'])\n"
        "sandbox.write_file('/workspace/pkg/one.py', 'by the agent')\n"
        "sandbox.close()\n"
    )

    async def act(sandbox: AsyncSandbox, turn: Turn) -> None:
        await CommandPolicy([sys.executable, "-c", code], where="host").agent(sandbox, TASK, turn)
        assert await sandbox.read_file("/workspace/pkg/one.py") == b"by the agent"

    assert in_sandbox(act)[-1].exit_code == 0
