"""What is asked of files where the answer cannot be told, and expressions that are looked for under limits."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worldfork.content.merged import MergedView
from worldfork.core.errors import PathError, VerifierError
from worldfork.keeping.browse import Browsed
from worldfork.records.episode import FailureKind
from worldfork.reward import assertions, contents, matching
from worldfork.reward.assertions import FilesSpec, check_files, text_of
from worldfork.reward.matching import matches


def browsed(top: Path, *mounted: str) -> Browsed:
    record: Any = SimpleNamespace(
        snapshot_id="sn-one", form="user", base={"kind": "host", "binds": [(each, each) for each in mounted]}
    )
    return Browsed(record, MergedView([top], "user"))


def failures(seen: Any, **check: Any) -> list[str]:
    why, _ = check_files(seen, FilesSpec.from_json([check]))
    return list(why.values())


def test_what_is_hidden_is_not_absent(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "loop").symlink_to("loop")

    class Closed:
        def __init__(self, number: int) -> None:
            self.number = number

        def expect_stored(self, path: str) -> None:
            pass

        def node(self, path: str, *, follow: bool) -> None:
            raise PathError("no", path=path, errno=self.number)

    for number, absent in ((errno.ENOENT, True), (errno.ENOTDIR, True), (errno.EACCES, False), (errno.ELOOP, False)):
        assert (failures(Closed(number), path="secret/x", absent=True) == []) is absent
        assert failures(Closed(number), path="secret/x")
    assert failures(browsed(tmp_path), path="/secret/x", absent=True) == []
    assert failures(browsed(tmp_path), path="/loop/x", absent=True)


def test_a_file_is_read_once_however_much_is_asked_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    inner = MergedView.read

    def counted(self: MergedView, node: Any) -> Any:
        read.append(node.path)
        return inner(self, node)

    monkeypatch.setattr(MergedView, "read", counted)
    for name in "ab":
        (tmp_path / name).write_text(f'{{"name": "{name}"}}')
    checks: list[dict[str, Any]] = [
        {"path": f"/{name}", **asked}
        for asked in ({"contains": "name"}, {"json": {"/name": "a"}}, {"equals": ""}, {"sha256": "0" * 64})
        for name in "ab"
    ]
    why, _ = check_files(browsed(tmp_path), FilesSpec.from_json(checks))
    assert (read, len(why)) == (["a", "b"], 5)
    assert why["/b: json"] == "has another /name"


def test_files_are_not_read_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MAX_READ_BYTES", 25)
    for name in "abc":
        (tmp_path / name).write_text("x" * 10)
    checks = [{"path": f"/{name}", "contains": "x"} for name in "abcab"]
    why, _ = check_files(browsed(tmp_path), FilesSpec.from_json(checks))
    assert list(why) == ["/c: contains"]
    assert "all files together" in why["/c: contains"]


def test_what_a_policy_leads_out_of_its_own_files_is_not_absent_and_not_there(tmp_path: Path) -> None:
    (tmp_path / "usr").mkdir()
    (tmp_path / "out").symlink_to("/usr")
    for absent in (True, False):
        assert failures(browsed(tmp_path, "/usr"), path="/out/x", absent=absent)


@pytest.mark.parametrize("path", ["/usr/bin/x", "/workspace/../usr"])
def test_a_path_that_no_state_holds_is_the_tasks_fault(tmp_path: Path, path: str) -> None:
    with pytest.raises(VerifierError) as raised:
        failures(browsed(tmp_path, "/usr"), path=path, absent=True)
    assert raised.value.fields["kind"] is FailureKind.CALIBRATION


def test_the_text_to_look_in_is_read_when_it_is_its_turn(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    spec = FilesSpec.from_json(
        [{"path": "/a", "matches": "^two$"}, {"path": "/a", "contains": "three", "matches": "."}]
    )
    why, pending = check_files(browsed(tmp_path), spec)
    assert (len(why), pending) == (1, [spec.checks[0]])
    assert text_of(browsed(tmp_path), pending[0]) == "one\ntwo\n"


def look_for(pattern: str, text: str) -> bool:
    return asyncio.run(matches(pattern, text))


def test_an_expression_is_found_or_not() -> None:
    assert look_for("^zwei ü\0$", "eins\nzwei ü\0\n")
    assert not look_for("^zwei$", "eins zwei")


def test_a_search_without_an_end_is_the_texts_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = matching._MATCH_PROGRAM.replace("RLIMIT_CPU, (5, 6)", "RLIMIT_CPU, (1, 2)")
    monkeypatch.setattr(matching, "_MATCH_PROGRAM", shorter)
    assert not look_for("(([a-z]| )+)+#", "line one " * 20)


@contextmanager
def program(monkeypatch: pytest.MonkeyPatch, text: str) -> Iterator[None]:
    monkeypatch.setattr(matching, "_MATCH_PROGRAM", text)
    with pytest.raises(VerifierError) as raised:
        yield
    monkeypatch.undo()
    kinds = {"kill": FailureKind.MEMORY, "sleep": FailureKind.OVERLOAD, "no_such": FailureKind.GRADING}
    assert raised.value.fields["kind"] is next(kind for word, kind in kinds.items() if word in text)


def test_a_search_that_the_machine_ended_says_nothing_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with program(monkeypatch, "import os; os.kill(os.getpid(), 9)"):
        look_for("a", "a")
    with program(monkeypatch, "import no_such_module"):
        look_for("a", "a")
    monkeypatch.setattr(matching, "_MATCH_WALL_S", 0.2)
    with program(monkeypatch, "import time; time.sleep(60)"):
        look_for("a", "a")


def test_json_that_would_take_much_memory_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.json").write_text('{"x": [' + "[]," * 1000 + "0]}")
    asked = {"path": "/out.json", "json": {"/x/0": []}}
    assert failures(browsed(tmp_path), **asked) == []
    monkeypatch.setattr(assertions, "MAX_JSON_BYTES", 1000)
    assert "larger" in failures(browsed(tmp_path), **asked)[0]
    assert failures(browsed(tmp_path), path="/out.json", contains="[]") == []
