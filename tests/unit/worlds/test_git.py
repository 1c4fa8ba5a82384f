"""A commit as a tree: everything of it, and nothing of its repository."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from worldfork.core.errors import ConfigError
from worldfork.worlds.git import exported, tree_of

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def git(repository: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    done = subprocess.run(["git", "-C", str(repository), *identity, *words], capture_output=True, check=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "with @ sign"
    path.mkdir()
    git(path, "init", "--quiet")
    (path / "a.py").write_text("one\n")
    (path / "tests").mkdir()
    (path / "tests/test_a.py").write_text("test\n")
    (path / "run").write_text("#!/bin/sh\n")
    (path / "run").chmod(0o755)
    (path / "link").symlink_to("a.py")
    (path / ".gitattributes").write_text("tests export-ignore\na.py export-subst\n")
    git(path, "add", ".")
    git(path, "commit", "--quiet", "-m", "one")
    (path / "a.py").write_text("two\n")
    git(path, "commit", "--quiet", "-am", "two")
    return path


def test_a_commit_is_exported_whole(repository: Path) -> None:
    (repository / "stray").write_text("not committed")
    with exported(f"{repository}@HEAD~1") as tree:
        names = {str(path.relative_to(tree)) for path in tree.rglob("*")}
        assert names == {"a.py", "tests", "tests/test_a.py", "run", "link", ".gitattributes"}
        assert (tree / "a.py").read_text() == "one\n"
        assert (tree / "run").stat().st_mode & 0o111
        assert (tree / "link").readlink() == Path("a.py")
    assert not tree.exists()


def test_exporting_changes_nothing_in_the_repository(repository: Path) -> None:
    (repository / "a.py").write_text("edited\n")
    git(repository, "add", "a.py")
    (repository / ".git/hooks/post-index-change").write_text(f"#!/bin/sh\ntouch '{repository}/ran'\n")
    (repository / ".git/hooks/post-index-change").chmod(0o755)
    before = (repository / ".git/index").read_bytes()
    with exported(f"{repository}@HEAD"):
        pass
    assert (repository / ".git/index").read_bytes() == before
    assert not (repository / "ran").exists()


def test_equal_trees_have_one_id_whatever_the_commit_is_called(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    git(repository, "commit", "--quiet", "--allow-empty", "-m", "three")
    assert tree_of(f"{repository}@{head}") == tree_of(f"{repository}@HEAD")
    assert tree_of(f"{repository}@HEAD~2") != tree_of(f"{repository}@HEAD")


@pytest.mark.parametrize("commit", ["no-such", "--help", "HEAD:a.py", ""])
def test_no_commit_is_the_callers_fault(repository: Path, commit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tree_of(f"{repository}@{commit}")
    assert caught.value.fields["field"] == "origin.git"


def test_no_repository_is_the_callers_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no commit that git knows"):
        tree_of(f"{tmp_path}/nowhere@HEAD")


def test_filters_of_the_repository_do_not_run_and_bytes_are_as_committed(repository: Path) -> None:
    git(repository, "config", "filter.odd.smudge", f"touch '{repository}/ran'; cat")
    (repository / ".gitattributes").write_text("*.py filter=odd\n*.txt text eol=crlf ident\n")
    (repository / "lines.txt").write_bytes(b"one\ntwo $Id$\n")
    (repository / "empty").write_bytes(b"")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "filters")
    with exported(f"{repository}@HEAD") as tree:
        assert (tree / "lines.txt").read_bytes() == b"one\ntwo $Id$\n"
        assert (tree / "a.py").read_text() == "two\n"
        assert (tree / "empty").read_bytes() == b""
    assert not (repository / "ran").exists()


def test_a_submodule_is_an_empty_directory(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{head},deep/module")
    git(repository, "commit", "--quiet", "-m", "module")
    with exported(f"{repository}@HEAD") as tree:
        assert list((tree / "deep/module").iterdir()) == []


def mktree(repository: Path, *entries: str) -> str:
    """Make a commit of a tree that `git add` would not make."""
    words = ["git", "-C", str(repository), "mktree", "-z"]
    done = subprocess.run(words, input="".join(f"{each}\0" for each in entries), capture_output=True, text=True)
    return git(repository, "commit-tree", "-m", "odd", done.stdout.strip())


def test_a_tree_that_would_leave_its_directory_is_refused(repository: Path) -> None:
    blob = git(repository, "rev-parse", "HEAD:a.py")
    below = git(repository, "rev-parse", "HEAD:tests")
    (repository / "elsewhere").mkdir()
    outside = subprocess.run(
        ["git", "-C", str(repository), "hash-object", "-w", "--stdin"],
        input=str(repository / "elsewhere"),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    commits = [
        mktree(repository, f"040000 tree {below}\t.."),
        mktree(repository, f"040000 tree {below}\t.git"),
        mktree(repository, f"100644 blob {blob}\ta", f"120000 blob {outside}\ta"),
        mktree(repository, f"120000 blob {outside}\ta", f"040000 tree {below}\ta"),
    ]
    for commit in commits:
        with pytest.raises(ConfigError) as caught, exported(f"{repository}@{commit}"):
            pass
        assert caught.value.fields["field"] == "origin.git"
    assert list((repository / "elsewhere").iterdir()) == []
