from __future__ import annotations

import asyncio
import math
import threading
from fractions import Fraction
from typing import Any

import pytest
from tests.unit.reward.played import PlayedStart, a_task

from worldfork.core.errors import ConfigError, LaunchFailed, VerifierError
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.score_verifier import Part, ScoreVerifier, WeightedVerifier, named_function
from worldfork.reward.verifier import FINAL, FRESH, Case, Grade, Verifier, gradings_of


def a_case(**changes: Any) -> Case:
    start: Any = PlayedStart()
    values: dict[str, Any] = {"edits": Edits({"a.py": EditedFile(b"mine")}), "fork_id": "sb-1", **changes}
    return Case(a_task(limits=TaskLimits(grade_wall_s=0.2)), start, **values)


def grade(function: Any, **changes: Any) -> Grade:
    verifier: Verifier = ScoreVerifier(function)
    return asyncio.run(verifier.grade(a_case(**changes)))


async def asynchronous(case: Case) -> float:
    return len(case.edits.files) / 2


class Callable:
    async def __call__(self, case: Case) -> dict[str, float]:
        return {"reward": 0.25, "style": 1}


def test_functions_of_every_kind() -> None:
    assert grade(lambda case: 0.5).reward == 0.5
    assert grade(asynchronous).reward == 0.5
    assert (grade(Callable()).reward, grade(Callable()).parts) == (0.25, {"style": 1.0})
    assert grade(lambda case: Grade(1, notes=("well",))).notes == ("well",)


