from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.reward.played import PlayedSandbox, a_result

from worldfork.core.clock import ManualClock
from worldfork.core.errors import CommandFailed, ConfigError, SandboxDied
from worldfork.records.trajectory import MAX_OUTPUT_CHARACTERS, Step, Trajectory
from worldfork.rollout import recording
from worldfork.rollout.recording import RecordedSandbox, Recorder, bounded
from worldfork.sandbox.command import CommandResult, Reason


class Played(PlayedSandbox):
    def __init__(self, clock: ManualClock, *results: CommandResult | BaseException) -> None:
        super().__init__(*results)  # type: ignore[arg-type]
        self.clock = clock

    async def run(self, command: str, args: list[str], **options: Any) -> CommandResult:
        self.clock.advance_s(2)
        if isinstance(self.results[0], asyncio.CancelledError):
            raise self.results.pop(0)
        return await super().run(command, args, **options)

    async def sh(self, line: str, **options: Any) -> CommandResult:
        return await self.run("sh", ["-c", line], **options)


def recorded(*results: Any) -> tuple[Any, Recorder, Played]:
    clock = ManualClock()
    inner = Played(clock, *results)
    recorder = Recorder(clock)
    return RecordedSandbox(inner, recorder), recorder, inner  # type: ignore[arg-type]


def test_commands_and_writes_become_steps_with_their_times() -> None:
    sandbox, recorder, inner = recorded(
        a_result(b"out", stderr_bytes=b"err", exit_code=3), a_result(b"seen\n", reason=Reason.TIMED_OUT)
    )

    async def act() -> None:
        await sandbox.write_file("/workspace/a.py", "x = 1\n")
        assert (await sandbox.run("python", ["a b.py"], timeout=3)).exit_code == 3
        assert (await sandbox.sh("ls | wc")).timed_out
        await sandbox.delete_file("/workspace/a.py")

    asyncio.run(act())
    assert recorder.trajectory().steps == (
        Step("write", "/workspace/a.py", "x = 1\n"),
        Step("command", "python 'a b.py'", "out\nerr", 3, "exited", 0.0, 2.0, 0.9),
        Step("command", "ls | wc", "seen\n", 0, "timed_out", 2.0, 4.0, 0.9),
        Step("write", "/workspace/a.py", reason="deleted", began_s=4.0, ended_s=4.0),
    )
    assert inner.calls[0]["timeout"] == 3
    assert inner.files == {}
    assert recorder.commands_s == 4.0


def test_files_that_are_laid_at_once_are_steps_of_their_own() -> None:
    sandbox, recorder, inner = recorded()
    inner.files["/workspace/old"] = b""
    asyncio.run(sandbox.lay_files("/workspace", {"a.py": (b"x = 1\n", 0o644)}, removed=["old"]))
    assert inner.files == {"/workspace/a.py": b"x = 1\n"}
    assert set(recorder.trajectory().steps) == {
        Step("write", "/workspace/a.py", "x = 1\n"), Step("write", "/workspace/old", reason="deleted"),
    }  # fmt: skip


def test_what_a_policy_says_goes_with_its_next_action() -> None:
    sandbox, recorder, _ = recorded(a_result(b""))
    recorder.message("I will look first", prompt_tokens=10, completion_tokens=4, log_probability=-1.5)
    asyncio.run(sandbox.sh("ls"))
    recorder.message("nothing here")
    recorder.message("so I am done")
    recorder.fact("model", "none")
    said, *rest = recorder.trajectory().steps
    assert (said.action, said.message) == ("ls", "I will look first")
    assert (said.prompt_tokens, said.completion_tokens, said.log_probability) == (10, 4, -1.5)
    assert [(step.kind, step.action) for step in rest] == [("message", "nothing here"), ("message", "so I am done")]
    assert Trajectory.from_json(recorder.trajectory().to_json()) == recorder.trajectory()


