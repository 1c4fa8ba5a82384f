from __future__ import annotations

import os
from pathlib import Path

import pytest

from worldfork.core.errors import ConfigError
from worldfork.lineage import mounts
from worldfork.lineage.arguments import start_options
from worldfork.lineage.mounts import MAX_MOUNTS, check_mounts, make_points
from worldfork.records.origin import Mount, Origin
from worldfork.records.sandbox import Base, SandboxFacts
from worldfork.records.shown import Shown

HERE = Origin(directory="/srv")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_learnt", {})


def test_mounts_come_in_the_order_of_their_targets() -> None:
    given = [Mount(target, HERE) for target in ("/b/c", "/a-b", "/a", "/b/a")]
    assert [mount.target for mount in check_mounts(given)] == ["/a", "/a-b", "/b/a", "/b/c"]
    assert start_options(fresh=True, mounts=given).mounts == check_mounts(given)
    assert start_options(fresh=True).mounts == ()


@pytest.mark.parametrize(
    "targets",
    [
        ["/dev"], ["/dev/shm/x"], ["/proc/self"], ["/sys"], ["/a", "/a/b"], ["/a/b", "/a", "/a-b"], ["/a", "/a"],
        ["/a\tb"], ["/a\nb"], [f"/many/{n}" for n in range(MAX_MOUNTS + 1)],
    ],
)  # fmt: skip
def test_targets_that_cannot_be_are_refused(targets: list[str]) -> None:
    with pytest.raises(ConfigError):
        check_mounts([Mount(target, HERE) for target in targets])


@pytest.mark.parametrize("mount", [Mount("/a", Origin(directory="/a\tb")), Mount("/a", Origin(snapshot="s"), "/x\ty")])
def test_paths_that_the_plan_could_not_say_are_refused(mount: Mount) -> None:
    with pytest.raises(ConfigError):
        check_mounts([mount])


def test_similar_names_are_no_nesting() -> None:
    assert len(check_mounts([Mount("/data", HERE), Mount("/data2", HERE), Mount("/device", HERE)])) == 3


def test_a_fingerprint_changes_with_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("one")
    (tmp_path / "link").symlink_to("sub/file")
    seen = [mounts._fingerprint(str(tmp_path))]

    def look() -> None:
        mounts._learnt.clear()
        seen.append(mounts._fingerprint(str(tmp_path)))

    look()
    assert seen[0] == seen[1]
    (tmp_path / "sub" / "file").write_text("longer")
    look()
    os.utime(tmp_path / "sub" / "file", ns=(1, 1))
    look()
    (tmp_path / "sub" / "file").rename(tmp_path / "sub" / "other")
    look()
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("sub/other")
    look()
    (tmp_path / "sub" / "other").chmod(0o700)
    look()
    assert len(set(seen)) == len(seen) - 1
    assert not any(one.endswith("+") for one in seen)


def test_a_fingerprint_is_kept_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = mounts._fingerprint(str(tmp_path))
    monkeypatch.setattr(mounts, "_rows", lambda top: pytest.fail("looked again"))
    assert mounts._fingerprint(str(tmp_path)) == first


def test_a_fingerprint_says_where_there_is_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(6):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "file").touch()
    monkeypatch.setattr(mounts, "MAX_ENTRIES", 12)
    assert not mounts._fingerprint(str(tmp_path)).endswith("+")
    mounts._learnt.clear()
    monkeypatch.setattr(mounts, "MAX_ENTRIES", 11)
    assert mounts._fingerprint(str(tmp_path)).endswith("+")


def test_places_to_mount_on_are_open_whatever_the_umask(tmp_path: Path) -> None:
    shown = (Shown("/data/set", "", ""), Shown("/data/tools", "", ""))
    facts = SandboxFacts("sb-1", "sb-1", str(tmp_path), "trusted", "namespace", Base("host"), None, (), mounts=shown)
    before = os.umask(0o077)
    try:
        make_points(facts)
    finally:
        os.umask(before)
    made = [tmp_path / "points", *(tmp_path / "points").rglob("*"), tmp_path / "nothing"]
    assert sorted(str(path.relative_to(tmp_path)) for path in made) == [
        "nothing", "points", "points/data", "points/data/set", "points/data/tools",
    ]  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in made} == {0o755}
    assert SandboxFacts.from_json(facts.to_json()) == facts
