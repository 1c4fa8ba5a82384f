from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worldfork.core.errors import ConfigError, Corrupt, FormatUnsupported, Locked
from worldfork.records.episode import Episode, Failure, FailureKind
from worldfork.rollout import journal as journals
from worldfork.rollout.journal import Journal, read_journal


def episode(index: int, *, failed: bool = False) -> Episode:
    return Episode(
        task_id="set/one",
        task_hash="ab" * 32,
        policy_id="nop",
        index=index,
        reward=None if failed else 0.5,
        failure=Failure(FailureKind.FORK, "launch_failed", "") if failed else None,
        expected=("t::ä", "t::b"),
    )


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one.jsonl"
    with Journal.open(path) as journal:
        run_id = journal.run_id
        journal.append([episode(0), episode(1)])
        journal.append([])
        journal.append([episode(2)])
        assert list(journal.episodes()) == [episode(0), episode(1), episode(2)]
    with Journal.open(path) as journal:
        assert journal.run_id == run_id
        assert all(journal.is_finished(episode(index).key) for index in range(3))
        assert not journal.is_finished(episode(3).key)
    assert read_journal(path) == [episode(0), episode(1), episode(2)]


def test_a_failed_rollout_is_not_finished_and_its_last_episode_counts(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal.open(path) as journal:
        journal.append([episode(0, failed=True), episode(1)])
        assert not journal.is_finished(episode(0).key)
    with Journal.open(path) as journal:
        assert not journal.is_finished(episode(0).key)
        journal.append([episode(0)])
        assert journal.is_finished(episode(0).key)
    assert read_journal(path) == [episode(0), episode(1)]


def test_cut_off_anywhere_nothing_before_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "whole.jsonl"
    with Journal.open(path) as journal:
        journal.append([episode(0), episode(1)])
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    cut = tmp_path / "cut.jsonl"
    near_ends = {end + step for end in ends for step in (-2, -1, 0, 1)}
    for length in sorted({0, *near_ends, *range(0, len(whole), 97)} - {len(whole) + 1}):
        cut.write_bytes(whole[:length])
        kept = max(sum(end <= length for end in ends) - 1, 0)
        assert read_journal(cut) == [episode(index) for index in range(kept)]
        with Journal.open(cut) as journal:
            journal.append([episode(7)])
        assert read_journal(cut) == [*(episode(index) for index in range(kept)), episode(7)]


@pytest.mark.parametrize("tail", [b"\0" * 300, b'{"format":1,"task', b"\xff\n\0\0", b"garbage\n"])
def test_a_torn_tail_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "j.jsonl"
    with Journal.open(path) as journal:
        journal.append([episode(0)])
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert read_journal(path) == [episode(0)]
    Journal.open(path).close()
    assert path.read_bytes() == whole


def test_zeros_in_place_of_everything(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b"\0" * 4096)
    with Journal.open(path) as journal:
        journal.append([episode(0)])
    assert read_journal(path) == [episode(0)]


def test_a_bad_line_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal.open(path) as journal:
        journal.append([episode(0), episode(1)])
    lines = path.read_bytes().splitlines(keepends=True)
    broken = lines[0] + lines[1][:-9] + b"\n" + lines[2]
    path.write_bytes(broken)
    with pytest.raises(Corrupt):
        Journal.open(path)
    with pytest.raises(Corrupt):
        read_journal(path)
    assert path.read_bytes() == broken


@pytest.mark.parametrize("content", [b"hello\n", b"hello", b'{"a": 1}\n', b'{"journal": 1}\n', b"[1]\n"])
def test_some_other_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        Journal.open(path)
    assert path.read_bytes() == content


def test_a_newer_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"journal": 2, "run_id": "run-aaaaaaaaaaaaaaaa"}\n')
    with pytest.raises(FormatUnsupported):
        Journal.open(path)


