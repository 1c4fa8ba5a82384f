"""Runs on disk, as the harness leaves them, made by hand."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.unit.reward.played import a_task

from worldfork.content.compression import zstd
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.episode import Episode, Failure, FailureKind, Timings
from worldfork.records.task import Task
from worldfork.records.trajectory import Step, Trajectory
from worldfork.rollout.journal import Journal

BEGAN_S = 1_700_000_000.0


def an_episode(task: Task, index: int, reward: float | None, **changes: Any) -> Episode:
    failure = None if reward is not None else Failure(FailureKind.FORK, "launch_failed", "no <room> & none")
    values: dict[str, Any] = {
        "task_id": task.task_id,
        "task_hash": task.task_hash,
        "policy_id": "played-1",
        "index": index,
        "reward": reward,
        "failure": failure,
        "expected": ("t::a", "t::b"),
        "passed": ("t::a", "t::b") if reward == 1.0 else ("t::a",) if reward else (),
        "failed": () if reward in (1.0, None) else ("t::b",),
        "started_s": BEGAN_S + index,
        "timings": Timings(
            fork_s=0.01, policy_s=2.0, carry_s=0.02, calibrate_s=0.0, grade_s=1.0, total_s=3.1 + index,
            grade_cpu_s=0.8, commands_s=1.5, stop_s=0.05,
        ),
        "snapshot_id": "sn-aaaaaaaaaaaaaaaa",
        "sandbox_id": f"sb-aaaaaaaaaaaaaaa{'abcdefgh'[index % 8]}",
        "seed": 100 + index,
        "parts": {"tests": reward or 0.0},
    }  # fmt: skip
    return Episode(**{**values, **changes})


def put(directory: Path, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    path = directory / "blobs" / digest[:2] / f"{digest}.zst"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstd.compress(data))
    return digest


def left(directory: Path, content: str, *steps: Step, **facts: Any) -> dict[str, Any]:
    """Store what an episode left, and return the fields that name it."""
    edits = Edits({"a.py": EditedFile(content.encode())})
    diff = f"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-old\n+{content}\n"
    trajectory = Trajectory(steps, False, facts)
    return {
        "edits": put(directory, edits.to_bytes()),
        "diff": put(directory, diff.encode()),
        "trajectory": put(directory, json.dumps(trajectory.to_json()).encode()),
    }


def write_run(directory: Path, episodes: list[Episode], tasks: list[Task] | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    with Journal.open(directory / "episodes.jsonl") as journal:
        journal.append(episodes)
    if tasks:
        (directory / "tasks.jsonl").write_text("".join(json.dumps(task.to_json()) + "\n" for task in tasks))
    return directory


def a_run(directory: Path) -> tuple[Path, Task, Task]:
    """Two groups: one with rewards 1, 0.5, the same 0.5 again, 0 and a failure; one of zeros."""
    one = a_task(task_id="played/one", prompt="Repair <a.py>.")
    two = a_task(task_id="played/two", prompt="Repair it too.")
    steps = (
        Step("command", "cat a.py", "old", 0, "exited", 0.1, 0.2, 0.01, message="I look."),
        Step("write", "/workspace/a.py", "right", began_s=0.3, ended_s=0.3),
        Step("command", "false", "bad\n", 3, "exited", 0.4, 0.5, 0.01, 10, 5, -1.5),
        Step("note", "candidate x"),
        Step("message", "Done."),
    )
    episodes = [
        an_episode(one, 0, 0.5, **left(directory, "half")),
        an_episode(one, 1, 1.0, **left(directory, "right", *steps, model="none")),
        an_episode(one, 2, 0.5, **left(directory, "half")),
        an_episode(one, 3, 0.0, **left(directory, "wrong<script>alert(1)</script>")),
        an_episode(one, 4, None),
        *(an_episode(two, index, 0.0) for index in range(3)),
    ]
    return write_run(directory, episodes, [one, two]), one, two
