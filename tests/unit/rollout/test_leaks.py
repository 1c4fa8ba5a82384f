"""Worlds with and without the answer in them."""

from __future__ import annotations

import shutil
import subprocess
import zlib
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reward.played import PlayedStart

from worldfork.content.merged import MergedView
from worldfork.content.stack import Node
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.task import Task
from worldfork.rollout.leaks import scanning
from worldfork.rollout.leaks.scanning import Leak, Scan
from worldfork.rollout.leaks.secrets import Secrets, secrets_of

START = b"def middle(values):\n    raise NotImplementedError\n"
ANSWER = b"""\
def middle(values):
    ordered_by_size = sorted(values)
    half_of_the_length = len(ordered_by_size) // 2
    return ordered_by_size[half_of_the_length]
"""
TEST = b"""\
from answer import middle


def test_the_middle_of_three():
    assert middle([9, 1, 5]) == 5
    assert middle([1, 9, 5, 7, 3]) == 5
"""
SECRETS = Secrets(
    answer={"answer.py": ANSWER}, tests={"tests/test_middle.py": TEST}, shown=(START,), package="Middle_Values"
)


def look(world: Path, secrets: Secrets = SECRETS) -> list[Leak]:
    # A directory of this user's is a layer of the form in which it is root.
    scan = Scan(MergedView([world], "user"), secrets)
    scan.run()
    assert scan.complete
    return sorted(scan.leaks)


def put(world: Path, path: str, content: bytes) -> None:
    (world / path).parent.mkdir(parents=True, exist_ok=True)
    (world / path).write_bytes(content)


def test_a_world_of_the_starting_state_alone_leaks_nothing(tmp_path: Path) -> None:
    put(tmp_path, "workspace/answer.py", START)
    put(tmp_path, "workspace/README", b"import answer\n\nRepair it.\n")
    assert look(tmp_path) == []


def test_the_answer_in_a_file_of_another_kind_is_a_leak_though_it_may_be_edited(tmp_path: Path) -> None:
    there = {"answer.py": START, "notes/plan.md": ANSWER, "more.py": b"import sys\n"}
    start: Any = PlayedStart(task=Task("t", "", files={"answer.py": ""}, verifier={"kind": "files"}))
    start.solution, start.originals = Edits({"answer.py": EditedFile(ANSWER)}), there
    secrets = secrets_of(Task("t", "", editable=("**",), verifier={"kind": "files"}), start)
    assert b"import sys\n" in secrets.shown
    for path, content in there.items():
        put(tmp_path, f"workspace/{path}", content)
    assert {leak.path for leak in look(tmp_path, secrets)} == {"/workspace/notes/plan.md"}


@pytest.mark.parametrize(
    ("path", "content", "kind"),
    [
        ("opt/old/copy.txt", ANSWER, "answer"),
        ("root/.cache/t", TEST, "tests"),
        ("workspace/answer.py", ANSWER, "answer"),
    ],
)
def test_the_very_file_is_certain_wherever_it_lies(tmp_path: Path, path: str, content: bytes, kind: str) -> None:
    put(tmp_path, path, content)
    (leak,) = look(tmp_path)
    assert (leak.path, leak.kind, leak.certain) == (f"/{path}", kind, True)


def test_lines_of_the_answer_in_another_file(tmp_path: Path) -> None:
    patch = b"".join(b"+" + line + b"\n" for line in ANSWER.splitlines())
    put(tmp_path, "srv/notes.md", b"It was repaired thus:\n" + patch)
    (leak,) = look(tmp_path)
    assert leak.kind == "answer"
    assert not leak.certain
    assert leak.why.startswith("3 of 3 lines")


def test_a_line_or_two_in_common_is_chance(tmp_path: Path) -> None:
    put(tmp_path, "srv/sorting.py", b"    ordered_by_size = sorted(values)\n")
    assert look(tmp_path) == []


