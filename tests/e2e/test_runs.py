"""From a group of rollouts to its report and its data, through the directory that the run leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from worldfork.rollout.demo_task import demo_candidates, demo_task
from worldfork.rollout.exporting import chat_rows, episode_rows, pair_rows
from worldfork.rollout.group import run_group
from worldfork.rollout.policies import CandidatesPolicy, MutatePolicy
from worldfork.rollout.report import write_report
from worldfork.rollout.stored import StoredRun

pytestmark = pytest.mark.filterwarnings("ignore:no cgroup of this host:RuntimeWarning")


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    task, policy = demo_task(), CandidatesPolicy(demo_candidates())
    group = asyncio.run(run_group(task, policy, 3, run=tmp_path / "run"))
    run = StoredRun(tmp_path / "run")
    assert [each.rewards for each in run.groups] == [group.rewards]
    rows = list(episode_rows(run))
    for row, files in zip(rows, list(demo_candidates().values())[:3], strict=True):
        wrote = {step["action"]: step["output"] for step in row["steps"] if step["kind"] == "write"}
        assert wrote == {f"/workspace/{path}": text for path, text in files.items()}
        changed = any(task.files.get(path) != text for path, text in files.items())
        assert bool(row["diff"]) == changed
        assert row["prompt"] == task.prompt
        stages = ("fork_s", "policy_s", "carry_s", "calibrate_s", "grade_s")
        assert 0 < sum(row[name] for name in stages) <= row["total_s"]
    assert len(list(chat_rows(run))) == 3
    for pair in pair_rows(run):
        assert pair["score_chosen"] > pair["score_rejected"]
    figures = write_report(run, tmp_path / "report.html")
    assert (figures.ran_n, figures.failed_n) == (3, 0)
    assert task.task_id in (tmp_path / "report.html").read_text()


def test_the_same_seed_leaves_the_same_answers(tmp_path: Path) -> None:
    task = demo_task()
    answers = []
    for name in ("one", "two"):
        asyncio.run(run_group(task, MutatePolicy(5), 3, run=tmp_path / name, seeds="independent"))
        run = StoredRun(tmp_path / name)
        answers.append([(each.index, each.edits, each.reward) for each in run.episodes])
    assert sorted(answers[0]) == sorted(answers[1])
    assert len({edits for _, edits, _ in answers[0]}) == 3