def test_a_directory_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Journal.open(tmp_path)
    with pytest.raises(ConfigError):
        read_journal(tmp_path / "absent.jsonl")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal.open(path):
        with pytest.raises(Locked):
            Journal.open(path)
        code = "import sys; from worldfork.rollout.journal import Journal; Journal.open(sys.argv[1])"
        other = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
        assert "Locked" in other.stderr
    Journal.open(path).close()


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.jsonl"

    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    with Journal.open(path) as journal:
        journal.append([episode(0)])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", full)
            with pytest.raises(OSError, match="No space"):
                journal.append([episode(1)])
        assert not journal.is_finished(episode(1).key)
        journal.append([episode(2)])
    assert read_journal(path) == [episode(0), episode(2)]


def test_who_adds_reads_head_and_tail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.jsonl"
    monkeypatch.setattr(journals, "_TAIL_BYTES", 7)
    with Journal.open(path, to_add=True) as journal:
        run_id = journal.run_id
    with Journal.open(path, to_add=True) as journal:
        journal.append([episode(0)])
    monkeypatch.setattr(journals, "_recover", None)
    for index in (1, 2):
        with Journal.open(path, to_add=True) as journal:
            assert journal.run_id == run_id
            journal.append([episode(index)])
            with pytest.raises(Locked):
                Journal.open(path, to_add=True)
    assert read_journal(path) == [episode(0), episode(1), episode(2)]


@pytest.mark.parametrize("tail", [b"\0" * 300, b'{"format":1,"task', b"\0\0\0\0ask\n", b"garbage\n"])
def test_who_adds_cuts_a_torn_tail_off(tail: bytes, tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal.open(path) as journal:
        journal.append([episode(0)])
    with path.open("ab") as file:
        file.write(tail)
    with Journal.open(path, to_add=True) as journal:
        journal.append([episode(1)])
    assert read_journal(path) == [episode(0), episode(1)]


@pytest.mark.parametrize("text", [b"a,b\n1,2\n", b'{"format":1}\n', b"[]\n"])
def test_nothing_is_added_to_what_is_no_journal(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(text)
    with pytest.raises(ConfigError):
        Journal.open(path, to_add=True)
    assert path.read_bytes() == text


@pytest.mark.parametrize("closes", [True, False])
def test_a_child_that_was_forked_meanwhile_neither_keeps_nor_frees_a_lock(tmp_path: Path, closes: bool) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal.open(path)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(done[1])
        if closes:
            journal.close()
        os.write(ready[1], b".")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        with pytest.raises(Locked):
            Journal.open(path)
        journal.close()
        Journal.open(path).close()
    finally:
        for end in (*ready, *done):
            os.close(end)
        os.waitpid(child, 0)


def test_a_journal_that_is_opened_again_is_read_from_where_it_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, parsed, parse = tmp_path / "journal.jsonl", list[bytes](), journals._parse

    def count(line: bytes) -> dict[str, Any] | None:
        parsed.append(line)
        return parse(line)

    with Journal.open(path) as journal:
        journal.append([episode(0), episode(1, failed=True)])
    with Journal.open(path, to_add=True) as journal:
        journal.append([episode(1), episode(2, failed=True)])
    monkeypatch.setattr(journals, "_parse", count)
    with Journal.open(path) as journal:
        assert len(parsed) == 2
        journal.append([episode(0, failed=True)])
        keys = [episode(index).key for index in (2, 0, 7, 1)]
        assert [journal.is_finished(key) for key in keys] == [False, False, False, True]
        assert list(journal.episodes_of(keys)) == [episode(2, failed=True), episode(0, failed=True), episode(1)]
    # Another file at the same place, even one written into the same inode.
    run_id = journals.run_of(path)
    for data in (path.read_bytes().replace(b"nop", b"top"), b""):
        path.write_bytes(data)
        with Journal.open(path) as journal:
            assert not journal.is_finished(episode(1).key)
            assert (journal.run_id == run_id) == bool(data)
