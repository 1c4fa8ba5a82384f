from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reward.played import a_task
from tests.unit.rollout.runs import a_run, an_episode, left, put, write_run

from worldfork.content.compression import zstd
from worldfork.core.errors import ConfigError, Corrupt
from worldfork.records.trajectory import HARNESS, Step
from worldfork.rollout.exporting import chat_rows, episode_rows, pair_rows, write_rows
from worldfork.rollout.stored import StoredRun


def indices(rows: Any) -> list[tuple[str, int]]:
    return [(row["task_id"][-3:], row["index"]) for row in rows]


def test_rows_have_the_same_columns_and_what_the_episode_left(tmp_path: Path) -> None:
    run = StoredRun(a_run(tmp_path / "run")[0])
    rows = list(episode_rows(run))
    assert indices(rows) == [("one", i) for i in range(5)] + [("two", i) for i in range(3)]
    assert len({tuple(row) for row in rows}) == 1
    best = rows[1]
    assert (best["reward"], best["correct"], best["valid"], best["advantage"]) == (1.0, True, True, 0.5)
    assert best["diff"].endswith("+right\n")
    assert best["steps"][2]["log_probability"] == -1.5
    assert json.loads(best["facts"]) == {"model": "none"}
    assert best["prompt"] == "Repair <a.py>."
    failed = rows[4]
    assert (failed["reward"], failed["valid"], failed["advantage"], failed["failure_kind"]) == (
        None,
        False,
        None,
        "fork",
    )
    assert [row["advantage"] for row in rows[5:]] == [0.0, 0.0, 0.0]


def test_selections(tmp_path: Path) -> None:
    run = StoredRun(a_run(tmp_path / "run")[0])
    assert indices(episode_rows(run, select="best")) == [("one", 1), ("two", 0)]
    assert indices(episode_rows(run, select="correct")) == [("one", 1)]
    assert ("one", 4) not in indices(episode_rows(run, select="scored"))
    assert indices(episode_rows(run, select="scored", dedupe=True))[:3] == [("one", 0), ("one", 1), ("one", 3)]
    with pytest.raises(ConfigError):
        list(episode_rows(run, select="worst"))


def test_the_same_files_with_a_better_reward_are_kept(tmp_path: Path) -> None:
    """A flaky test may score one answer in two ways; the kept one must not depend on which ended first."""
    _, one, _ = a_run(tmp_path / "other")
    digest = put(tmp_path / "run", b"x")
    episodes = [an_episode(one, index, reward, edits=digest) for index, reward in enumerate((0.5, 1.0, None))]
    run = StoredRun(write_run(tmp_path / "run", episodes))
    assert indices(episode_rows(run, dedupe=True)) == [("one", 1)]


def test_conversations(tmp_path: Path) -> None:
    run = StoredRun(a_run(tmp_path / "run")[0])
    best, plain = chat_rows(run, select="best")
    prompt, look, seen, write, wrote, fails, failed, done = best["messages"]
    assert prompt == {"role": "user", "content": "Repair <a.py>."}
    assert (look["content"], look["tool_calls"][0]["function"]["name"]) == ("I look.", "sh")
    assert json.loads(look["tool_calls"][0]["function"]["arguments"]) == {"line": "cat a.py"}
    assert (seen["role"], seen["content"], seen["tool_call_id"]) == ("tool", "old", look["tool_calls"][0]["id"])
    assert json.loads(write["tool_calls"][0]["function"]["arguments"]) == {
        "path": "/workspace/a.py",
        "content": "right",
    }
    assert wrote["content"] == ""
    assert fails["tool_calls"][0]["function"]["name"] == "sh"
    assert failed["content"] == "bad\n[exit code 3]"
    assert done == {"role": "assistant", "content": "Done."}
    assert [message["role"] for message in plain["messages"]] == ["user", "assistant"]
    names = [tool["function"]["name"] for tool in json.loads(best["tools"])]
    assert {"sh", "write_file"} <= set(names)


def test_acts_of_the_harness_are_no_answer(tmp_path: Path) -> None:
    task = a_task()
    steps = (
        Step("write", "/tmp/worldfork-prompt.md", "Do it.", actor=HARNESS),
        Step("command", "exec agent", "I am done.", 0, "exited", actor=HARNESS),
    )
    mixed = (*steps, Step("command", "ls", "a.py", 0, "exited"))
    episodes = [
        an_episode(task, 0, 1.0, **left(tmp_path, "right", *steps)),
        an_episode(task, 1, 0.0, **left(tmp_path, "wrong", *mixed)),
    ]
    run = StoredRun(write_run(tmp_path, episodes, [task]))
    alone, seen = chat_rows(run)
    assert [message["role"] for message in alone["messages"]] == ["user", "assistant"]
    assert alone["messages"][1]["content"].startswith("```diff")
    assert [call["function"]["arguments"] for call in seen["messages"][1]["tool_calls"]] == ['{"line": "ls"}']
    assert len(seen["messages"]) == 3
    assert [step["actor"] for step in next(episode_rows(run))["steps"]] == ["harness", "harness"]


