from __future__ import annotations

import asyncio
import errno
import resource
from typing import Any

import pytest
from tests.unit.reward.played import PlayedSandbox, PlayedStart, a_result, a_task

from worldfork.core.errors import OutOfSpace, PathError, SandboxDied, VerifierError
from worldfork.records.death import Death, DeathCause, LimitHits
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.episode import FailureKind
from worldfork.reward import left_file
from worldfork.reward.command_verifier import CommandVerifier
from worldfork.reward.judge_program import JudgeSpec
from worldfork.reward.rewards_file import MAX_REWARD_BYTES
from worldfork.reward.verifier import Case, Grade, Verifier
from worldfork.sandbox.command import Reason

MINE = Edits({"a.py": EditedFile(b"mine")})


class Leaves(PlayedSandbox):
    """Its program leaves a file."""

    def __init__(self, left: bytes | None, **options: Any) -> None:
        super().__init__(a_result(b""), files={"/workspace/reward.json": b"1"})
        self.left = left

    async def run(self, command: str, args: list[str], **options: Any) -> Any:
        result = await super().run(command, args, **options)
        if self.left is not None:
            self.files["/workspace/reward.json"] = self.left
        return result


def grade(*forks: PlayedSandbox | Exception, answer: str = "exit", **changes: Any) -> Grade:
    start: Any = PlayedStart(*forks)
    verifier: Verifier = CommandVerifier(JudgeSpec(("python", "judge.py"), answer))
    return asyncio.run(verifier.grade(Case(a_task(**changes), start, MINE, fork_id="sb-1", attempt=2)))


def says(stdout: bytes, **changes: Any) -> PlayedSandbox:
    return PlayedSandbox(a_result(stdout, **changes))


def test_an_exit_code_is_the_answer() -> None:
    assert grade(says(b"")).reward == 1.0
    assert grade(says(b"", exit_code=1, stderr_bytes=b"a\nb\nc")).notes == ("b", "c")
    assert grade(says(b"", exit_code=-9, reason=Reason.SIGNALED)).reward == 0.0


def test_how_the_program_is_called() -> None:
    sandbox = says(b"")
    grade(sandbox)
    call = sandbox.calls[0]
    assert (call["command"], call["args"], call["working_dir"]) == ("python", ["judge.py"], "/workspace")
    assert call["env"]["WORLDFORK_GRADE_KEY"] == f"{a_task().task_hash}:sb-1:2"
    assert (resource.RLIMIT_CPU, 60, 61) in call["rlimits"]
    assert sandbox.seen[0] == {"/workspace/a.py": b"mine", "/workspace/test_a.py": b"hidden"}


def test_what_it_prints_is_the_answer() -> None:
    found = grade(says(b'{"reward": 0.5, "style": 1}'), answer="stdout")
    assert (found.reward, found.parts) == (0.5, {"style": 1.0})


def test_a_file_is_the_answer_and_a_planted_one_is_not() -> None:
    assert grade(Leaves(b"0.75"), answer="file:reward.json").reward == 0.75
    # Nothing is left by the program, and the untouched state shows that it could have been.
    assert grade(Leaves(None), Leaves(b"0"), answer="file:reward.json").reward == 0.0


@pytest.mark.parametrize("left", [b"", b"NaN", b"2", b"1" + b" " * MAX_REWARD_BYTES])
def test_an_answer_that_is_none_voids_nothing(left: bytes) -> None:
    found = grade(Leaves(left), Leaves(b"1"), answer="file:reward.json")
    assert (found.reward, len(found.notes)) == (0.0, 1)


def test_a_program_that_never_answers_is_no_score() -> None:
    with pytest.raises(VerifierError) as raised:
        grade(Leaves(b"NaN"), Leaves(b"NaN"), answer="file:reward.json")
    assert raised.value.fields["kind"] is FailureKind.CALIBRATION


def test_a_program_that_is_not_there_is_no_score() -> None:
    missing = [says(b"", reason=Reason.NOT_STARTED, exit_code=127) for _ in range(2)]
    with pytest.raises(VerifierError) as raised:
        grade(*missing)
    assert raised.value.fields["kind"] is FailureKind.GRADING


