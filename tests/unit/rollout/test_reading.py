"""What is looked at of a starting state for patterns: little beside what they mean."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worldfork.content.merged import MergedView
from worldfork.core.errors import ConfigError
from worldfork.records.globs import NO_CLUTTER
from worldfork.rollout import reading

FORM = "trusted" if os.geteuid() == 0 else "user"


def meant(tmp_path: Path, *patterns: str, top: str = "workspace") -> list[str]:
    view = MergedView([tmp_path], FORM)
    node = view.node(top)
    snapshot: Any = SimpleNamespace(view=view)
    assert node is not None
    return sorted(reading._meant_below(snapshot, node, patterns))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path in ("pkg/a.py", "pkg/sub/b.py", "pkg/b.txt", *(f"node_modules/m{number}/x.py" for number in range(40))):
        place = tmp_path / "workspace" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    (tmp_path / "workspace" / "pkg" / "link.py").symlink_to("a.py")
    return tmp_path


def test_what_no_pattern_means_does_not_count(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_FILES", 3)
    monkeypatch.setattr(reading, "MAX_LOOKED", 10)
    assert meant(tree, "**", *NO_CLUTTER) == ["pkg/a.py", "pkg/b.txt", "pkg/sub/b.py"]
    patterns = "pkg/sub/*.py", "**/*.py", "!node_modules/**"
    assert meant(tree, *patterns, top="workspace/pkg") == ["pkg/a.py", "pkg/sub/b.py"]
    assert meant(tree, "*.py") == []


@pytest.mark.parametrize("bound", ["MAX_FILES", "MAX_LOOKED"])
def test_what_is_looked_at_is_bounded(tree: Path, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(reading, bound, 20)
    with pytest.raises(ConfigError, match="more than"):
        meant(tree, "**/*.py")
