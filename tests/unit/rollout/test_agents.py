from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reward.played import PlayedSandbox, a_result, a_task

from worldfork.core.clock import ManualClock
from worldfork.core.errors import ConfigError, PolicyError
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.trajectory import HARNESS, POLICY, Step
from worldfork.rollout.policies import CommandPolicy, MutatePolicy, ReferencePolicy
from worldfork.rollout.recording import RecordedSandbox, Recorder
from worldfork.rollout.turn import Turn

SOURCE = "def f(a, b):\n    return a < b\n"


class PlayedTurn(Turn):
    def __init__(self, index: int = 0, seed: int = 0) -> None:
        super().__init__(index, seed, Recorder(ManualClock()))

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.recorder.trajectory().steps


class Shelled(PlayedSandbox):
    async def sh(self, line: str, **options: Any) -> Any:
        return await self.run("sh", ["-c", line], **options)

    async def write_file(self, path: str, content: bytes | str, *, mode: int | None = None) -> None:
        await super().write_file(path, content)


def act(policy: Any, sandbox: Any, turn: PlayedTurn | None = None, **task: Any) -> PlayedTurn:
    turn = turn or PlayedTurn()
    asyncio.run(policy.agent(sandbox, a_task(**task), turn))
    return turn


def test_mutate_changes_what_is_in_the_sandbox_by_its_own_seed() -> None:
    written = []
    for index, seed in ((0, 1), (0, 2), (1, 1)):
        sandbox = Shelled(files={"/workspace/a.py": SOURCE.encode()})
        act(MutatePolicy(3), sandbox, PlayedTurn(index, seed))
        written.append(sandbox.files["/workspace/a.py"])
    assert written[0] == written[1] != written[2]
    assert SOURCE.encode() not in written


def test_mutate_looks_for_files_where_patterns_are_given_and_prefers_what_the_prompt_names() -> None:
    files = {f"/workspace/pkg/{name}": SOURCE.encode() for name in ("one.py", "two.py", "three.py")}
    listing = (
        b"".join(f"./pkg/{name}\0".encode() for name in ("one.py", "two.py", "three.py", "x.txt")) + b"./b\xff.py\0"
    )
    for index in range(8):
        sandbox = Shelled(a_result(listing), files=dict(files))
        act(
            MutatePolicy(), sandbox, PlayedTurn(index), files={}, editable=("pkg/*.py",), solution={},
            prompt="Repair pkg/two.py.",
        )  # fmt: skip
        assert [path for path in files if sandbox.files[path] != SOURCE.encode()] == ["/workspace/pkg/two.py"]


def test_mutate_with_nothing_to_change_leaves_a_note() -> None:
    sandbox = Shelled(files={"/workspace/a.py": b"\xff"})
    turn = act(MutatePolicy(), sandbox)
    assert sandbox.files == {"/workspace/a.py": b"\xff"}
    assert [step.kind for step in turn.steps] == ["note"]


def test_reference_takes_a_solution_that_lies_elsewhere() -> None:
    turn = PlayedTurn()
    turn.solution = Edits({"x.sh": EditedFile(b"#!", executable=True)}, ("a.py",))
    sandbox = Shelled(files={"/workspace/a.py": b"old"})
    act(ReferencePolicy(), sandbox, turn)
    assert sandbox.files == {"/workspace/x.sh": b"#!"}


def test_an_agent_inside_gets_its_prompt_by_file_and_variable() -> None:
    sandbox = Shelled(a_result(b""), a_result(b"done", exit_code=3))
    act(CommandPolicy("agent 'a b'", env={"KEY": "v"}), sandbox, PlayedTurn(2, 9), prompt="Do it.")
    call = sandbox.calls[1]
    assert call["args"] == ["-c", "exec agent 'a b'"]
    told = call["env"]
    assert sandbox.files[told["WORLDFORK_PROMPT_FILE"]] == b"Do it."
    assert not told["WORLDFORK_PROMPT_FILE"].startswith("/workspace")
    assert (told["WORLDFORK_PROMPT"], told["WORLDFORK_SEED"], told["WORLDFORK_FORK_INDEX"]) == ("Do it.", "9", "2")
    assert told["KEY"] == "v"