def test_what_is_shown_is_no_secret(tmp_path: Path) -> None:
    put(tmp_path, "workspace/answer.py", START)
    assert look(tmp_path, Secrets(answer={"answer.py": START}, tests={}, shown=(START,))) == []


def test_names_and_compiled_files(tmp_path: Path) -> None:
    size = len(ANSWER).to_bytes(4, "little")
    put(tmp_path, "workspace/tests/test_middle.py", b"# moved\n")
    put(tmp_path, "usr/lib/test_middle.py", b"# moved\n")
    put(tmp_path, "workspace/__pycache__/answer.cpython-311.pyc", bytes(12) + size + b"code")
    put(tmp_path, "workspace/__pycache__/test_middle.cpython-311-pytest-9.0.1.pyc", bytes(16))
    put(tmp_path, "workspace/__pycache__/other.cpython-311.pyc", bytes(12) + size)
    put(tmp_path, "workspace/answer.py.orig", b"\n")
    put(tmp_path, "workspace/.pytest_cache/v/cache/nodeids", b"[]")
    found = {leak.path: leak.kind for leak in look(tmp_path)}
    assert set(found.values()) == {"trace"}
    assert set(found) == {
        "/usr/lib/test_middle.py",
        "/workspace/.pytest_cache",
        "/workspace/__pycache__/answer.cpython-311.pyc",
        "/workspace/__pycache__/test_middle.cpython-311-pytest-9.0.1.pyc",
        "/workspace/answer.py.orig",
        "/workspace/tests/test_middle.py",
    }


def test_another_version_of_the_package(tmp_path: Path) -> None:
    put(tmp_path, "usr/lib/python3/site-packages/middle_values-2.0.dist-info/METADATA", b"")
    put(tmp_path, "root/middle.values-2.1-py3-none-any.whl", b"")
    put(tmp_path, "root/middle_values_extra-1.0.whl", b"")
    put(tmp_path, "root/.cache/pip/http/1", b"")
    assert [(leak.path, leak.kind) for leak in look(tmp_path)] == [
        ("/root/.cache/pip", "trace"),
        ("/root/middle.values-2.1-py3-none-any.whl", "package"),
        ("/usr/lib/python3/site-packages/middle_values-2.0.dist-info", "package"),
    ]


def test_a_package_of_the_machine_that_every_sandbox_sees(tmp_path: Path) -> None:
    put(tmp_path, "usr/lib/python3.11/site-packages/middle_values-2.0.dist-info/METADATA", b"")
    put(tmp_path, "usr/lib/python3.11/site-packages/other-2.0.dist-info/METADATA", b"")
    (tmp_path / "layer").mkdir()
    scan = Scan(MergedView([tmp_path / "layer"], "user"), SECRETS)
    scan.shown([(str(tmp_path / "usr"), "/usr")])
    assert [leak.path for leak in scan.leaks] == ["/usr/lib/python3.11/site-packages/middle_values-2.0.dist-info"]


