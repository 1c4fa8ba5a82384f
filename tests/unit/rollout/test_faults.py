from __future__ import annotations

from worldfork.records.episode import Failure, FailureKind
from worldfork.rollout.faults import RETRIES, FaultRules, Faults


def broken(kind: FailureKind, message: str = "no") -> Failure:
    return Failure(kind, kind.value, message)


def test_each_kind_is_tried_again_as_often_as_it_may() -> None:
    faults = Faults(FaultRules(pause_s=1.0))
    for kind in FailureKind:
        assert (faults.pause_s((kind,)) is not None) == (RETRIES.get(kind, 0) > 0), kind
    lost = FailureKind.LOST
    assert [faults.pause_s((lost,) * count) for count in (1, 2, 3)] == [1.0, 2.0, None]
    assert faults.pause_s((lost, FailureKind.FORK, FailureKind.GRADING)) == 4.0
    assert faults.pause_s((lost, FailureKind.FORK, FailureKind.GRADING, FailureKind.CARRY)) is None


def test_the_same_fault_again_and_again_ends_its_task_alone() -> None:
    faults = Faults(FaultRules(same_in_task=3))
    for _ in range(2):
        faults.note_rollout("one", broken(FailureKind.BUILD))
    faults.note_rollout("one", broken(FailureKind.BUILD, "another"))
    faults.note_rollout("one", broken(FailureKind.BUILD, "another"))
    assert faults.refusal("one") is None
    faults.note_rollout("one", broken(FailureKind.BUILD, "another"))
    refused = faults.refusal("one")
    assert refused is not None
    assert (refused.kind, refused.code) == (FailureKind.STOPPED, "repeated_fault")
    assert "another" in refused.message
    assert faults.refusal("other") is None
    faults.note_rollout("one", None)
    assert faults.refusal("one") is None


def test_faults_in_a_row_open_the_breaker() -> None:
    faults = Faults(FaultRules(breaker=3))
    for failure in (broken(FailureKind.FORK), broken(FailureKind.SPACE), None, broken(FailureKind.FORK)):
        faults.note_attempt(failure)
    faults.note_attempt(broken(FailureKind.STOPPED))
    faults.note_attempt(broken(FailureKind.FORK))
    assert faults.refusal("any") is None
    assert faults.pause_s((FailureKind.FORK,)) is not None
    faults.note_attempt(broken(FailureKind.FORK, "the last"))
    refused = faults.refusal("any")
    assert refused is not None
    assert refused.code == "too_many_faults"
    assert "the last" in refused.message
    assert faults.pause_s((FailureKind.FORK,)) is None
    assert faults.counts == {FailureKind.FORK: 4, FailureKind.SPACE: 1, FailureKind.STOPPED: 1}
