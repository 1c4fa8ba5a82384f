from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rollout.acting import Start, Starts, Verifier, a_task

from worldfork.core.errors import ConfigError, NotFound, VerifierError
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.episode import Episode, Failure, FailureKind
from worldfork.reward.verifier import Case, Grade
from worldfork.rollout import regrading
from worldfork.rollout.regrading import Regraded, regrade, regraded_journals
from worldfork.rollout.run_directory import RunDirectory
from worldfork.rollout.stored import StoredRun


@pytest.fixture(autouse=True)
def starts(monkeypatch: pytest.MonkeyPatch) -> Start:
    start = Start()

    class States:
        @staticmethod
        async def open(world: object) -> Starts:
            return Starts(start)

    monkeypatch.setattr(regrading, "StartingStates", States)
    return start


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The snapshots of the home."""
    found: set[str] = set()

    async def kept_states() -> set[str]:
        return found

    monkeypatch.setattr(regrading, "kept_states", kept_states)
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Four rollouts: two scored, one of which nothing could be read, one that was never graded."""
    found = RunDirectory(tmp_path)
    edits = [Edits({"a.py": EditedFile(text)}).to_bytes() for text in (b"good", b"bad", b"late")]
    good, bad, late = found.put(edits)
    names: dict[str, Any] = {
        "task_id": "played/one",
        "task_hash": a_task().task_hash,
        "policy_id": "p",
        "snapshot_id": "sn-played",
    }
    overload = Failure(FailureKind.OVERLOAD, "verifier", "late")
    with found.open_journal() as journal:
        found.put_tasks([a_task()])
        journal.append([
            Episode(**names, index=0, reward=0.2, edits=good, sandbox_id="sb-0", attempt=2),
            Episode(**names, index=1, reward=0.3, edits=bad, passed=("x",)),
            Episode(**names, index=2, reward=0.0, policy_end="sandbox_died"),
            Episode(**names, index=3, reward=None, failure=overload, edits=late),
            Episode(**names, index=4, reward=None, failure=Failure(FailureKind.FORK, "fork", "no")),
        ])  # fmt: skip
    return found


def by_content(case: Case) -> Grade:
    return Grade(1.0 if case.edits.files["a.py"].content != b"bad" else 0.0, expected=("a",), notes=("told",))


def again(run: RunDirectory, verifier: Verifier, **options: Any) -> list[Regraded]:
    return asyncio.run(regrade(StoredRun(run.path), verifier=verifier, **options))


def test_all_that_left_something_is_graded_again(run: RunDirectory) -> None:
    before = StoredRun(run.path).episodes
    verifier = Verifier(give=by_content)
    told: list[int] = []
    results = again(run, verifier, on_episode=lambda each: told.append(each.after.index))
    assert [each.after.reward for each in results] == [1.0, 0.0, 0.0, 1.0]
    assert [each.changed for each in results] == [True, True, False, True]
    assert sorted(told) == [0, 1, 2, 3]
    assert (results[1].after.passed, results[1].after.expected) == ((), ("a",))
    assert results[0].after.verifier_id == "played"
    assert results[0].after.notes == ("told",)
    assert verifier.cases[0].key == f"{a_task().task_hash}:sb-0:2"
    assert StoredRun(run.path).episodes == before
    (journal,) = regraded_journals(run.path)
    assert len(StoredRun(journal).episodes) == 4


def test_what_is_graded_is_not_graded_twice(run: RunDirectory) -> None:
    first = again(run, Verifier(give=by_content))
    verifier = Verifier(VerifierError("not to be asked"))
    assert [each.after for each in again(run, verifier)] == [each.after for each in first]


def test_a_verifier_that_breaks_is_no_score(run: RunDirectory) -> None:
    results = again(run, Verifier(VerifierError("odd")))
    assert [each.after.failure.kind if each.after.failure else None for each in results] == [
        FailureKind.GRADING, FailureKind.GRADING, None, FailureKind.GRADING,
    ]  # fmt: skip


class Looking(Verifier):
    """Looks at whole final states."""

    needs_end = True


def keep(run: RunDirectory, *indices: int) -> None:
    with run.open_journal() as journal:
        episodes = {each.index: each for each in StoredRun(run.path).episodes}
        journal.append([replace(episodes[index], final_snapshot_id=f"sn-{index}") for index in indices])


@pytest.mark.parametrize(("kept", "why"), [((), "the run kept none"), ((0, 1), "all 2 that the run kept were deleted")])
def test_final_states_that_are_not_there_cannot_be_looked_at(
    kept: tuple[int, ...], why: str, run: RunDirectory
) -> None:
    keep(run, *kept)
    verifier = Looking()
    with pytest.raises(ConfigError, match=why) as caught:
        again(run, verifier)
    assert "--keep all" in str(caught.value.remedy)
    assert verifier.cases == []
    assert regraded_journals(run.path) == []


def test_final_states_that_are_there_are_looked_at(run: RunDirectory, there: set[str]) -> None:
    keep(run, 0, 1)
    there.add("sn-1")
    verifier = Looking()
    results = again(run, verifier)
    assert [case.end_snapshot_id for case in verifier.cases] == ["sn-1"]
    # Of the one that left nothing no state is needed.
    assert [(each.before.index, each.after.reward) for each in results] == [(1, 0.5), (2, 0.0)]


def test_a_task_that_is_not_known(run: RunDirectory) -> None:
    with pytest.raises(NotFound):
        asyncio.run(regrade(StoredRun(run.path, tasks=[]), verifier=Verifier()))


@pytest.mark.parametrize("damaged", [True, False])
def test_what_cannot_be_read_any_more_is_no_score(damaged: bool, run: RunDirectory) -> None:
    for blob in (run.path / "blobs").rglob("*.zst"):
        if damaged:
            blob.write_bytes(b"damaged")
        else:
            blob.unlink()
    results = again(run, Verifier())
    kinds = [each.after.failure.kind if each.after.failure else None for each in results]
    assert kinds == [FailureKind.CARRY, FailureKind.CARRY, None, FailureKind.CARRY]
    assert [each.after.reward for each in results] == [None, None, 0.0, None]


def test_episodes_that_never_named_what_was_left_are_left_out(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with run.open_journal() as journal:
        run.put_tasks([a_task()])
        journal.append([Episode("played/one", a_task().task_hash, "p", 0, 1.0)])
    assert again(run, Verifier()) == []


def test_a_rollout_that_was_run_again_is_graded_again(run: RunDirectory) -> None:
    again(run, Verifier(give=by_content))
    (other,) = run.put([Edits({"a.py": EditedFile(b"bad")}).to_bytes()])
    with run.open_journal() as journal:
        journal.append([replace(StoredRun(run.path).episodes[0], edits=other, sandbox_id="sb-9")])
    assert again(run, Verifier(give=by_content))[0].after.reward == 0.0
