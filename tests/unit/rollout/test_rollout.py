from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.rollout.acting import GRADE, Acting, Box, Left, Start, Verifier, a_task

from worldfork.core.clock import ManualClock
from worldfork.core.errors import (
    CommandTimeout,
    ConfigError,
    LaunchFailed,
    OutOfSpace,
    PathError,
    PolicyError,
    SandboxDied,
    VerifierError,
)
from worldfork.lineage.deaths import asked
from worldfork.records.death import Death, DeathCause, LimitHits
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.episode import Episode, FailureKind
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.verifier import Grade
from worldfork.rollout import attempt, bounds, faults
from worldfork.rollout.attempt import Attempt, Setting
from worldfork.rollout.faults import FaultRules
from worldfork.rollout.outcome import Which
from worldfork.rollout.rollout import run_rollout

ONCE = FaultRules(retries={})
LIMITS = TaskLimits(policy_wall_s=0.05, start_wall_s=0.2, stop_wall_s=0.2)


class Carrying:
    """What carrying out meets, where it meets anything; reading a sandbox is tried with real ones."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.hangs = False
        self.levels: list[str] = []
        self.left = Left(Edits({"a.py": EditedFile(b"mine")}))

    async def __call__(self, sandbox: Any, task: Any, *, start_snapshot_id: str, level: str, **_: Any) -> Left:
        self.levels.append(level)
        if self.hangs:
            await asyncio.sleep(60)
        if self.error is not None:
            raise self.error
        return self.left


@pytest.fixture(autouse=True)
def carrying(monkeypatch: pytest.MonkeyPatch) -> Carrying:
    found = Carrying()
    monkeypatch.setattr(attempt, "carry_out", found)
    monkeypatch.setattr(attempt, "end_label", lambda book: "end")
    return found


def run(policy: Any, *, verifier: Verifier | None = None, start: Start | None = None, keep: bool = False) -> Episode:
    start = start or Start()
    setting: Any = Setting(start, verifier or Verifier(), ManualClock(), rules=ONCE, keep_end=keep)  # type: ignore[arg-type]
    which = Which(a_task(limits=LIMITS), policy.policy_id, 3)
    outcome = asyncio.run(run_rollout(which, policy, setting))
    assert start.begun == start.ended
    return outcome.episode


def dying(death: Death, error: Exception | None = None) -> Acting:
    async def die(sandbox: Any, turn: Any) -> None:
        sandbox._inner.death = death
        if error is not None:
            raise error

    return Acting(die)


def kind_of(episode: Episode) -> FailureKind | None:
    assert (episode.reward is None) == (episode.failure is not None)
    return episode.failure.kind if episode.failure else None


def test_a_scored_episode_tells_all(carrying: Carrying) -> None:
    episode = run(Acting())
    assert (episode.reward, episode.failure, episode.policy_end) == (0.5, None, "finished")
    assert (episode.expected, episode.passed, episode.failed) == (("a", "b"), ("a",), ("b",))
    assert (episode.snapshot_id, episode.sandbox_id, episode.grading_sandbox_id) == ("sn-played", "sb-played", "sb-g")
    assert (episode.seed, episode.attempt, episode.verifier_id, episode.trust) == (7, 1, "played", "fresh")
    assert episode.key == (a_task(limits=LIMITS).task_hash, "acting", 3, "")
    assert episode.final_snapshot_id is None
    assert carrying.left.dropped == 1


def test_an_episode_tells_why_it_is_worth_so_little(carrying: Carrying) -> None:
    carrying.left = Left(Edits({"a.py": EditedFile(b"mine")}, dropped=(("b.py", "files"),)))
    said = [f"{number} {'x' * 500}" for number in range(20)]
    episode = run(Acting(), verifier=Verifier(give=lambda _: Grade(reward=0.0, notes=tuple(said))))
    assert episode.notes[0].startswith("not carried: b.py")
    assert episode.notes[1] == said[0][:300]
    assert len(episode.notes) == 10


def test_what_an_episode_names_comes_with_it() -> None:
    async def act(sandbox: Any, turn: Any) -> None:
        turn.note("seen")

    start = Start()
    setting: Any = Setting(start, Verifier(), ManualClock())  # type: ignore[arg-type]
    outcome = asyncio.run(run_rollout(Which(a_task(), "acting", 0), Acting(act), setting))
    edits, diff, trajectory = outcome.blobs
    assert Edits.from_bytes(edits).files["a.py"].content == b"mine"
    assert b"-old" in diff
    assert b"+mine" in diff
    assert b"seen" in trajectory
    assert outcome.episode.edits
    assert outcome.episode.trajectory


def test_the_end_is_kept_where_that_is_asked_and_earned(carrying: Carrying) -> None:
    assert run(Acting(), keep=True).final_snapshot_id == "sn-end"
    assert carrying.left.dropped == 0
    assert run(Acting(), keep=True, verifier=Verifier(VerifierError("odd"))).final_snapshot_id is None
    assert carrying.left.dropped == 1
    run(Acting())
    assert carrying.levels == ["local", "local", "volatile"]


def test_a_state_that_no_episode_comes_to_name_goes(carrying: Carrying, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Attempt) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Attempt, "outcome", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        run(Acting(), keep=True)
    assert carrying.left.dropped == 1


def test_cancelled_in_its_last_moment_it_keeps_no_state(carrying: Carrying) -> None:
    class Slow(Start):
        @contextlib.asynccontextmanager
        async def fork(self, index: int = 0, **options: Any) -> AsyncIterator[Any]:
            async with super().fork(index, **options) as box:
                yield box
                ending.set()
                await asyncio.sleep(0.05)

    async def cancel() -> None:
        setting: Any = Setting(Slow(), Verifier(), ManualClock(), keep_end=True)  # type: ignore[arg-type]
        rolling = asyncio.ensure_future(run_rollout(Which(a_task(), "acting", 0), Acting(), setting))
        await ending.wait()
        rolling.cancel()
        await rolling

    ending = asyncio.Event()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert carrying.left.dropped == 1


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (PolicyError("no model"), FailureKind.POLICY, "policy"),
        (RuntimeError("defect"), FailureKind.POLICY, "RuntimeError"),
        (TimeoutError("its own"), FailureKind.POLICY, "TimeoutError"),
        (asyncio.CancelledError(), FailureKind.POLICY, "RuntimeError"),
        (OutOfSpace("full", scope="host"), FailureKind.SPACE, "out_of_space"),
        (PathError("broken", path="/a", errno=errno.EIO), FailureKind.POLICY, "path"),
        (ConfigError("defect"), FailureKind.POLICY, "config"),
        (MemoryError(), FailureKind.MEMORY, "MemoryError"),
        (SandboxDied("a socket broke, and it lives"), FailureKind.LOST, "sandbox_died"),
    ],
)
def test_what_breaks_on_the_host_is_no_score(error: BaseException, kind: FailureKind, code: str) -> None:
    episode = run(Acting(error))
    assert episode.failure is not None
    assert (episode.failure.kind, episode.failure.code) == (kind, code)


@pytest.mark.parametrize(
    "error",
    [PathError("a FIFO", path="/a", errno=errno.EINVAL), CommandTimeout("late", result=None)],
)
def test_what_a_policy_meets_in_its_sandbox_ends_its_turn(error: Exception) -> None:
    episode = run(Acting(error))
    assert episode.reward == 0.5
    assert episode.policy_end == error.code  # type: ignore[attr-defined]


@pytest.mark.parametrize(("full", "kind"), [(True, FailureKind.SPACE), (False, None)])
def test_a_full_file_system_is_the_hosts_where_its_disk_is_full(
    full: bool, kind: FailureKind | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Here:
        def is_full(self) -> bool:
            return full

    monkeypatch.setattr(faults, "place", Here)
    assert kind_of(run(Acting(PathError("full", path="/a", errno=errno.ENOSPC)))) is kind


def test_a_turn_that_lasts_too_long_is_graded() -> None:
    async def stall(sandbox: Any, turn: Any) -> None:
        await asyncio.sleep(60)

    episode = run(Acting(stall))
    assert (episode.reward, episode.policy_end) == (0.5, "timed_out")


def test_a_policy_that_does_not_let_go_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SETTLE_S", 0.02)

    async def cling(sandbox: Any, turn: Any) -> None:
        for _ in range(20):
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue

    episode = run(Acting(cling))
    assert (episode.reward, episode.policy_end) == (0.5, "timed_out")


@pytest.mark.parametrize("death", [Death(DeathCause.DISK, ""), Death(DeathCause.CRASHED, ""), asked()])
@pytest.mark.parametrize("error", [None, SandboxDied("gone"), RuntimeError("its tool broke")])
def test_a_death_of_its_own_doing_earns_nothing(death: Death, error: Exception | None, carrying: Carrying) -> None:
    carrying.error = SandboxDied("gone")
    verifier = Verifier()
    episode = run(dying(death, error), verifier=verifier)
    assert (episode.reward, episode.policy_end) == (0.0, "sandbox_died")
    assert (episode.expected, episode.passed) == (("a", "b"), ())
    assert verifier.cases == []


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (DeathCause.OUTSIDE, FailureKind.LOST),
        (DeathCause.ENDED, FailureKind.LOST),
        (DeathCause.UNKNOWN, FailureKind.LOST),
        (DeathCause.HOST_MEMORY, FailureKind.MEMORY),
        (DeathCause.HOST_DISK, FailureKind.SPACE),
        (DeathCause.TIME, FailureKind.LIMIT),
    ],
)
@pytest.mark.parametrize("error", [None, SandboxDied("gone"), RuntimeError("its tool broke")])
def test_a_death_of_our_doing_is_no_score(
    cause: DeathCause, kind: FailureKind, error: Exception | None, carrying: Carrying
) -> None:
    carrying.error = SandboxDied("gone")
    assert kind_of(run(dying(Death(cause, "told"), error))) is kind


def test_a_full_disk_of_its_own_earns_nothing(carrying: Carrying) -> None:
    carrying.error = OutOfSpace("full", scope="sandbox")
    assert run(Acting()).reward == 0.0
    carrying.error = OutOfSpace("full", scope="host")
    assert kind_of(run(Acting())) is FailureKind.SPACE


def test_a_process_that_the_host_took_is_no_score() -> None:
    def short(index: int) -> Box:
        box = Box()
        box.hits = LimitHits(host_memory=1)
        return box

    assert kind_of(run(Acting(), start=Start(short))) is FailureKind.MEMORY


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (VerifierError("late", kind=FailureKind.OVERLOAD), FailureKind.OVERLOAD),
        (VerifierError("odd"), FailureKind.GRADING),
        (LaunchFailed("no"), FailureKind.GRADING),
        (SandboxDied("gone"), FailureKind.GRADING),
        (OutOfSpace("full", scope="host"), FailureKind.SPACE),
        (OSError(errno.ENOSPC, "full"), FailureKind.SPACE),
        (OSError(errno.ENOMEM, "none"), FailureKind.MEMORY),
        (KeyError("defect"), FailureKind.GRADING),
    ],
)
def test_trouble_of_the_verifier_is_no_score(error: Exception, kind: FailureKind) -> None:
    assert kind_of(run(Acting(), verifier=Verifier(error))) is kind


@pytest.mark.parametrize("reward", [1.5, -0.1, float("nan"), float("inf"), True, "1", None])
def test_a_reward_that_is_none_is_no_score(reward: Any) -> None:
    for grade in (replace(GRADE, reward=reward), replace(GRADE, parts={"other": reward})):
        assert kind_of(run(Acting(), verifier=Verifier(give=lambda _, grade=grade: grade))) is FailureKind.GRADING  # type: ignore[misc]


def test_no_grade_is_no_score() -> None:
    nothing: Callable[[Any], Grade] = lambda _: None  # type: ignore[assignment, return-value]  # noqa: E731
    assert kind_of(run(Acting(), verifier=Verifier(give=nothing))) is FailureKind.GRADING


def test_reading_that_fails_for_our_reasons_is_no_score(carrying: Carrying) -> None:
    carrying.error = PathError("broken", path="/a", errno=errno.EIO)
    assert kind_of(run(Acting())) is FailureKind.CARRY


def test_a_fork_that_fails_is_no_score() -> None:
    def fail(index: int) -> Box:
        raise LaunchFailed("no")

    assert kind_of(run(Acting(), start=Start(fail))) is FailureKind.FORK


def test_reading_that_takes_too_long_says_so(carrying: Carrying, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "READING", 1)
    carrying.hangs = True
    failure = run(Acting()).failure
    assert failure is not None
    assert (failure.kind, failure.message) == (FailureKind.LIMIT, "reading what was left took more than 0.2 s")


def test_only_the_reference_is_told_the_solution() -> None:
    seen: list[Any] = []

    async def look(sandbox: Any, turn: Any) -> None:
        seen.append(turn.solution)

    class Told(Acting):
        tells_solution = True

    run(Acting(look))
    run(Acting(look, "reference"))
    run(Told(look))
    assert seen == [None, None, Start.solution]


def test_cancellation_passes_after_the_end() -> None:
    start = Start()
    began = asyncio.Event()

    async def stall(sandbox: Any, turn: Any) -> None:
        began.set()
        await asyncio.sleep(60)

    async def cancel() -> None:
        setting: Any = Setting(start, Verifier(), ManualClock())  # type: ignore[arg-type]
        rolling = asyncio.ensure_future(run_rollout(Which(a_task(), "acting", 0), Acting(stall), setting))
        await began.wait()
        rolling.cancel()
        await rolling

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert (start.begun, start.ended) == (1, 1)


def test_what_a_policy_tells_of_itself_costs_no_reward() -> None:
    async def tell(sandbox: Any, turn: Any) -> None:
        turn.recorder.message("odd", log_probability=float("-inf"), completion_tokens=3)
        turn.recorder._facts = {"odd": float("nan")}

    episode = run(Acting(tell))
    assert episode.reward == 0.5
    assert episode.trajectory is not None
