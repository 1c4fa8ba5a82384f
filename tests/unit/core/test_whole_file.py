from __future__ import annotations

from pathlib import Path

import pytest

from worldfork.core.whole_file import whole_file


def test_a_file_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "rows"
    target.write_text("old")
    with whole_file(target) as part:
        part.write_text("new")
        assert target.read_text() == "old"
        assert part.parent == tmp_path
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [target]


def write_half(target: Path, error: BaseException) -> None:
    with whole_file(target) as part:
        part.write_text("half")
        raise error


@pytest.mark.parametrize("error", [OSError(28, "no space left"), KeyboardInterrupt()])
def test_what_is_given_up_leaves_the_former_one(error: BaseException, tmp_path: Path) -> None:
    target = tmp_path / "rows"
    target.write_text("old")
    with pytest.raises(type(error)):
        write_half(target, error)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_one_that_cannot_take_its_place_is_not_left(tmp_path: Path) -> None:
    target = tmp_path / "rows"
    (target / "deep").mkdir(parents=True)
    with pytest.raises(OSError), whole_file(target) as part:
        part.write_text("new")
    assert list(tmp_path.iterdir()) == [target]
