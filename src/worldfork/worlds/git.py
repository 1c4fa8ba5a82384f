"""Commits of local repositories as plain trees: no history, no index, nothing of the repository's own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from worldfork.core.errors import ConfigError

_GIT_S = 600.0

_CHUNK_BYTES = 1 << 20
_LINK = b"120000"
_EXECUTABLE = b"100755"
_SUBMODULE = b"160000"


def tree_of(git: str) -> str:
    """Return the id of the tree of `PATH@COMMIT`: equal ids are equal files. Blocking.

    Raises:
        ConfigError: there is no git, no such repository or no such commit.
    """
    commit = git.rpartition("@")[2]
    words = ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{tree}}"]
    return _git(words, git).decode("utf-8", "replace").strip()


@contextlib.contextmanager
def exported(git: str) -> Iterator[Path]:
    """Write the tree of `PATH@COMMIT` to a directory, which is gone after the block. Blocking.

    All files of the commit are there, also those that archives of it leave out, byte for byte as they were committed:
    the repository's attributes and filters do not count, so that equal trees are equal files. A submodule is an empty
    directory, as where nobody fetched it.

    Raises:
        ConfigError: as `tree_of`; or it could not be written.
    """
    tree = tree_of(git)
    with tempfile.TemporaryDirectory(prefix="worldfork-git-") as above:
        target = Path(above, "tree")
        target.mkdir(0o755)
        try:
            _write(git, tree, target, Path(above, "names"))
        except OSError as error:
            raise ConfigError(
                f"{git} cannot be written as files: {os.fsdecode(error.filename or '')}: {error.strerror}",
                field="origin.git",
            ) from error
        yield target


@dataclass(frozen=True)
class _Entry:
    mode: bytes
    name: bytes
    path: bytes


def _write(git: str, tree: str, target: Path, names: Path) -> None:
    top = os.fsencode(target)
    blobs: list[_Entry] = []
    for entry in _entries(git, tree):
        place = os.path.join(top, entry.path)
        os.makedirs(place if entry.mode == _SUBMODULE else os.path.dirname(place), 0o755, exist_ok=True)
        if entry.mode != _SUBMODULE:
            blobs.append(entry)
    # Links come last, so that nothing is written through one.
    blobs.sort(key=lambda entry: entry.mode == _LINK)
    names.write_bytes(b"".join(entry.name + b"\n" for entry in blobs))
    with names.open("rb") as asked, _running(["cat-file", "--batch"], git, asked) as told:
        for entry in blobs:
            place = os.path.join(top, entry.path)
            parts = _content(told, git)
            if entry.mode == _LINK:
                os.symlink(b"".join(parts), place)
                continue
            with open(place, "xb") as file:
                for part in parts:
                    file.write(part)
                os.fchmod(file.fileno(), 0o755 if entry.mode == _EXECUTABLE else 0o644)


def _entries(git: str, tree: str) -> Iterator[_Entry]:
    for line in _git(["ls-tree", "-r", "-z", "--full-tree", tree], git).split(b"\0"):
        if line:
            facts, _, path = line.partition(b"\t")
            mode, _, name = facts.split(b" ")
            if any(each in (b"", b".", b"..") or each.lower() == b".git" for each in path.split(b"/")):
                raise ConfigError(f"{git} holds {os.fsdecode(path)!r}, which is no path", field="origin.git")
            yield _Entry(mode, name, path)


def _content(told: IO[bytes], git: str) -> Iterator[bytes]:
    """Read one object of `cat-file --batch`: its name, kind and size in a line, its bytes, and the end of a line."""
    head = told.readline().split()
    if len(head) != 3 or head[1] != b"blob":
        raise _not_known(git, b"an object of it is not there")
    left = int(head[2])
    while left:
        part = told.read(min(left, _CHUNK_BYTES))
        if not part:
            raise _not_known(git, b"git ended early")
        left -= len(part)
        yield part
    told.read(1)


@contextlib.contextmanager
def _running(words: Sequence[str], git: str, asked: IO[bytes]) -> Iterator[IO[bytes]]:
    process = subprocess.Popen(
        _command(words, git), env=_environ(), stdin=asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    bound = threading.Timer(_GIT_S, process.kill)
    bound.daemon = True
    bound.start()
    try:
        assert process.stdout is not None  # a pipe was asked for
        with process.stdout as told:
            yield told
    finally:
        bound.cancel()
        process.kill()
        process.wait()


def _git(words: Sequence[str], git: str) -> bytes:
    try:
        done = subprocess.run(
            _command(words, git),
            env=_environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError("there is no program `git`", remedy="install git", field="origin.git") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"git took more than {_GIT_S:g} s for {git}", field="origin.git") from error
    if done.returncode != 0:
        raise _not_known(git, done.stderr.strip()[-500:] or b"no such path or commit")
    return done.stdout


def _command(words: Sequence[str], git: str) -> list[str]:
    # Nothing of the repository runs: no hooks, no monitor of its files. Filters run where files are checked out only.
    quiet = ["-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"]
    return ["git", "-C", git.rpartition("@")[0], *quiet, *words]


def _environ() -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return {**own, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}


def _not_known(git: str, words: bytes) -> ConfigError:
    return ConfigError(
        f"{git} is no commit that git knows: {words.decode('utf-8', 'replace')}",
        remedy="origin.git is PATH@COMMIT, of a repository on this machine",
        field="origin.git",
    )