def git(where: Path, *arguments: str) -> None:
    program = shutil.which("git")
    if program is None:
        pytest.skip("there is no git")
    subprocess.run(
        [program, "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", *arguments],
        cwd=where, check=True, capture_output=True, env={"HOME": str(where), "GIT_CONFIG_NOSYSTEM": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_history_holds_the_answer(tmp_path: Path, packed: bool) -> None:
    work = tmp_path / "workspace"
    put(tmp_path, "workspace/answer.py", START)
    git(work, "init")
    git(work, "add", ".")
    git(work, "commit", "-m", "start")
    put(tmp_path, "workspace/answer.py", ANSWER)
    git(work, "commit", "-am", "repaired")
    git(work, "tag", "repaired")
    git(work, "reset", "--hard", "HEAD~1")
    if packed:
        git(work, "gc", "--aggressive")
    leaks = look(tmp_path)
    (certain,) = [leak for leak in leaks if leak.certain]
    assert certain.path == "/workspace/.git"
    assert certain.kind == "answer"
    assert "answer.py" in certain.why
    told = " ".join(leak.why for leak in leaks if leak.kind == "history")
    assert "refs/tags/repaired" in told
    assert "logs" in told
    assert "ORIG_HEAD" in told


def test_a_repository_without_the_answer_has_no_certain_leak(tmp_path: Path) -> None:
    put(tmp_path, "workspace/answer.py", START)
    git(tmp_path / "workspace", "init")
    git(tmp_path / "workspace", "add", ".")
    git(tmp_path / "workspace", "commit", "-m", "start")
    git(tmp_path / "workspace", "gc")
    leaks = look(tmp_path)
    assert leaks
    assert not any(leak.certain for leak in leaks)
    assert {leak.kind for leak in leaks} == {"history"}


def test_a_loose_object_without_a_commit(tmp_path: Path) -> None:
    data = b"blob %d\0" % len(ANSWER) + ANSWER
    name = sha1(data, usedforsecurity=False).hexdigest()
    put(tmp_path, "mirror.git/HEAD", b"ref: refs/heads/main\n")
    (tmp_path / "mirror.git/refs").mkdir()
    put(tmp_path, f"mirror.git/objects/{name[:2]}/{name[2:]}", zlib.compress(data))
    assert [(leak.path, leak.kind) for leak in look(tmp_path) if leak.certain] == [("/mirror.git", "answer")]


@pytest.mark.parametrize("index", [b"", b"\xfftOc\0\0\0\x02", b"\xfftOc\0\0\0\x02" + b"\xff" * 1024, bytes(5000)])
def test_a_damaged_index_says_nothing(tmp_path: Path, index: bytes) -> None:
    put(tmp_path, "mirror.git/HEAD", b"")
    (tmp_path / "mirror.git/refs").mkdir()
    put(tmp_path, "mirror.git/objects/pack/pack-1.idx", index)
    assert not any(leak.certain for leak in look(tmp_path))


def test_repositories_within_each_other_cost_each_entry_once(tmp_path: Path) -> None:
    depth = 30
    for level in range(depth):
        top = "/".join(["r.git"] * (level + 1))
        put(tmp_path, f"{top}/HEAD", b"")
        (tmp_path / top / "refs").mkdir()
        (tmp_path / top / "objects").mkdir()
    listed = 0

    class Counted(MergedView):
        def children(self, node: Node) -> Iterator[Node]:
            nonlocal listed
            listed += 1
            return iter(super().children(node))

    Scan(Counted([tmp_path], "user"), SECRETS).run()
    assert listed < depth * 3 * 5


def test_a_repository_counts_within_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "r.git/HEAD", b"ref: refs/heads/main\n")
    (tmp_path / "r.git/objects").mkdir()
    for number in range(20):
        put(tmp_path, f"r.git/refs/{number}", b"")
    monkeypatch.setattr(scanning, "MAX_ENTRIES", 10)
    scan = Scan(MergedView([tmp_path], "user"), SECRETS)
    scan.run()
    assert not scan.complete
    assert scan.entries < 40


def test_of_a_long_log_only_the_beginning_is_read(tmp_path: Path) -> None:
    put(tmp_path, "r.git/HEAD", b"ref: refs/heads/main\n")
    (tmp_path / "r.git/objects").mkdir()
    (tmp_path / "r.git/refs").mkdir()
    (tmp_path / "r.git/logs").mkdir()
    with (tmp_path / "r.git/logs/HEAD").open("wb") as file:
        file.write(b"one\ntwo\n")
        file.truncate(64 << 20)
    scan = Scan(MergedView([tmp_path], "user"), SECRETS)
    scan.run()
    assert any("1 logs" in leak.why for leak in scan.leaks)
    assert scan.read_bytes < 8 << 20


def test_bounds_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        put(tmp_path, f"many/{number}", ANSWER)
    monkeypatch.setattr(scanning, "MAX_LEAKS", 5)
    scan = Scan(MergedView([tmp_path], "user"), SECRETS)
    scan.run()
    assert len(scan.leaks) == 5
    assert not scan.complete
