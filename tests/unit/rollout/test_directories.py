"""Tasks written by hand, a directory each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worldfork.core.errors import ConfigError
from worldfork.rollout.directories import directory_task
from worldfork.rollout.loading import load_tasks

HEAD = """
editable = ["a.py"]
test_args = ["test_a.py"]

[limits]
grade_cpu_s = 5
"""


def write(top: Path, head: str = HEAD) -> Path:
    files = {
        "task.toml": head,
        "prompt.md": "Mend `a`.\n",
        "files/a.py": "wrong\n",
        "files/pkg/__pycache__/b.pyc": "left by a tool",
        "tests/test_a.py": "test\n",
        "solution/a.py": "right\n",
    }
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    return top


def test_a_directory_is_a_task(tmp_path: Path) -> None:
    task = directory_task(write(tmp_path / "one"))
    assert (task.task_id, task.prompt) == ("one", "Mend `a`.\n")
    assert dict(task.files) == {"a.py": "wrong\n"}
    assert dict(task.hidden_tests) == {"test_a.py": "test\n"}
    assert dict(task.solution) == {"a.py": "right\n"}
    assert task.limits.grade_cpu_s == 5


def test_a_directory_of_directories_is_a_set(tmp_path: Path) -> None:
    for name in ("two", "one"):
        write(tmp_path / name)
    (tmp_path / "not-a-task").mkdir()
    assert [task.task_id for task in load_tasks(tmp_path)] == ["one", "two"]
    assert [task.task_id for task in load_tasks(tmp_path / "two")] == ["two"]


def test_json_will_do_for_a_head_and_its_fields_win(tmp_path: Path) -> None:
    write(tmp_path / "one")
    (tmp_path / "one/task.toml").unlink()
    (tmp_path / "one/task.json").write_text(
        json.dumps({"task_id": "set/x", "prompt": "other", "editable": ["a.py"], "files": {}})
    )
    task = directory_task(tmp_path / "one")
    assert (task.task_id, task.prompt, dict(task.files)) == ("set/x", "other", {})


def test_a_task_id_that_comes_twice_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, 'task_id = "same"\n' + HEAD)
    with pytest.raises(ConfigError, match="already"):
        load_tasks(tmp_path)


@pytest.mark.parametrize("what", ["link", "linked directory", "binary", "two heads", "bad toml", "no task", "fifo"])
def test_what_is_no_task_is_refused(tmp_path: Path, what: str) -> None:
    import os

    top = write(tmp_path / "one")
    if what == "link":
        (top / "files/link").symlink_to("/etc/hostname")
    elif what == "linked directory":
        (top / "tests/link").symlink_to("/etc")
    elif what == "binary":
        (top / "files/b.bin").write_bytes(b"\xff\x00")
    elif what == "two heads":
        (top / "task.json").write_text("{}")
    elif what == "bad toml":
        (top / "task.toml").write_text("= 3")
    elif what == "fifo":
        os.mkfifo(top / "files/pipe")
    else:
        (top / "task.toml").unlink()
    with pytest.raises(ConfigError) as caught:
        load_tasks(tmp_path)
    assert caught.value.fields["path"].startswith(str(tmp_path))
