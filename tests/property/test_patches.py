"""Patches against git: what it makes is read and applied as it does, and what is made it takes."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from worldfork.content.patches import PatchFile, apply_patch, make_patch, parse_patch
from worldfork.content.patches.model import EXECUTABLE, LINK, REGULAR
from worldfork.core.errors import ConfigError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

Tree = dict[str, PatchFile]

_PLAIN = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CEILING_DIRECTORIES": "/",
    "LC_ALL": "C",
}


def git(where: Path, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["git", *arguments], cwd=where, env=_PLAIN, capture_output=True, timeout=60, check=False, input=given
    )


def a_text(dice: random.Random) -> bytes:
    lines = [dice.choice([b"", b"a", b"b", b"c", b"\r", b"\xff\xfe", b"-- ", b"+x", b"\\ y"]) for _ in range(30)]
    text = b"\n".join(lines[: dice.randrange(30)])
    return text + b"\n" * dice.randrange(2)


def a_file(dice: random.Random) -> PatchFile:
    what = dice.randrange(10)
    if what == 0:
        return PatchFile(dice.choice([b"a", b"../out", b"/etc"]), LINK)
    if what == 1:
        return PatchFile(dice.randbytes(dice.randrange(1, 3000)) + b"\0", REGULAR)
    return PatchFile(a_text(dice), dice.choice([REGULAR, REGULAR, EXECUTABLE]))


def an_edit(file: PatchFile, dice: random.Random) -> PatchFile:
    if file.is_link or dice.randrange(6) == 0:
        return a_file(dice)
    content = bytearray(file.content)
    for _ in range(dice.randrange(3)):
        at = dice.randrange(len(content) + 1)
        content[at : at + dice.randrange(4)] = dice.choice([b"", b"x", b"\n", b"new\n"])
    return PatchFile(bytes(content), dice.choice([file.mode, file.mode, REGULAR, EXECUTABLE]))


NAMES = ["a", "b", "d/a", "d/e/f", "with space", 'q"uote', "t\tab", "\udcff", "umlaut ä", "back\\slash", "n\newline"]


def two_trees(dice: random.Random) -> tuple[Tree, Tree]:
    old = {name: a_file(dice) for name in NAMES if dice.randrange(3)}
    new = {name: an_edit(file, dice) if dice.randrange(2) else file for name, file in old.items()}
    for name in list(new):
        if dice.randrange(6) == 0:
            moved = new.pop(name)
            if dice.randrange(2):
                new.setdefault(dice.choice([*NAMES, "moved/there"]), moved)
    if dice.randrange(3) == 0:
        new["fresh"] = a_file(dice)
    return old, new


def lay(where: Path, tree: Tree) -> Path:
    where.mkdir()
    for name, file in tree.items():
        path = where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.is_link:
            os.symlink(file.content, os.fsencode(path))
        else:
            path.write_bytes(file.content)
            path.chmod(file.mode & 0o777)
    return where


def seen(where: Path) -> Tree:
    found: Tree = {}
    for above, directories, names in os.walk(where):
        if ".git" in directories:
            directories.remove(".git")
        for name in [*names, *(each for each in directories if (Path(above) / each).is_symlink())]:
            path = Path(above) / name
            inside = str(path.relative_to(where))
            if path.is_symlink():
                found[inside] = PatchFile(os.readlink(os.fsencode(path)), LINK)
            else:
                found[inside] = PatchFile(path.read_bytes(), EXECUTABLE if path.stat().st_mode & 0o100 else REGULAR)
    return found


def committed(where: Path, old: Tree) -> Path:
    lay(where, old)
    for line in (["init", "-q"], ["add", "-A"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        done = git(where, "-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false", *line)
        assert done.returncode == 0, done.stderr
    return where


def after(patch: bytes, old: Tree) -> Tree:
    changes = apply_patch(parse_patch(patch), old.get)
    return {path: file for path, file in {**old, **changes}.items() if file is not None}


@pytest.mark.parametrize("seed", range(30))
def test_what_git_makes_is_applied_as_git_means_it(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    old, new = two_trees(dice)
    repository = committed(tmp_path / "repository", old)
    for path in old:
        (repository / path).unlink()
    for each in sorted(repository.rglob("*"), reverse=True):
        if each.is_dir() and ".git" not in each.parts:
            each.rmdir()
    shutil.copytree(lay(tmp_path / "new", new), repository, symlinks=True, dirs_exist_ok=True)
    assert git(repository, "add", "-A").returncode == 0
    for options in (
        [],
        ["-M", "-C", "--find-copies-harder"],
        ["-U0", "--full-index"],
        ["-U8", "--patience", "-B", "--no-renames"],
    ):
        made = git(repository, "diff", "--cached", "--binary", *options)
        assert made.returncode == 0, made.stderr
        assert after(made.stdout, old) == new


@pytest.mark.parametrize("seed", range(30))
def test_git_takes_what_is_made(seed: int, tmp_path: Path) -> None:
    old, new = two_trees(random.Random(1000 + seed))
    patch = make_patch(old, new)
    assert after(patch, old) == new
    repository = committed(tmp_path / "repository", old)
    if not patch:
        return
    applied = git(repository, "apply", "--whitespace=nowarn", "-", given=patch)
    assert applied.returncode == 0, (applied.stderr, patch)
    assert seen(repository) == new


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_patch_is_a_typed_error_or_what_git_makes_of_it(seed: int, tmp_path: Path) -> None:
    dice = random.Random(2000 + seed)
    old, new = two_trees(dice)
    patch = bytearray(make_patch(old, new))
    for turn in range(40):
        damaged = bytearray(patch)
        for _ in range(dice.randrange(1, 4)):
            if damaged:
                at = dice.randrange(len(damaged))
                damaged[at : at + dice.randrange(3)] = dice.choice([b"", b" ", b"+", b"-", b"\n", b"9", b"/", b"\\"])
        try:
            result = after(bytes(damaged), old)
        except ConfigError as error:
            assert error.fields["field"] == "patch"  # noqa: PT017 - most are refused, not all
            continue
        if turn % 8 or not damaged.strip():
            continue
        repository = committed(tmp_path / f"repository{turn}", old)
        by_git = git(repository, "apply", "--whitespace=nowarn", "-", given=bytes(damaged))
        if by_git.returncode == 0 and not by_git.stderr:
            assert seen(repository) == result
