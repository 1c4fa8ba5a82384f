"""Places where answers have been found: caches, compiled files, what editors and patches leave."""

from __future__ import annotations

from pathlib import PurePosixPath

from worldfork.rollout.leaks.secrets import Secrets

ARCHIVES = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".zip", ".egg")
HEADER_BYTES = 16
"""Of a compiled file: four words, the last of which is the size of its source."""

_CACHES = {
    ".pytest_cache": "pytest remembers the tests that it ran",
    ".hypothesis": "hypothesis remembers the examples that it found",
    ".tox": "tox keeps what it installed",
    ".nox": "nox keeps what it installed",
    "htmlcov": "a report of coverage shows sources",
}
_DOWNLOADS = ("cache/pip", "cache/uv", "cache/pypoetry")
_LEFT = (".orig", ".rej", ".patch", ".diff", ".bundle", "~", ".swp")
_PLAIN_NAMES = frozenset({"__init__.py", "conftest.py", "setup.py", "utils.py"})
"""Names that say nothing about whose file it is."""


def of_directory(path: str, names: frozenset[str]) -> str:
    """Say what a directory may give away; empty for nothing."""
    pure = PurePosixPath(path)
    if pure.name in _CACHES and names:
        return _CACHES[pure.name]
    if path.endswith(_DOWNLOADS) and names:
        return "downloaded packages are kept here"
    return ""


def of_file(path: PurePosixPath, task_path: str | None, secrets: Secrets) -> str:
    """Say what the name of a file may give away; empty for nothing.

    Args:
        path: its path, without a leading slash.
        task_path: its path in the task's directory, if it lies there.
        secrets: what must not be found.
    """
    if task_path is not None and task_path in secrets.tests:
        return "it lies where a hidden test will lie, and shows its path"
    names = {PurePosixPath(test).name for test in secrets.tests} - _PLAIN_NAMES
    if path.name in names:
        return "it has the name of a hidden test"
    if task_path is not None and path.name.endswith(_LEFT):
        return "patches and editors leave such files"
    return ""


def of_compiled(path: PurePosixPath, header: bytes, secrets: Secrets) -> str:
    """Say what a compiled file may give away; empty for nothing."""
    stem = path.name.partition(".")[0]
    tests = {PurePosixPath(test).stem for test in secrets.tests if PurePosixPath(test).name not in _PLAIN_NAMES}
    if stem in tests:
        return "a hidden test of this name was compiled here"
    sizes = {len(content) for answer, content in secrets.answer.items() if PurePosixPath(answer).stem == stem}
    if len(header) == HEADER_BYTES and int.from_bytes(header[12:16], "little") in sizes:
        return "it was compiled from a source of the size of the reference's"
    return ""