class Scalar:
    """As numpy and torch have them."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        if self.value is None:
            raise ValueError("more than one element")
        return self.value


def test_what_functions_give_for_a_number_is_one() -> None:
    for said, reward in ((True, 1.0), (False, 0.0), (Scalar(0.5), 0.5), (Scalar(True), 1.0), (Fraction(1, 4), 0.25)):
        assert grade(lambda case, said=said: said).reward == reward
        assert grade(lambda case, said=said: {"reward": 1, "part": said}).parts == {"part": reward}
    with pytest.raises(VerifierError, match="no number"):
        grade(lambda case: Scalar(None))


def test_a_request_that_takes_too_long_is_the_functions_own_error() -> None:
    async def ask(case: Case) -> float:
        raise TimeoutError("no answer from the judge")

    with pytest.raises(VerifierError, match=r"raised TimeoutError: no answer"):
        grade(ask)


def test_a_plain_function_does_not_hold_up_the_loop() -> None:
    assert grade(lambda case: float(threading.current_thread() is not threading.main_thread())).reward == 1.0


def test_the_key_is_that_of_the_act() -> None:
    keys: list[str] = []
    for attempt in (1, 1, 2):
        grade(lambda case: float(keys.append(case.key) is None), attempt=attempt)
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("said", [1.5, -1, math.nan, math.inf, None, "1", [1], {"style": 1}, {"reward": 2}, 10**400])
def test_what_is_no_reward_is_no_score(said: Any) -> None:
    with pytest.raises(VerifierError) as raised:
        grade(lambda case: said)
    assert raised.value.fields["kind"] is FailureKind.GRADING


def test_a_function_that_breaks_or_does_not_end_is_no_score() -> None:
    def breaks(case: Case) -> float:
        raise RuntimeError("no")

    async def waits(case: Case) -> float:
        await asyncio.Event().wait()
        return 1.0

    for function in (breaks, waits):
        with pytest.raises(VerifierError) as raised:
            grade(function)
        assert raised.value.fields["kind"] is FailureKind.GRADING


def test_an_error_of_ours_passes_as_it_is() -> None:
    def fails(case: Case) -> float:
        raise LaunchFailed("no")

    with pytest.raises(LaunchFailed):
        grade(fails)


def test_one_that_looks_at_the_end_is_not_asked_without() -> None:
    verifier = ScoreVerifier(lambda case: 1.0, needs_end=True)
    assert asyncio.run(verifier.grade(a_case())).reward == 0.0
    found = asyncio.run(verifier.grade(a_case(end_snapshot_id="sn-1")))
    assert (found.reward, found.trust, verifier.trust) == (1.0, FINAL, FINAL)


def test_named_functions() -> None:
    assert named_function("math:fsum") is math.fsum
    for path in ("math:gone", "no_such_module:f", "math:pi", "math", ":f"):
        with pytest.raises(ConfigError):
            named_function(path)
    with pytest.raises(ConfigError):
        ScoreVerifier(3)  # type: ignore[arg-type]


def scored(reward: float, **parts: Any) -> ScoreVerifier:
    return ScoreVerifier(lambda case: Grade(reward, **parts), name=f"{reward}")


def combined(combine: str) -> Grade:
    parts = {
        "tests": Part(scored(0.5, expected=("a", "b"), passed=("a",), failed=("b",), cpu_s=1.0), 3.0),
        "style": Part(scored(1.0, expected=("a",), passed=("a",), cpu_s=0.5)),
    }
    return asyncio.run(WeightedVerifier(parts, combine=combine).grade(a_case()))


def test_parts_are_weighted() -> None:
    found = combined("mean")
    assert (found.reward, found.parts) == (0.625, {"tests": 0.5, "style": 1.0})
    assert (found.expected, found.passed, found.failed) == (
        ("style: a", "tests: a", "tests: b"),
        ("style: a", "tests: a"),
        ("tests: b",),
    )
    assert found.cpu_s == 1.5
    assert (combined("product").reward, combined("least").reward) == (0.5, 0.5)


def test_all_parts_at_1_are_exactly_1() -> None:
    parts = {str(each): Part(scored(1.0), 0.1) for each in range(7)}
    assert asyncio.run(WeightedVerifier(parts).grade(a_case())).reward == 1.0


def test_trust_is_that_of_the_weakest() -> None:
    end = ScoreVerifier(lambda case: 1.0, needs_end=True)
    both = WeightedVerifier({"a": Part(scored(1.0)), "b": Part(end)})
    assert (both.trust, both.needs_end) == (FINAL, True)
    alone = WeightedVerifier({"a": Part(scored(1.0))})
    assert (alone.trust, alone.needs_end) == (FRESH, False)
    assert both.verifier_id != alone.verifier_id


def test_every_part_has_the_time_of_a_grading() -> None:
    inner = WeightedVerifier({str(each): Part(scored(1.0)) for each in range(3)})
    assert gradings_of(WeightedVerifier({"a": Part(inner), "b": Part(scored(1.0))})) == 4
    assert gradings_of(scored(1.0)) == 1


def test_one_part_without_a_grade_leaves_none() -> None:
    with pytest.raises(VerifierError):
        asyncio.run(WeightedVerifier({"a": Part(scored(1.0)), "b": Part(scored(2.0))}).grade(a_case()))


def test_an_end_that_left_nothing_is_worth_0() -> None:
    assert asyncio.run(WeightedVerifier({"a": Part(scored(1.0))}).grade_nothing(a_case())).reward == 0.0


@pytest.mark.parametrize("weight", [0, -1, math.nan, True, "1", 1e10])
def test_weights(weight: Any) -> None:
    with pytest.raises(ConfigError):
        WeightedVerifier({"a": Part(scored(1.0), weight)})
    with pytest.raises(ConfigError):
        WeightedVerifier({})
    with pytest.raises(ConfigError):
        WeightedVerifier({"a": Part(scored(1.0))}, combine="most")


def test_parts_say_who_judged_them() -> None:
    by_split = ScoreVerifier(lambda _: Grade(0.5, judged_by="split:1"), name="one")
    parts = {"tests": Part(by_split), "notes": Part(scored(1.0))}
    assert asyncio.run(WeightedVerifier(parts).grade(a_case())).judged_by == "tests: split:1"
