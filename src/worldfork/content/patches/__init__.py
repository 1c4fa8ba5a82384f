"""Patches as git writes and reads them: parsed, applied to the letter, and made, apart from any tree on disk."""

from worldfork.content.patches.applying import apply_patch
from worldfork.content.patches.making import make_patch
from worldfork.content.patches.model import FilePatch, Hunk, Patch, PatchFile
from worldfork.content.patches.parsing import parse_patch

__all__ = ["FilePatch", "Hunk", "Patch", "PatchFile", "apply_patch", "make_patch", "parse_patch"]
