from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.unit.reward.played import a_task
from tests.unit.rollout.runs import an_episode

from worldfork.core.errors import ConfigError
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.episode import Episode, Failure, FailureKind
from worldfork.records.task import Task
from worldfork.records.trajectory import Step, Trajectory
from worldfork.rollout import run_directory
from worldfork.rollout.exporting import episode_rows
from worldfork.rollout.loading import load_tasks
from worldfork.rollout.report import write_report
from worldfork.rollout.run_directory import RunDirectory, trajectory_bytes
from worldfork.rollout.stored import StoredRun


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "deep" / "run")
    edits = Edits({"a.py": EditedFile(b"\x00\xff")}, ("b.py",))
    trajectory = Trajectory((Step("command", "ls", "out"),), facts={"model": "none"})
    digests = run.put([edits.to_bytes(), b"--- a\n", trajectory_bytes(trajectory)])
    episode = Episode("t", a_task().task_hash, "p", 0, 1.0, edits=digests[0], diff=digests[1], trajectory=digests[2])
    with run.open_journal() as journal:
        run.put_tasks([a_task()])
        journal.append([episode])
    stored = StoredRun(run.path)
    assert stored.episodes == [episode]
    assert (stored.edits(episode), stored.diff(episode)) == (edits, "--- a\n")
    assert stored.trajectory(episode) == trajectory
    assert stored.tasks == {a_task().task_hash: a_task()}


def test_the_same_content_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    first = run.put([b"x", b"y"])
    monkeypatch.setattr(run_directory, "_write_whole", None)
    assert run.put([b"y", b"x"]) == first[::-1]


def test_tasks_are_added_and_never_lost(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.put_tasks([a_task()])
    run.put_tasks([a_task(task_id="played/two"), a_task()])
    run.put_tasks([])
    lines = (tmp_path / "tasks.jsonl").read_text().splitlines()
    assert [json.loads(line)["task_id"] for line in lines] == ["played/one", "played/two"]
    with pytest.raises(ConfigError):
        run.put_tasks([a_task(prompt="another of the same name")])
    assert (tmp_path / "tasks.jsonl").read_text().splitlines() == lines


def test_tasks_that_are_known_to_be_there_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, counted = RunDirectory(tmp_path), list[Path]()

    def count(path: Path) -> list[Task]:
        counted.append(path)
        return load_tasks(path)

    monkeypatch.setattr(run_directory, "load_tasks", count)
    for index in range(5):
        RunDirectory(tmp_path).add(a_task(), Episode("played/one", a_task().task_hash, "p", index, 1.0))
    assert len(counted) == 1
    # Another process adds one.
    (tmp_path / "tasks.jsonl").unlink()
    run.put_tasks([a_task(task_id="played/two")])
    run.add(a_task(), Episode("played/one", a_task().task_hash, "p", 5, 1.0))
    stored = StoredRun(tmp_path)
    assert len(stored.tasks) == 2
    assert len(stored.episodes) == 6


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(OSError, match="no space"):
        RunDirectory(tmp_path).put([b"content"])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_rollouts_that_were_opened_alike_stand_beside_each_other(tmp_path: Path) -> None:
    """A trainer opens the same indices of the same task in every epoch; a later failure hides no earlier reward."""
    one, two, three = "sb-aaaaaaaaaaaaaaaa", "sb-bbbbbbbbbbbbbbbb", "sb-cccccccccccccccc"
    lost = Failure(FailureKind.LOST, "sandbox_died", "gone")
    for rollout_id, reward in ((one, 1.0), (two, 0.5), (three, None)):
        failure = lost if reward is None else None
        episode = an_episode(a_task(), 0, reward, failure=failure, policy_id="open", rollout_id=rollout_id)
        RunDirectory(tmp_path).add(a_task(), episode)
    stored = StoredRun(tmp_path)
    assert [(each.rollout_id, each.reward) for each in stored.episodes] == [(one, 1.0), (two, 0.5), (three, None)]
    assert [row["advantage"] for row in episode_rows(stored)] == [0.25, -0.25, None]
    write_report(stored, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert all(page.count(f'id="e0-0-{each}"') == 1 for each in (one, two, three))
