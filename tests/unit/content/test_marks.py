"""The overlay's own attributes and those of others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worldfork.content.marks import data_xattrs, is_mark, is_tie, mark, name_in_layer, name_inside


@pytest.mark.parametrize("form", ["trusted", "user"])
def test_only_known_names_with_the_form_s_prefix_are_marks(form: str) -> None:
    other = {"trusted": "user", "user": "trusted"}[form]
    assert mark("opaque", form) == f"{form}.overlay.opaque"
    for name in ("opaque", "redirect", "origin"):
        assert is_mark(f"{form}.overlay.{name}", form)
        assert not is_mark(f"{other}.overlay.{name}", form), "of a foreign prefix it is data"
        assert not is_mark(f"{form}.overlay.overlay.{name}", form), "what somebody inside called so is data"
    assert is_tie(f"{form}.overlay.origin", form)
    assert not is_tie(f"{form}.overlay.opaque", form)
    assert not is_mark(f"{form}.overlay.whatever", form)


@pytest.mark.parametrize("form", ["trusted", "user"])
@pytest.mark.parametrize("tail", ["opaque", "overlay.opaque", "whatever"])
def test_names_go_to_a_layer_and_back(form: str, tail: str) -> None:
    for prefix in ("user.overlay.", "trusted.overlay.", "user."):
        inside = prefix + tail
        stored = name_in_layer(inside, form)
        assert name_inside(stored, form) == inside
        assert not is_mark(stored, form), "nothing from inside can be taken for the overlay's own"


def test_data_of_a_path_and_of_a_descriptor(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    os.setxattr(file, "user.overlay.opaque", b"y")
    os.setxattr(file, "user.k", b"v")
    with open(file) as opened:
        assert data_xattrs(str(file), "user") == data_xattrs(opened.fileno(), "user") == {"user.k": b"v"}
    assert data_xattrs(str(file), "trusted") == {"user.k": b"v", "user.overlay.opaque": b"y"}
