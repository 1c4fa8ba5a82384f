"""The layer that lies on a base, and what a base is."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from worldfork.core.errors import ConfigError
from worldfork.sandbox.bases import IDENTITY_PATHS, dir_base, host_base, parse_base, write_ground


def test_the_ground_of_a_host_world_has_no_secret(tmp_path: Path) -> None:
    ground = tmp_path / "ground"
    write_ground(ground, host_base())
    names = {path.name for path in (ground / "etc").rglob("*")}
    assert not {"shadow", "shadow-", "gshadow", "sudoers", "private", "ssh_host_rsa_key"} & names
    assert "passwd" in names
    for path in IDENTITY_PATHS:
        file = ground / path.lstrip("/")
        assert file.is_file()
        assert not file.is_symlink()
        assert file.read_bytes() == b""
    assert stat.S_IMODE((ground / "tmp").stat().st_mode) == 0o1777
    assert list((ground / "workspace").iterdir()) == []


def test_the_host_is_described_the_same_until_it_changes() -> None:
    assert host_base() == host_base()
    assert ("/usr", "/usr") in host_base().binds
    assert host_base().fingerprint


def test_a_base_keeps_what_it_has(tmp_path: Path) -> None:
    base = tmp_path / "root"
    (base / "etc").mkdir(parents=True)
    (base / "bin").mkdir()
    (base / "etc").chmod(0o750)
    (base / "etc/hosts").write_text("own\n")
    (base / "etc/resolv.conf").symlink_to("../run/resolv.conf")
    (base / "tmp").mkdir(mode=0o700)
    ground = tmp_path / "ground"
    write_ground(ground, dir_base(str(base)))
    assert not (ground / "etc/hosts").exists()
    assert not (ground / "tmp").exists()
    assert (ground / "etc/resolv.conf").is_file()
    assert not (ground / "etc/resolv.conf").is_symlink()
    assert stat.S_IMODE((ground / "etc").stat().st_mode) == 0o750
    assert (ground / "workspace").is_dir()


def test_nothing_is_written_through_a_link_of_a_base(tmp_path: Path) -> None:
    base = tmp_path / "root"
    outside = tmp_path / "outside"
    outside.mkdir()
    (base / "bin").mkdir(parents=True)
    (base / "etc").symlink_to(outside)
    ground = tmp_path / "ground"
    write_ground(ground, dir_base(str(base)))
    assert list(outside.iterdir()) == []
    assert not (ground / "etc").exists()


@pytest.mark.parametrize("text", ["", "ubuntu", "dir:relative", "dir:/does/not/exist", "dir:/", "dir:/proc/self"])
def test_what_is_no_base_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_base(text)
