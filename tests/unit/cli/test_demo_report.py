from __future__ import annotations

import pytest

from worldfork.cli.demo_report import ARTICLE, Economics, duration, economics_rows, reward_line


def test_the_articles_figures_give_the_articles_hours() -> None:
    assert ARTICLE.rebuild_h == pytest.approx(20.4, abs=0.1)
    assert ARTICLE.fork_h == pytest.approx(4.4, abs=0.1)


def test_both_ways_pay_every_restore() -> None:
    free_build = Economics(build_s=0.0, restore_s=2.0)
    assert free_build.rebuild_h == free_build.fork_h
    free_restore = Economics(build_s=3.6, restore_s=0.0)
    assert free_restore.rebuild_h == pytest.approx(8.0)
    assert free_restore.fork_h == pytest.approx(0.001)


def test_one_build_is_not_divided_by_the_group() -> None:
    economics = Economics(build_s=3600.0, restore_s=0.0)
    assert economics.fork_wall_h == pytest.approx(1.0)
    assert economics.rebuild_wall_h == pytest.approx(1000.0)


@pytest.mark.parametrize(("hours", "text"), [(20.44, "20.4 h"), (0.5, "30.0 min"), (0.001, "3.6 s")])
def test_hours_are_shown_in_a_unit_that_suits_them(hours: float, text: str) -> None:
    assert duration(hours) == text


def test_the_table_names_the_articles_own_figures() -> None:
    text = "\n".join(" ".join(row) for row in economics_rows(Economics(5.0, 0.005)))
    for figure in ("7.2 s", "~2.0 s", "20.4 h", "4.4 h", "5.0 s", "5.0 ms", "8,000"):
        assert figure in text


def test_json_has_a_unit_in_each_name() -> None:
    assert set(ARTICLE.to_json()) == {
        "build_s", "restore_s", "rollouts", "group", "rebuild_h", "fork_h", "rebuild_wall_h", "fork_wall_h",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reward", "passed", "text"),
    [
        (1 / 3, 1, "rollout[1] reward=0.33   (2 failed, 1 passed)"),
        (0.0, 0, "rollout[1] reward=0.00   (3 failed)"),
        (1.0, 3, "rollout[1] reward=1.00   (3 passed)"),
        (None, 0, "rollout[1] reward=None   (the disk is full)"),
    ],
)
def test_the_line_of_a_rollout(reward: float | None, passed: int, text: str) -> None:
    assert reward_line(1, reward, passed, 3, "the disk is full") == text
