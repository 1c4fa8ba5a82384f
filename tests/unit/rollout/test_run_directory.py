from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
from worldfork.rollout.journal import run_of
from worldfork.rollout.loading import load_tasks
from worldfork.rollout.report import write_report
from worldfork.rollout.run_directory import RunDirectory, trajectory_bytes
from worldfork.rollout.run_tasks import read_tasks
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


def test_a_task_that_is_added_costs_no_reading_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read, from_json = RunDirectory(tmp_path), list[str](), Task.from_json

    def count(data: Mapping[str, Any]) -> Task:
        read.append(data["task_id"])
        return from_json(data)

    monkeypatch.setattr(Task, "from_json", count)
    for index in range(50):
        task = a_task(task_id=f"played/{index}")
        RunDirectory(tmp_path).add(task, Episode(task.task_id, task.task_hash, "p", index, 1.0))
        run.add(task, Episode(task.task_id, task.task_hash, "p", index, 0.0))
    assert read == []
    # Another process adds one, and then another file is put there.
    with (tmp_path / "tasks.jsonl").open("a") as file:
        file.write(json.dumps(a_task(task_id="played/other").to_json()) + "\n")
    run.put_tasks([a_task(task_id="played/new")])
    assert read == ["played/other"]
    (tmp_path / "tasks.jsonl").write_text(json.dumps(a_task(task_id="played/0").to_json()))
    run.put_tasks([a_task(task_id="played/new")])
    monkeypatch.undo()
    assert [each.task_id for each in StoredRun(tmp_path).tasks.values()] == ["played/0", "played/new"]
    assert len(StoredRun(tmp_path).episodes) == 50


def test_half_a_task_of_a_process_that_died_is_in_nobodys_way(tmp_path: Path) -> None:
    run, whole = RunDirectory(tmp_path), json.dumps(a_task().to_json()) + "\n"
    for cut in (0, 1, len(whole) // 2, len(whole) - 2, len(whole) - 1):
        (tmp_path / "tasks.jsonl").write_text(whole.replace("played/one", "played/two") + whole[:cut])
        there = ["played/two"] + ["played/one"] * (cut == len(whole) - 1)
        assert [task.task_id for task in read_tasks(tmp_path / "tasks.jsonl")] == there
        run.put_tasks([a_task()])
        assert [task.task_id for task in load_tasks(tmp_path / "tasks.jsonl")] == ["played/two", "played/one"]


def test_many_add_tasks_at_once(tmp_path: Path) -> None:
    def add(first: int) -> None:
        for index in range(first, first + 20):
            RunDirectory(tmp_path).put_tasks([a_task(task_id=f"played/{index}")])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, (0, 10, 20, 30)))
    assert len(load_tasks(tmp_path / "tasks.jsonl")) == 50


def test_what_would_refuse_an_episode_is_found_out_before(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.open_journal() as journal:
        # However long another run holds it.
        run.expect(a_task())
        run_id = journal.run_id
    with pytest.raises(ConfigError, match="another task 'played/one'"):
        run.expect(a_task(prompt="another of the same name"))
    assert run_of(tmp_path / "run" / "episodes.jsonl") == run_id
    assert run_of(tmp_path / "absent.jsonl") is None
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "episodes.jsonl").write_text('{"a": 1}\n')
    for name in ("file", "file/deeper", "other"):
        with pytest.raises(ConfigError):
            RunDirectory(tmp_path / name).expect(a_task())


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
