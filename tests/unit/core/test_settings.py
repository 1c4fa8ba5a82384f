from __future__ import annotations

import os
from pathlib import Path

import pytest

from worldfork.core.errors import ConfigError
from worldfork.core.settings import DEFAULT_RESERVE_BYTES, Settings, load_settings


def test_defaults_of_an_ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert load_settings({"HOME": "/home/ann"}) == Settings(home=Path("/home/ann/.local/share/worldfork"))
    assert load_settings({"HOME": "/home/ann", "XDG_DATA_HOME": "/data"}).home == Path("/data/worldfork")
    assert load_settings({"HOME": "/home/ann", "XDG_DATA_HOME": "data"}).home == Path(
        "/home/ann/.local/share/worldfork"
    )


def test_a_user_without_any_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    with pytest.raises(ConfigError, match="WORLDFORK_HOME"):
        load_settings({})


def test_root_lives_in_var_lib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert load_settings({"HOME": "/root", "XDG_DATA_HOME": "/data"}).home == Path("/var/lib/worldfork")


def test_everything_can_be_named() -> None:
    assert load_settings(
        {
            "WORLDFORK_HOME": "/h",
            "WORLDFORK_SCRATCH": "/s",
            "WORLDFORK_FORM": "user",
            "WORLDFORK_OVERLAY": "legacy",
            "WORLDFORK_CGROUPS": "off",
            "WORLDFORK_RESERVE_BYTES": "0",
            "WORLDFORK_DRIVER": "microvm",
            "WORLDFORK_ALLOW_TCG": "1",
            "WORLDFORK_BASE": "dir:/base",
        }
    ) == Settings(
        Path("/h"), Path("/s"), "user", "legacy", "off", 0, driver="microvm", base="dir:/base", allow_tcg=True
    )


EMPTY = (
    "WORLDFORK_FORM",
    "WORLDFORK_SCRATCH",
    "WORLDFORK_RESERVE_BYTES",
    "WORLDFORK_DRIVER",
    "WORLDFORK_ALLOW_TCG",
    "WORLDFORK_BASE",
)


def test_empty_is_unset() -> None:
    empty = dict.fromkeys(EMPTY, "")
    settings = load_settings({"WORLDFORK_HOME": "/h", **empty})
    assert settings == Settings(Path("/h"), reserve_bytes=DEFAULT_RESERVE_BYTES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLDFORK_HOME", "relative"),
        ("WORLDFORK_HOME", "/a\0b"),
        ("WORLDFORK_SCRATCH", "relative"),
        ("WORLDFORK_FORM", "root"),
        ("WORLDFORK_OVERLAY", "fuse"),
        ("WORLDFORK_CGROUPS", "on"),
        ("WORLDFORK_ID_RANGE", "on"),
        ("WORLDFORK_DRIVER", "docker"),
        ("WORLDFORK_ALLOW_TCG", "yes"),
        ("WORLDFORK_RESERVE_BYTES", "-1"),
        ("WORLDFORK_RESERVE_BYTES", "1 GiB"),
        ("WORLDFORK_RESERVE_BYTES", "\u0661"),
    ],
)
def test_nonsense_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_settings({"WORLDFORK_HOME": "/h", name: value})


def test_consent_to_interpreted_machines_is_taken_back_by_zero() -> None:
    assert not load_settings({"WORLDFORK_HOME": "/h", "WORLDFORK_ALLOW_TCG": "0"}).allow_tcg


def test_the_process_is_read_at_call_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDFORK_HOME", "/first")
    assert load_settings().home == Path("/first")
    monkeypatch.setenv("WORLDFORK_HOME", "/second")
    assert load_settings().home == Path("/second")
