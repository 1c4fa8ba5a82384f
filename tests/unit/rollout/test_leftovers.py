from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tests.stores import add_snapshot
from tests.unit.reward.played import a_task
from tests.unit.rollout.runs import an_episode

from worldfork.rollout import leftovers
from worldfork.rollout.journal import Journal
from worldfork.rollout.ledger import Ledger
from worldfork.rollout.leftovers import end_label, kept_label, sweep_ends
from worldfork.store.store import Store

DEAD = "ow-aaaaaaaaaaaaaaaa"
LEDGER = "sb-bbbbbbbbbbbbbbbb"


class Here:
    """As much of a place as a sweep uses."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.collected = 0

    def collect_soon(self) -> None:
        self.collected += 1


@pytest.fixture
def here(store: Store, monkeypatch: pytest.MonkeyPatch) -> Here:
    found = Here(store)
    monkeypatch.setattr(leftovers, "place", lambda: found)
    return found


def state(here: Here, label: str) -> str:
    snapshot_id = add_snapshot(here.store).snapshot_id
    here.store.set_labels({snapshot_id: label})
    return snapshot_id


def label_of(owner_id: str, book: Path | None = None) -> str:
    return end_label(book).replace(leftovers.place().store.owner_id, owner_id)


def labels(here: Here) -> dict[str, str | None]:
    return {record.snapshot_id: record.label for record in here.store.snapshots()}


def test_what_is_anothers_business_stays(here: Here) -> None:
    mine, other, kept = state(here, end_label()), state(here, "end of the road"), state(here, kept_label("sb-a"))
    assert len(sweep_ends(here)) == 0  # type: ignore[arg-type]
    assert set(labels(here)) == {mine, other, kept}


def test_without_a_book_a_state_goes_with_its_process(here: Here) -> None:
    state(here, label_of(DEAD))
    assert len(sweep_ends(here)) == 1  # type: ignore[arg-type]
    assert labels(here) == {}
    assert here.collected == 1


@pytest.mark.parametrize("name", ["episodes.jsonl", "a for b, \u00e4 and more", os.fsdecode(b"\xff.jsonl")])
def test_a_journal_tells_what_stays(name: str, here: Here, tmp_path: Path) -> None:
    book = tmp_path / name
    Journal.open(book).close()
    named, unnamed = state(here, label_of(DEAD, book)), state(here, label_of(DEAD, book))
    lost = state(here, label_of(DEAD, book))
    with Journal.open(book) as journal:
        journal.append([
            an_episode(a_task(), 0, 1.0, final_snapshot_id=named),
            an_episode(a_task(), 1, 1.0, final_snapshot_id=lost),
            an_episode(a_task(), 1, 1.0),
        ])  # fmt: skip
    assert len(sweep_ends(here)) == 2  # type: ignore[arg-type]
    assert labels(here) == {named: kept_label(None)}
    assert unnamed not in labels(here)
    assert len(sweep_ends(here)) == 0  # type: ignore[arg-type]


def test_where_nobody_can_tell_nothing_goes(here: Here, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("no journal\n")
    states = {state(here, label_of(DEAD, damaged)), state(here, label_of(DEAD, tmp_path / "gone" / "episodes.jsonl"))}
    assert len(sweep_ends(here)) == 0  # type: ignore[arg-type]
    assert set(labels(here)) == states


def test_a_run_whose_directory_was_moved_is_not_taken_for_the_one_that_came_after_it(
    here: Here, tmp_path: Path
) -> None:
    book = tmp_path / "run" / "episodes.jsonl"
    Journal.open(book).close()
    named, unnamed = state(here, label_of(DEAD, book)), state(here, label_of(DEAD, book))
    with Journal.open(book) as journal:
        journal.append([an_episode(a_task(), 0, 1.0, final_snapshot_id=named)])
    book.parent.rename(tmp_path / "run.1")
    Journal.open(book).close()
    later = state(here, label_of(DEAD, book))
    assert len(sweep_ends(here)) == 1  # type: ignore[arg-type]
    assert set(labels(here)) == {named, unnamed}
    assert later not in labels(here)
    # Back at its place, it decides.
    book.parent.rename(tmp_path / "run.2")
    (tmp_path / "run.1").rename(book.parent)
    assert len(sweep_ends(here)) == 1  # type: ignore[arg-type]
    assert labels(here) == {named: kept_label(None)}


def test_a_ledger_tells_what_stays(here: Here, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, LEDGER)
    ledger.path.mkdir()
    state(here, label_of(DEAD, ledger.path))
    second = state(here, label_of(DEAD, ledger.path))
    # It may be graded yet.
    assert len(sweep_ends(here)) == 0  # type: ignore[arg-type]
    ledger.set_episode(an_episode(a_task(), 0, 1.0, final_snapshot_id=second))
    assert len(sweep_ends(here)) == 1  # type: ignore[arg-type]
    assert labels(here) == {second: kept_label(None)}
    third = state(here, label_of(DEAD, ledger.path))
    shutil.rmtree(ledger.path)
    assert len(sweep_ends(here)) == 1  # type: ignore[arg-type]
    assert third not in labels(here)


def test_labels_can_be_read(here: Here, tmp_path: Path) -> None:
    assert str(tmp_path / "run" / "episodes.jsonl") in end_label(tmp_path / "run" / "episodes.jsonl")
    assert json.dumps(end_label(Path(os.fsdecode(b"/\xff")))).isascii()
