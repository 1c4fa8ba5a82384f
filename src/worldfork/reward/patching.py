"""Edits as unified diffs: how a policy's change looks to people and to git."""

from __future__ import annotations

from collections.abc import Mapping

from worldfork.content.patches import PatchFile, make_patch
from worldfork.content.patches.model import EXECUTABLE, REGULAR
from worldfork.records.edits import Edits


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
