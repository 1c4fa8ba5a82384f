"""The winner's diff, applied to a directory of the host: whole or not at all, and never out of it."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest
from tests.unit.reward.played import a_task
from tests.unit.rollout.runs import an_episode

from worldfork.core.errors import ConfigError, OutOfSpace, StoreError
from worldfork.rollout.promote import Promoted, apply_to_directory, best_episode

EDIT = "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"
NEW = "diff --git a/new/run b/new/run\nnew file mode 100755\n--- /dev/null\n+++ b/new/run\n@@ -0,0 +1 @@\n+x\n"
GONE = "diff --git a/old/deep/g b/old/deep/g\ndeleted file mode 100644\n"
GONE += "--- a/old/deep/g\n+++ /dev/null\n@@ -1 +0,0 @@\n-g\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "old/deep").mkdir(parents=True)
    (root / "a.py").write_text("one\ntwo\n")
    (root / "a.py").chmod(0o640)
    (root / "old/deep/g").write_text("g\n")
    return root


def files(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


def test_all_of_it_is_applied(place: Path) -> None:
    promoted = apply_to_directory(place, EDIT + NEW + GONE)
    assert promoted == [
        Promoted("a.py", "changed", 6), Promoted("new/run", "added", 2), Promoted("old/deep/g", "removed", 0)
    ]  # fmt: skip
    assert files(place) == {"a.py": "one\n2\n", "new/run": "x\n"}
    assert not (place / "old").exists()
    modes = [stat.S_IMODE((place / name).stat().st_mode) for name in ("a.py", "new/run")]
    assert (modes[0], modes[1] & 0o100) == (0o640, 0o100)


def test_a_dry_run_changes_nothing(place: Path) -> None:
    before = files(place)
    assert len(apply_to_directory(place, EDIT + NEW + GONE, dry_run=True)) == 3
    assert files(place) == before


def test_a_hunk_that_does_not_fit_leaves_all_as_it_was(place: Path) -> None:
    before = files(place)
    with pytest.raises(ConfigError) as caught:
        apply_to_directory(place, NEW + EDIT.replace("-two", "-three"))
    assert (caught.value.fields["path"], caught.value.fields["hunk"]) == ("a.py", 1)
    assert files(place) == before


def test_a_file_that_has_grown(place: Path) -> None:
    (place / "a.py").write_text("zero\none\ntwo\n")
    with pytest.raises(ConfigError):
        apply_to_directory(place, EDIT)
    apply_to_directory(place, EDIT, moved=True)
    assert (place / "a.py").read_text() == "zero\none\n2\n"


def test_links_lead_nowhere(place: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.py").write_text("one\ntwo\n")
    (place / "d").symlink_to(outside)
    (place / "l.py").symlink_to(outside / "a.py")
    for diff in (EDIT.replace("a.py", "d/a.py"), NEW.replace("new/run", "d/run"), EDIT.replace("a.py", "l.py")):
        with pytest.raises(ConfigError):
            apply_to_directory(place, diff)
    link = "diff --git a/x b/x\nnew file mode 120000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+/etc\n"
    with pytest.raises(ConfigError, match="becomes a link"):
        apply_to_directory(place, link)
    assert files(outside) == {"a.py": "one\ntwo\n"}


def test_what_is_no_file_and_what_is_no_directory(place: Path) -> None:
    os.mkfifo(place / "p")
    with pytest.raises(ConfigError, match="no plain file"):
        apply_to_directory(place, EDIT.replace("a.py", "p"))
    with pytest.raises(ConfigError, match="no directory"):
        apply_to_directory(place / "nowhere", EDIT)
    with pytest.raises(ConfigError, match="a file or a link"):
        apply_to_directory(place, NEW.replace("new/run", "a.py/run"))


def test_a_disk_that_fails_in_the_middle_leaves_no_pieces(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(place)
    written = []

    def full(fd: int) -> None:
        written.append(fd)
        if len(written) == 2:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfSpace):
        apply_to_directory(place, EDIT + NEW + GONE)
    assert files(place) == before


def test_a_directory_in_the_way_is_seen_before_anything_is_changed(place: Path) -> None:
    (place / "new/run").mkdir(parents=True)
    before = files(place)
    for dry_run in (True, False):
        with pytest.raises(ConfigError, match="is a directory"):
            apply_to_directory(place, EDIT + NEW + GONE, dry_run=dry_run)
    assert files(place) == before
    (place / "new/run/kept").write_text("")
    with pytest.raises(ConfigError, match="is a directory"):
        apply_to_directory(place, EDIT + NEW)


def test_a_file_takes_the_place_of_a_directory_that_empties(place: Path) -> None:
    apply_to_directory(place, GONE + NEW.replace("new/run", "old"))
    assert files(place) == {"a.py": "one\ntwo\n", "old": "x\n"}
    (place / "b/deep").mkdir(parents=True)
    (place / "b/deep/g").write_text("g\n")
    (place / "b/h").write_text("h\n")
    with pytest.raises(ConfigError, match="is a directory"):
        apply_to_directory(place, GONE.replace("old/", "b/") + NEW.replace("new/run", "b"))


def test_new_content_does_not_act_as_somebody_else(place: Path) -> None:
    (place / "a.py").chmod(0o6755)
    apply_to_directory(place, EDIT.replace("--- a", "diff --git a/a.py b/a.py\n--- a"))
    assert stat.S_IMODE((place / "a.py").stat().st_mode) & ~0o111 == 0o644


def test_what_takes_the_place_of_a_link_is_not_open_to_all(place: Path) -> None:
    (place / "x").symlink_to("a.py")
    gone = "diff --git a/x b/x\ndeleted file mode 120000\n--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-a.py\n"
    gone += "\\ No newline at end of file\n"
    apply_to_directory(place, gone + NEW.replace("new/run", "x"))
    assert (place / "x").read_text() == "x\n"
    assert not (place / "x").is_symlink()
    assert not (place / "x").stat().st_mode & 0o022


def test_more_files_than_a_process_may_have_open(place: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        apply_to_directory(place, "".join(NEW.replace("new/run", f"new/{each}/run") for each in range(60)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(files(place)) == 62


def test_a_rename_that_fails_leaves_no_pieces(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "rename", refused)
    before = files(place)
    with pytest.raises(StoreError):
        apply_to_directory(place, EDIT + NEW)
    assert files(place) == before
    assert sorted(os.listdir(place)) == ["a.py", "old"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can leave a file to somebody else")
def test_what_root_writes_is_left_to_its_owner(place: Path) -> None:
    os.chown(place, 1234, 1235)
    os.chown(place / "a.py", 4321, 4322)
    apply_to_directory(place, EDIT + NEW)
    owners = {name: ((place / name).stat().st_uid, (place / name).stat().st_gid) for name in ("a.py", "new", "new/run")}
    assert owners == {"a.py": (4321, 4322), "new": (1234, 1235), "new/run": (1234, 1235)}


def test_the_best_episode() -> None:
    task = a_task()
    group = [an_episode(task, index, reward) for index, reward in enumerate([0.5, None, 1.0, 1.0])]
    assert best_episode(group).index == 2
    with pytest.raises(ConfigError, match="no episode"):
        best_episode(group[1:2])
    with pytest.raises(ConfigError, match="choose one task"):
        best_episode([*group, an_episode(a_task(task_id="other"), 0, 1.0)])