def test_an_episode_without_steps_answers_with_its_diff(tmp_path: Path) -> None:
    run = StoredRun(a_run(tmp_path / "run")[0])
    row = next(row for row in chat_rows(run) if row["index"] == 3)
    assert row["messages"][1]["content"].startswith("```diff\n--- a/a.py")


def test_a_prompt_that_is_not_known_is_told(tmp_path: Path) -> None:
    directory, one, two = a_run(tmp_path / "run")
    (directory / "tasks.jsonl").unlink()
    with pytest.raises(ConfigError, match="--tasks"):
        list(chat_rows(StoredRun(directory)))
    assert len(list(chat_rows(StoredRun(directory, [one, two])))) == 8
    assert next(episode_rows(StoredRun(directory)))["prompt"] is None


def test_pairs_are_of_different_rewards_and_different_answers(tmp_path: Path) -> None:
    run = StoredRun(a_run(tmp_path / "run")[0])
    pairs = list(pair_rows(run, most=5))
    assert [(pair["index_chosen"], pair["index_rejected"]) for pair in pairs] == [(1, 3)]
    assert pairs[0]["prompt"] == [{"role": "user", "content": "Repair <a.py>."}]
    assert pairs[0]["chosen"][0]["role"] == "assistant"
    assert (pairs[0]["score_chosen"], pairs[0]["score_rejected"]) == (1.0, 0.0)
    assert list(pair_rows(run, most=5, margin=1.01)) == []


def test_files_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    run = StoredRun(a_run(tmp_path / "run")[0])
    target = tmp_path / "rows.jsonl"
    assert write_rows(episode_rows(run), target) == 8
    assert [json.loads(line)["index"] for line in target.read_text().splitlines()][:3] == [0, 1, 2]
    before = target.read_bytes()

    def broken() -> Any:
        yield {"a": 1}
        raise Corrupt("no", expected=1, actual=2)

    with pytest.raises(Corrupt):
        write_rows(broken(), target)
    assert target.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["rows.jsonl", "run"]
    with pytest.raises(ConfigError):
        write_rows([], tmp_path / "absent" / "rows.jsonl")
    with pytest.raises(ConfigError):
        write_rows([], target, "csv")


def test_what_is_no_run_and_what_is_damaged(tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError):
            StoredRun(wrong)
    directory, _, _ = a_run(tmp_path / "run")
    run = StoredRun(directory / "episodes.jsonl")
    episode = run.episodes[1]
    assert run.run_id.startswith("run-")
    path = directory / "blobs" / str(episode.diff)[:2] / f"{episode.diff}.zst"
    whole = path.read_bytes()
    for damage in (whole[: len(whole) // 2], b"plain", b""):
        path.write_bytes(damage)
        with pytest.raises(Corrupt):
            run.diff(episode)
    path.unlink()
    assert run.diff(episode) is None
    assert run.diff(dataclasses.replace(episode, diff="../../etc/passwd")) is None


def test_a_piece_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worldfork.rollout.stored.MAX_BLOB_BYTES", 1000)
    directory, _, _ = a_run(tmp_path / "run")
    run = StoredRun(directory)
    episode = run.episodes[0]
    (directory / "blobs" / str(episode.diff)[:2] / f"{episode.diff}.zst").write_bytes(zstd.compress(b"x" * 2000))
    with pytest.raises(Corrupt):
        run.diff(episode)


def test_parquet_opens_as_a_table(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `data` is not installed")
    run = StoredRun(a_run(tmp_path / "run")[0])
    target = tmp_path / "rows.parquet"
    for rows in (episode_rows(run), chat_rows(run), pair_rows(run)):
        expected = list(rows)
        assert write_rows(iter(expected), target, "parquet") == len(expected)
        found = parquet.read_table(target).to_pylist()
        assert [set(row) for row in found] == [set(row) for row in expected]
        assert [row["task_id"] for row in found] == [row["task_id"] for row in expected]
    write_rows(episode_rows(run), target, "parquet")
    assert parquet.read_table(target).to_pylist() == list(episode_rows(run))
    assert write_rows([], target, "parquet") == 0
    assert parquet.read_table(target).num_rows == 0


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("worldfork.rollout.exporting.importlib.import_module", absent)
    with pytest.raises(ConfigError, match="data"):
        write_rows([], tmp_path / "rows.parquet", "parquet")
    assert list(tmp_path.iterdir()) == []