def test_what_starts_an_agent_is_the_harness_doing() -> None:
    turn = PlayedTurn()
    sandbox = RecordedSandbox(Shelled(a_result(b""), a_result(b"I am done.")), turn.recorder)  # type: ignore[arg-type]
    turn.recorder.message("Let me see.")
    act(CommandPolicy("agent"), sandbox, turn, prompt="Do it.")
    steps = turn.steps
    assert [(step.kind, step.actor) for step in steps] == [
        ("write", HARNESS), ("command", HARNESS), ("command", HARNESS), ("message", POLICY),
    ]  # fmt: skip
    assert all(not step.message for step in steps)
    turn = PlayedTurn()
    act(host("print('done')"), Shelled(), turn)
    assert [(step.kind, step.actor) for step in turn.steps] == [("note", HARNESS)]


def test_a_long_prompt_is_in_the_file_alone() -> None:
    sandbox = Shelled(a_result(b""), a_result(b""))
    act(CommandPolicy(["agent"]), sandbox, prompt="x" * 200_000)
    assert "WORLDFORK_PROMPT" not in sandbox.calls[1]["env"]
    assert len(sandbox.files["/tmp/worldfork-prompt.md"]) == 200_000


def test_an_agent_that_is_not_there_is_no_answer() -> None:
    with pytest.raises(PolicyError):
        act(CommandPolicy("absent"), Shelled(a_result(b"", exit_code=127)))


def host(code: str, **options: Any) -> CommandPolicy:
    return CommandPolicy([sys.executable, "-c", code], where="host", **options)


def test_an_agent_on_the_host_is_told_its_sandbox_and_may_tell_its_steps() -> None:
    code = (
        "import os,json\n"
        "print(os.environ['WORLDFORK_SANDBOX_ID'], open(os.environ['WORLDFORK_PROMPT_FILE']).read())\n"
        "with open(os.environ['WORLDFORK_STEPS_FILE'], 'w') as f:\n"
        "    f.write(json.dumps({'kind': 'command', 'action': 'ls', 'exit_code': 0}) + '\\nno json\\n[]\\n')\n"
        "    f.write(json.dumps({'kind': 'command', 'action': 7}) + '\\n')\n"
    )
    turn = act(host(code), Shelled(), prompt="Do it.")
    assert turn.steps[0] == Step("command", "ls", exit_code=0)
    assert (turn.steps[1].kind, turn.steps[1].output, turn.steps[1].exit_code) == ("note", "sb-played Do it.\n", 0)
    assert len(turn.steps) == 2


def test_an_agent_on_the_host_that_fails_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no tokens left"):
        act(host("import sys; sys.exit('no tokens left')"), Shelled())
    with pytest.raises(PolicyError, match="could not be started"):
        act(CommandPolicy([f"{tmp_path}/agent"], where="host"), Shelled())


def test_a_cancelled_agent_on_the_host_is_gone_with_its_group(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os,subprocess,sys,time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pids)!r} + '.new', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(pids)!r} + '.new', {str(pids)!r})\n"
        "time.sleep(60)\n"
    )

    async def cancelled() -> None:
        running = asyncio.ensure_future(host(code).agent(Shelled(), a_task(), PlayedTurn()))  # type: ignore[arg-type]
        async with asyncio.timeout(30):
            while not pids.exists():
                await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        async with asyncio.timeout(30):
            while any(alive(pid) for pid in pids.read_text().split()):
                await asyncio.sleep(0.01)

    asyncio.run(cancelled())


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.parametrize("command", ["", "'", [], [""], ["a\0b"], ["a", 1]])
def test_commands_that_are_none(command: Any) -> None:
    with pytest.raises(ConfigError):
        CommandPolicy(command)
    with pytest.raises(ConfigError):
        CommandPolicy("agent", where="elsewhere")
