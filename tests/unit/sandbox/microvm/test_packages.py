"""What apt offers: asked on a state of its own, with fresh lists where those of the machine do not do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.unit.sandbox.microvm.apts import PlayedApt

from worldfork.core.errors import ConfigError, DriverUnavailable
from worldfork.sandbox.microvm import packages
from worldfork.sandbox.microvm.packages import Apt, Package, check_name, with_apt

LISTS = Path("/var/lib/apt/lists")


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedApt:
    return PlayedApt(tmp_path, monkeypatch)


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    """Lists as a machine has them that updated once."""
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists/a.example_Packages.lz4").touch()
    return tmp_path / "lists"


def placed(tmp_path: Path, name: str = "place") -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def test_the_machine_is_seen_but_for_what_it_does_round_installations(
    apt: PlayedApt, tmp_path: Path, lists: Path
) -> None:
    place = placed(tmp_path)
    Apt(place, lists)
    text = (place / "apt.conf").read_text()
    assert 'Acquire::http::Proxy "http://proxy.example:3128";' in text
    assert 'APT::Architecture "amd64";' in text
    assert f'Dir::State::lists "{lists}/";' in text
    assert "i386" not in text
    assert "Invoke" not in text
    assert 'Dir::Etc::parts "/dev/null";' in text
    assert apt.orders() == []


def test_what_is_offered_is_in_one_order(apt: PlayedApt, tmp_path: Path, lists: Path) -> None:
    offered = Apt(placed(tmp_path), lists).offered(["?essential", "git"])
    assert [(each.file, each.size_bytes) for each in offered] == [
        ("apt_2.6_amd64.deb", 30),
        ("base_1%3a2.0_all.deb", 100),
    ]
    assert apt.orders() == ["install -qq --print-uris ?essential git"]


def test_what_is_downloaded_is_there_or_an_error(apt: PlayedApt, tmp_path: Path, lists: Path) -> None:
    here = Apt(placed(tmp_path), lists)
    offered = here.offered(["git"])
    assert {file: path.exists() for file, path in here.fetch(offered, ["git"]).items()} == {
        "apt_2.6_amd64.deb": True,
        "base_1%3a2.0_all.deb": True,
    }
    with pytest.raises(DriverUnavailable, match="downloaded no other"):
        here.fetch([Package("http://a.example/other.deb", "other.deb", 1)], ["other"])


def test_sources_are_those_of_the_packages_and_hold_no_password(apt: PlayedApt, tmp_path: Path, lists: Path) -> None:
    here = Apt(placed(tmp_path), lists)
    assert here.sources(here.offered(["git"])) == "deb http://a.example/debian/ stable main\n"


def test_lists_of_the_machine_are_used_as_they_are(apt: PlayedApt, tmp_path: Path, lists: Path) -> None:
    assert with_apt(tmp_path / "place", lambda one: len(one.offered(["git"])), lists) == 2
    assert not [order for order in apt.orders() if order.startswith("update")]


def test_lists_that_name_what_is_gone_are_fetched_again(apt: PlayedApt, tmp_path: Path, lists: Path) -> None:
    # The first download meets files that the archive has dropped.
    gone = tmp_path / "gone"
    apt.answers(fetch=f"[ -e {gone} ] || {{ touch {gone}; echo 'E: 404 Not Found' >&2; exit 100; }}")

    def action(one: Apt) -> int:
        one.fetch([], ["git"])
        return len(one.offered(["git"]))

    assert with_apt(tmp_path / "place", action, lists) == 2
    assert [order.split(" ")[0] for order in apt.orders()] == ["install", "update", "install", "install"]


def test_a_machine_that_never_updated_fetches_lists_first(apt: PlayedApt, tmp_path: Path) -> None:
    assert with_apt(tmp_path / "place", lambda one: len(one.offered(["git"])), tmp_path / "none") == 2
    assert apt.orders()[0].startswith("update")


def test_no_network_is_told_with_apts_words(apt: PlayedApt, tmp_path: Path) -> None:
    apt.answers(update="echo 'E: Could not resolve a.example' >&2; exit 100")
    with pytest.raises(DriverUnavailable, match=r"Could not resolve a\.example") as caught:
        with_apt(tmp_path / "place", lambda one: one, tmp_path / "none")
    assert "apt-get update" in caught.value.remedy


@pytest.mark.parametrize("name", packages.PROGRAMS)
def test_a_machine_without_a_program_is_told_which(
    apt: PlayedApt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    apt.program("dpkg-deb", "")
    (apt.bin / name).unlink()
    monkeypatch.setenv("PATH", str(apt.bin))
    with pytest.raises(DriverUnavailable) as caught:
        with_apt(tmp_path / "place", lambda one: one)
    assert caught.value.fields["lacks"] == name


@pytest.mark.parametrize("name", ["-y", "git-", "a b", "", "Git", "a;b", "?essential", "../x", "g\u00e9o"])
def test_what_apt_would_read_otherwise_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError):
        check_name(name)


def test_names_of_packages_are_names() -> None:
    for name in ("g++", "libc6", "python3.11-venv", "libstdc++6"):
        assert check_name(name) == name


@pytest.mark.skipif(
    bool(packages.missing_program()) or not any(LISTS.glob("*_Packages*")), reason="this machine has no lists of apt"
)
def test_the_real_apt_names_a_whole_debian_and_touches_nothing(tmp_path: Path) -> None:
    before = Path("/var/lib/dpkg/status").stat().st_mtime_ns
    here = Apt(placed(tmp_path))
    names = {each.file.partition("_")[0] for each in here.offered(["?essential"])}
    assert {"bash", "coreutils", "dpkg", "libc6"} <= names
    assert here.sources(here.offered(["?essential"])).startswith("deb ")
    assert Path("/var/lib/dpkg/status").stat().st_mtime_ns == before
    shutil.rmtree(tmp_path / "place")
