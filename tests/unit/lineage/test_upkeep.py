"""Upkeep starts by itself when its process rests, and ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.stores import add_snapshot, home_at

from worldfork.core.settings import Settings
from worldfork.lineage import upkeep
from worldfork.lineage.upkeep import Upkeep, variables
from worldfork.store.store import Store

LONG_S = 60.0


def settings_at(home: Path, **more: object) -> Settings:
    return Settings(home=home, scratch=home, **more)  # type: ignore[arg-type]  # each test gives what fits


def test_the_program_seals_what_is_there_and_ends(tmp_path: Path) -> None:
    with_layers = Store.open(home_at(tmp_path))
    record = add_snapshot(with_layers)
    with_layers.make_durable(record.snapshot_id)
    process = subprocess.Popen(
        [sys.executable, "-m", "worldfork.keeping.upkeep"],
        env={**os.environ, **variables(settings_at(tmp_path))},
        stdin=subprocess.PIPE,
    )
    assert process.stdin is not None
    with process.stdin:
        assert process.wait(LONG_S) == 0
    assert with_layers.layer(record.layers[0]).digest is not None
    with_layers.close()


def test_it_starts_once_its_process_has_come_to_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_REST_S", 0.05)
    store = Store.open(home_at(tmp_path))
    record = add_snapshot(store)
    store.make_durable(record.snapshot_id)
    keeper = Upkeep(settings_at(tmp_path))
    keeper.want()
    thread = keeper._thread
    assert thread is not None
    try:
        while store.layer(record.layers[0]).digest is None:
            thread.join(0.02)
            assert thread.is_alive()
    finally:
        keeper.stop()
    assert not thread.is_alive()
    keeper.want()
    assert keeper._process is None
    store.close()


def test_off_means_off(tmp_path: Path) -> None:
    keeper = Upkeep(settings_at(tmp_path, upkeep="off"))
    keeper.want()
    assert keeper._thread is None
    keeper.stop()


def test_stopping_ends_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_REST_S", 0.0)
    store = Store.open(home_at(tmp_path))
    with store.database.write():
        # The other process waits for its turn to write, for as long as this block lasts.
        keeper = Upkeep(settings_at(tmp_path))
        keeper.want()
        thread = keeper._thread
        assert thread is not None
        while keeper._process is None:
            thread.join(0.005)
        process = keeper._process
        keeper.stop()
        assert process.returncode == -signal.SIGKILL
    store.close()


def test_it_ends_when_whoever_started_it_dies(tmp_path: Path) -> None:
    store = Store.open(home_at(tmp_path))
    with store.database.write():
        process = subprocess.Popen(
            [sys.executable, "-m", "worldfork.keeping.upkeep"],
            env={**os.environ, **variables(settings_at(tmp_path))},
            stdin=subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LONG_S) == 0
    store.close()


def test_one_process_of_a_home_at_a_time(tmp_path: Path) -> None:
    store = Store.open(home_at(tmp_path))
    with store.single_flight("upkeep"):
        process = subprocess.Popen(
            [sys.executable, "-m", "worldfork.keeping.upkeep"],
            env={**os.environ, **variables(settings_at(tmp_path))},
            stdin=subprocess.PIPE,
        )
        assert process.stdin is not None
        with process.stdin:
            assert process.wait(LONG_S) == os.EX_TEMPFAIL
    store.close()


def test_modules_of_the_working_directory_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upkeep, "_REST_S", 0.0)
    (tmp_path / "sqlite3.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    store = Store.open(home_at(tmp_path / "home"))
    record = add_snapshot(store)
    keeper = Upkeep(settings_at(tmp_path / "home"))
    keeper.want()
    thread = keeper._thread
    assert thread is not None
    while store.layer(record.layers[0]).digest is None:
        thread.join(0.02)
        assert not caplog.records
    keeper.stop()
    store.close()


def test_what_goes_wrong_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upkeep, "_REST_S", 0.0)
    (tmp_path / "home").write_text("no directory")
    keeper = Upkeep(settings_at(tmp_path / "home"))
    keeper.want()
    thread = keeper._thread
    assert thread is not None
    while not caplog.records:
        thread.join(0.02)
    keeper.stop()
    assert "upkeep of the store ended with 1" in caplog.text


def test_a_program_that_ends_at_once_seals_what_it_stored(tmp_path: Path) -> None:
    store = Store.open(home_at(tmp_path))
    record = add_snapshot(store)
    idle = Upkeep(settings_at(tmp_path))
    idle.stop()
    idle.finish(store)
    off = Upkeep(settings_at(tmp_path, upkeep="off"))
    off.want()
    off.finish(store)
    assert store.layer(record.layers[0]).digest is None
    keeper = Upkeep(settings_at(tmp_path))
    keeper.want()
    keeper.stop()
    keeper.finish(store)
    assert store.layer(record.layers[0]).digest is not None
    store.close()
