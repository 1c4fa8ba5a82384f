"""Edits as unified diffs, and back: how a policy's or a reference's change looks to people and to git."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from worldfork.content.patches import PatchFile, apply_patch, make_patch, parse_patch
from worldfork.content.patches.model import EXECUTABLE, REGULAR
from worldfork.core.errors import ConfigError
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.globs import is_editable


def diff_of(originals: Mapping[str, bytes], edits: Edits) -> bytes:
    """Return edits as a unified diff in git's form, which `git apply` takes from the starting state.

    Args:
        originals: the editable files of the starting state, as a `Start` has them: without their modes, so that no
            change of a mode is told.
        edits: what was made of them.

    Raises:
        ConfigError: a path is none within a tree.
    """
    touched = {*edits.files, *edits.removed}
    # One by one: a starting state reads each of its files only when it is asked for.
    old = {path: PatchFile(originals[path]) for path in touched if path in originals}
    new = {
        path: PatchFile(each.content, EXECUTABLE if each.executable else REGULAR) for path, each in edits.files.items()
    }
    return make_patch(old, new)


def edits_of(patch: bytes | str, originals: Mapping[str, bytes], editable: Iterable[str]) -> Edits:
    """Return what a unified diff makes of the editable files, to the letter.

    Args:
        patch: a unified diff of the starting state, paths with `a/` and `b/`.
        originals: the editable files of the starting state.
        editable: patterns of the paths that it may touch.

    Raises:
        ConfigError: it is no patch, does not apply, touches another path, or makes a link; `path` and `hunk` tell
            where.
    """
    patterns = tuple(editable)
    parsed = parse_patch(patch)
    for path in parsed.paths:
        if not is_editable(path, patterns):
            raise ConfigError(
                f"patch: {path!r} is not editable",
                remedy="name it among the editable paths, or take it out of the patch",
                field="patch",
                path=path,
            )

    def read(path: str) -> PatchFile | None:
        content = originals.get(path)
        return None if content is None else PatchFile(content)

    files: dict[str, EditedFile] = {}
    removed: list[str] = []
    for path, file in apply_patch(parsed, read).items():
        if file is None:
            removed.append(path)
        elif file.is_link:
            raise ConfigError(f"patch: {path!r} becomes a link", field="patch", path=path)
        else:
            files[_text(path)] = EditedFile(file.content, file.mode == EXECUTABLE)
    return Edits(files, tuple(removed))


def _text(path: str) -> str:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"patch: {os.fsencode(path)!r} is no UTF-8", field="patch", path=path) from None
    return path