def test_a_program_that_the_policys_rebuild_step_took_away_is_worth_0() -> None:
    built, missing = a_result(b""), a_result(b"", reason=Reason.NOT_STARTED, exit_code=127)

    def taken() -> PlayedSandbox:
        return PlayedSandbox(built, missing)

    found = grade(taken(), PlayedSandbox(built, built), taken(), rebuild=("make",))
    assert (found.reward, found.end) == (0.0, "broken")
    with pytest.raises(VerifierError):
        grade(taken(), taken(), rebuild=("make",))


@pytest.mark.parametrize("error", [SandboxDied("gone"), OutOfSpace("full", scope="sandbox")])
def test_a_fork_that_the_policys_rebuild_step_breaks_is_worth_0(error: Exception) -> None:
    found = grade(PlayedSandbox(error), rebuild=("make",))
    assert (found.reward, found.end) == (0.0, error.code)  # type: ignore[attr-defined]


def test_sources_that_do_not_build_are_worth_0() -> None:
    assert grade(says(b"", exit_code=1), rebuild=("make",)).end == "build_failed"


def test_what_ends_the_fork_is_the_codes_own_unless_it_was_the_machine() -> None:
    assert grade(PlayedSandbox(SandboxDied("gone")), says(b"")).reward == 0.0
    assert grade(PlayedSandbox(OutOfSpace("full", scope="sandbox")), says(b"")).reward == 0.0
    with pytest.raises(OutOfSpace):
        grade(PlayedSandbox(OutOfSpace("full", scope="host")))
    lost = PlayedSandbox(SandboxDied("gone"))
    lost.death = Death(DeathCause.OUTSIDE, "seen")
    with pytest.raises(VerifierError) as raised:
        grade(lost)
    assert raised.value.fields["kind"] is FailureKind.LOST


@pytest.mark.parametrize(("said", "answer"), [(b"0.5", "stdout"), (b"no number", "stdout"), (b"", "exit")])
def test_a_child_that_the_host_ended_for_its_memory_is_no_score(said: bytes, answer: str) -> None:
    sandbox = says(said, exit_code=1)
    sandbox.hits = LimitHits(host_memory=1)
    with pytest.raises(VerifierError) as raised:
        grade(sandbox, answer=answer)
    assert raised.value.fields["kind"] is FailureKind.MEMORY
    best = says(b"1.0")
    best.hits = LimitHits(host_memory=1)
    assert grade(best, answer="stdout").reward == 1.0


class Slow(Leaves):
    """What its program leaves cannot be read in time, or not at all."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(b"0.25")
        self.number = number

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        if path.endswith("reward.json"):
            if self.number:
                raise PathError("no", path=path, errno=self.number)
            await asyncio.Event().wait()
        return await super().read_file(path, max_bytes=max_bytes)


def test_what_cannot_be_read_in_time_is_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_file, "_READ_S", 0.05)
    # The machine was slow for a moment; it is slow whatever there is to read; it is slow with this policy's edits.
    assert grade(Slow(), Leaves(b"1"), Leaves(b"0.25"), answer="file:reward.json").reward == 0.25
    with pytest.raises(VerifierError):
        grade(Slow(), Slow(), answer="file:reward.json")
    assert grade(Slow(), Leaves(b"1"), Slow(), answer="file:reward.json").reward == 0.0


def test_a_machine_that_cannot_read_gives_no_score() -> None:
    with pytest.raises(PathError):
        grade(Slow(errno.EIO), answer="file:reward.json")
    assert grade(Slow(errno.EACCES), Leaves(b"1"), answer="file:reward.json").reward == 0.0


def test_an_end_that_left_nothing_is_worth_0() -> None:
    start: Any = PlayedStart()
    verifier = CommandVerifier(JudgeSpec(("true",)))
    assert asyncio.run(verifier.grade_nothing(Case(a_task(), start, MINE))).reward == 0.0
