from __future__ import annotations

from pathlib import Path

import pytest

from worldfork.records.death import LimitHits
from worldfork.sandbox import pressure
from worldfork.sandbox.pressure import HostKills, limit_hits


def group(directory: Path, **files: str) -> str:
    directory.mkdir()
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return str(directory)


@pytest.mark.parametrize(
    ("events", "wanted"),
    [
        ("low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n", LimitHits(memory=2)),
        ("max 9\noom 0\noom_kill 1\n", LimitHits(host_memory=1)),
        ("max 9\noom 1\noom_kill 3\n", LimitHits(memory=1, host_memory=2)),
        # The limit was met and something else gave way.
        ("max 9\noom 4\noom_kill 0\n", LimitHits()),
        ("", LimitHits()),
        ("oom\noom_kill -1\n\0\xff oom x", LimitHits()),
    ],
)
def test_version_2_counts_whose_memory_it_was(tmp_path: Path, events: str, wanted: LimitHits) -> None:
    made = group(tmp_path / "g", memory__events=events, pids__events="max 0\n")
    assert limit_hits([made]) == wanted


@pytest.mark.parametrize(
    ("kills", "failures", "wanted"),
    [(1, 7, LimitHits(memory=1)), (1, 0, LimitHits(host_memory=1)), (0, 7, LimitHits())],
)
def test_version_1_tells_a_limit_never_met(tmp_path: Path, kills: int, failures: int, wanted: LimitHits) -> None:
    control = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
    memory = group(tmp_path / "m", memory__oom_control=control, memory__failcnt=f"{failures}\n")
    assert limit_hits([memory]) == wanted


def test_refused_processes_are_counted(tmp_path: Path) -> None:
    groups = [group(tmp_path / "a", pids__events="max 12\n"), str(tmp_path / "gone")]
    assert limit_hits(groups) == LimitHits(pids=12)
    assert limit_hits([]) == LimitHits()


def test_kills_of_the_host_grow_old_after_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "vmstat"
    monkeypatch.setattr(pressure, "_VMSTAT", file)
    kills = HostKills()
    file.write_text("nr_free_pages 4\noom_kill 5\n")
    kills.restart()
    assert kills.lately() == 0
    file.write_text("oom_kill 7\n")
    assert kills.lately() == 2
    kills.look()
    assert kills.lately() == 2  # seen by the look, by nobody who was told of a death yet
    kills.look()
    assert kills.lately() == 0
    file.unlink()
    assert kills.lately() == 0