def test_a_command_that_raises_is_recorded_with_its_cause() -> None:
    failed = a_result(b"partial", exit_code=1)
    sandbox, recorder, _ = recorded(CommandFailed("no", result=failed), SandboxDied("gone"), asyncio.CancelledError())

    async def act() -> None:
        for error in (CommandFailed, SandboxDied, asyncio.CancelledError):
            with pytest.raises(error):
                await sandbox.sh("false", check=True)

    asyncio.run(act())
    steps = recorder.trajectory().steps
    assert [(step.output, step.exit_code, step.reason) for step in steps] == [
        ("partial", 1, "exited"),
        ("", None, "sandbox_died"),
        ("", None, "cancelled"),
    ]


def test_commands_at_the_same_time_count_once() -> None:
    clock = ManualClock()
    recorder = Recorder(clock)
    with recorder.running():
        clock.advance_s(1)
        with recorder.running():
            clock.advance_s(1)
            assert recorder.commands_s == 2
        clock.advance_s(1)
    clock.advance_s(5)
    assert recorder.commands_s == 3


def test_output_is_bounded_and_keeps_both_ends() -> None:
    sandbox, recorder, _ = recorded(a_result(b"<" + b"x" * (20 << 20) + b">"))
    asyncio.run(sandbox.run("yes", []))
    output = recorder.trajectory().steps[0].output
    assert len(output) <= MAX_OUTPUT_CHARACTERS
    assert output[0] + output[-1] == "<>"
    assert "left out" in output


def test_text_that_no_file_could_hold_is_made_readable() -> None:
    assert bounded("a\udc80b") == "a?b"
    assert bounded("kept") == "kept"
    assert len(bounded("y" * 1000, 100)) == 100


def test_a_trajectory_is_bounded_and_has_no_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_STEPS", 3)
    recorder = Recorder(ManualClock())
    for number in range(5):
        recorder.note(str(number))
    assert [step.action for step in recorder.trajectory().steps] == ["0", "1", "2"]
    assert recorder.trajectory().truncated
    monkeypatch.setattr(recording, "MAX_CHARACTERS", 10)
    recorder = Recorder(ManualClock())
    for text in ("12345", "123456", "1"):
        recorder.note(text)
    assert [step.action for step in recorder.trajectory().steps] == ["12345"]
    assert recorder.trajectory().truncated


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), "x" * 70_000, object()])
def test_facts_are_plain_and_few(value: object) -> None:
    recorder = Recorder(ManualClock())
    recorder.fact("kept", 1)
    with pytest.raises(ConfigError):
        recorder.fact("model", value)
    assert recorder.trajectory().facts == {"kept": 1}


def test_what_recorders_logged_is_taken_up_by_another() -> None:
    lines: list[dict[str, Any]] = []
    clock = ManualClock()
    first = Recorder(clock, ago_s=5.0, log=lines.append)
    assert first.now_s() == 5.0
    first.message("I look.", completion_tokens=3)
    first.step(Step("command", "ls", "a", 0, began_s=5.0, ended_s=7.0))
    first.fact("model", "none")
    second = Recorder(clock, log=lines.append)
    second.step(Step("command", "cat a", "b", 0, began_s=6.0, ended_s=8.0))
    second.note("over")
    found = Recorder(ManualClock())
    found.replay([*lines, {"step": "none"}, {"other": 1}, {"step": {"kind": 3}}])
    trajectory = found.trajectory()
    assert trajectory.steps == (*first.trajectory().steps, *second.trajectory().steps)
    assert trajectory.facts == {"model": "none"}
    assert trajectory.steps[0].message == "I look."
    assert found.commands_s == 3.0
    assert not trajectory.truncated


def test_a_record_that_was_cut_says_so_to_others_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_STEPS", 3)
    lines: list[dict[str, Any]] = []
    recorder = Recorder(ManualClock(), log=lines.append)
    for number in range(5):
        recorder.note(str(number))
    assert len(lines) == 4
    found = Recorder(ManualClock())
    found.replay(lines)
    assert found.trajectory() == recorder.trajectory()
