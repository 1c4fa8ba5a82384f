"""Prepared versions of files, one for each rollout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from worldfork.core.errors import ConfigError
from worldfork.core.ids import content_id
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.checked import check_path
from worldfork.records.task import Task
from worldfork.reward.places import inside_task
from worldfork.rollout.turn import Turn

MAX_CANDIDATE_BYTES = 16 << 20
"""A candidate's file larger than this is a mistake."""


class CandidatesPolicy:
    """Writes prepared versions of files: candidate `index` for rollout `index`, from the start again at the end.

    Args:
        candidates: name -> path in the task's directory -> content, in the order of the rollouts.

    Raises:
        ConfigError: there are none, or a path leaves the task's directory.
    """

    def __init__(self, candidates: Mapping[str, Mapping[str, str | bytes]]) -> None:
        if not candidates:
            raise ConfigError("there are no candidates")
        self._candidates = [
            (name, {check_path("candidates", path): _as_bytes(content) for path, content in files.items()})
            for name, files in candidates.items()
        ]
        parts = [
            part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
            for name, files in self._candidates
            for part in (name, str(len(files)), *(each for pair in files.items() for each in pair))
        ]
        self.policy_id = f"candidates-{content_id(*parts)[:16]}"

    def __len__(self) -> int:
        return len(self._candidates)

    def name(self, index: int) -> str:
        """Return the name of the candidate that rollout `index` gets."""
        return self._candidates[index % len(self._candidates)][0]

    async def agent(self, sandbox: AsyncSandbox, task: Task, turn: Turn) -> None:
        """Write this rollout's candidate."""
        name, files = self._candidates[turn.index % len(self._candidates)]
        turn.note(f"candidate {name}")
        for path, content in files.items():
            await sandbox.write_file(inside_task(path), content)


def load_candidates(directory: str | Path) -> CandidatesPolicy:
    """Read candidates from a directory: each of its directories is one, in the order of their names.

    The files below such a directory have the paths that they get in the task's directory. Entries whose names
    begin with a dot, and links, are left out.

    Raises:
        ConfigError: not a directory, no candidate in it, or a file that cannot be read.
    """
    directory = Path(directory)
    try:
        entries = sorted(each for each in directory.iterdir() if _is_plain_directory(each))
        candidates = {each.name: _read_tree(each) for each in entries}
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror or error}", path=str(directory)) from error
    if not candidates:
        raise ConfigError(
            f"{directory} holds no candidates",
            remedy="make one directory per candidate, with its files",
            path=str(directory),
        )
    return CandidatesPolicy(candidates)


def _is_plain_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not path.name.startswith(".")


def _read_tree(root: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in sorted(root.rglob("*")):
        inner = path.relative_to(root)
        if path.is_symlink() or not path.is_file() or any(part.startswith(".") for part in inner.parts):
            continue
        if path.stat().st_size > MAX_CANDIDATE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CANDIDATE_BYTES} bytes", path=str(path))
        files[inner.as_posix()] = path.read_bytes()
    return files


def _as_bytes(content: str | bytes) -> bytes:
    return content.encode("utf-8") if isinstance(content, str) else content
