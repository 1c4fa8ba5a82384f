"""Commits of local repositories as plain trees: no history, no index, nothing of the repository's own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from worldfork.core.errors import ConfigError

_GIT_S = 600.0


def tree_of(git: str) -> str:
    """Return the id of the tree of `PATH@COMMIT`: equal ids are equal files. Blocking.

    Raises:
        ConfigError: there is no git, no such repository or no such commit.
    """
    path, _, commit = git.rpartition("@")
    return _git(path, ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{tree}}"], git).strip()


@contextlib.contextmanager
def exported(git: str) -> Iterator[Path]:
    """Write the tree of `PATH@COMMIT` to a directory, which is gone after the block. Blocking.

    All files of the commit are there, also those that archives of it leave out. A submodule is an empty directory,
    as where nobody fetched it.

    Raises:
        ConfigError: as `tree_of`; or it could not be written.
    """
    path = git.rpartition("@")[0]
    tree = tree_of(git)
    with tempfile.TemporaryDirectory(prefix="worldfork-git-") as above:
        target = Path(above, "tree")
        target.mkdir(0o755)
        env = {"GIT_INDEX_FILE": str(Path(above, "index"))}
        _git(path, ["read-tree", tree], git, env)
        _git(path, ["checkout-index", "--all", "--force", f"--prefix={target}/"], git, env)
        yield target


def _git(path: str, words: list[str], git: str, env: dict[str, str] | None = None) -> str:
    # Nothing of the repository runs: no hooks, no monitor of its files.
    quiet = ["-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "core.autocrlf=false"]
    own = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", path, *quiet, *words],
            env={**own, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", **(env or {})},
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
        words_of_git = done.stderr.decode("utf-8", "replace").strip()[-500:]
        raise ConfigError(
            f"{git} is no commit that git knows: {words_of_git or 'no such path or commit'}",
            remedy="origin.git is PATH@COMMIT, of a repository on this machine",
            field="origin.git",
        )
    return done.stdout.decode("utf-8", "replace")
