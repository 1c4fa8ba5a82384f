from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reward.played import a_task
from tests.unit.rollout.runs import BEGAN_S, a_run, an_episode, left, write_run

from worldfork.core.errors import ConfigError
from worldfork.records.episode import Failure, FailureKind, Timings
from worldfork.records.trajectory import Step
from worldfork.rollout.report import episodes as episodes_part
from worldfork.rollout.report import figures_of, write_report
from worldfork.rollout.report.figures import STAGES, stages_of, wilson
from worldfork.rollout.report.text import escaped
from worldfork.rollout.stored import StoredRun

_VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """What a browser would see: elements, their attributes, their text; a tag that is not closed fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def all(self, name: str) -> list[str]:
        return [str(attributes[name]) for _, attributes in self.tags if name in attributes]


def page_of(directory: Path) -> Page:
    target = directory.parent / "report.html"
    write_report(StoredRun(directory), target)
    return Page(target.read_text(encoding="utf-8"))


def test_the_page_is_whole_by_itself_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    page = page_of(a_run(tmp_path / "run")[0])
    kinds = {tag for tag, _ in page.tags}
    assert not kinds & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    assert not page.all("src")
    ids = page.all("id")
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in page.all("href")} <= set(ids)
    assert all(link.startswith("#") for link in page.all("href"))
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert len([each for each in ids if each.startswith("e0-")]) == 5


def test_what_others_wrote_is_shown_and_never_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script><!-- \" ' & </style></pre> \x1b[31m \u202e"
    task = a_task(task_id="evil/<img src=x onerror=alert(1)>", prompt=evil)
    directory = tmp_path / "run"
    steps = tuple(Step(kind, evil, evil, reason=evil, message=evil) for kind in ("command", "write", "note", "message"))
    episode = an_episode(
        task, 0, 0.5, policy_id=f"p{evil}", policy_end=evil, grade_end=evil, parts={evil: 0.5}, expected=(evil,),
        passed=(), failed=(evil,), verifier_id=evil, **left(directory, evil, *steps, **{evil: evil}),
    )  # fmt: skip
    failed = an_episode(task, 1, None, policy_id=f"p{evil}")
    write_run(directory, [episode, failed])
    page = page_of(directory)
    assert "script" not in {tag for tag, _ in page.tags}
    assert {tag for tag, _ in page.tags} & {"img"} == set()
    assert "<script>alert(1)</script>" in page.text
    assert "\x1b" not in page.text
    assert "\u202e" not in page.text
    assert "\\u001b" in page.text


def test_an_episode_leads_to_its_diff_and_steps(tmp_path: Path) -> None:
    page = page_of(a_run(tmp_path / "run")[0])
    for words in ("+right", "$ cat a.py", "I look.", "Done.", "model: none", "10 + 5 tokens", "launch_failed", "t::b"):
        assert words in page.text, words


def test_figures(tmp_path: Path) -> None:
    figures = figures_of(StoredRun(a_run(tmp_path / "run")[0]))
    assert (figures.episodes_n, figures.scored_n, figures.failed_n, figures.full_n) == (8, 7, 1, 1)
    assert (figures.tasks_n, figures.solved_n) == (2, 1)
    assert figures.mean
    assert figures.mean.value == pytest.approx(2 / 7)
    assert [(kind, count) for kind, count, _ in figures.failures] == [("fork", 1)]
    assert [k for k, _ in figures.pass_at] == [1, 2, 4]
    assert figures.pass_at[0][1] == pytest.approx((1 / 4 + 0) / 2)
    assert figures.pass_at[2][1] == 1.0
    assert figures.groups[1].constant
    assert not figures.groups[0].constant
    assert set(figures.stages) == set(STAGES)
    assert sum(figures.stages.values()) == pytest.approx(sum(3.1 + each for each in (0, 1, 2, 3, 4, 0, 1, 2)))
    assert figures.wall_s == pytest.approx(4 + 7.1)


def test_rollouts_that_were_stopped_are_no_failures_and_bias_nothing(tmp_path: Path) -> None:
    """A group that ends at its first success would show a pass@1 of its own making."""
    one, two = a_task(task_id="played/one"), a_task(task_id="played/two")
    enough = Failure(FailureKind.STOPPED, "enough", "the rule held")
    never = Timings()
    episodes = [
        an_episode(one, 0, 0.0),
        an_episode(one, 1, 1.0),
        *(an_episode(one, index, None, failure=enough, timings=never, started_s=0.0) for index in (2, 3)),
        *(an_episode(two, index, reward) for index, reward in enumerate((1.0, 0.0, 0.0, 0.0))),
    ]
    figures = figures_of(StoredRun(write_run(tmp_path / "run", episodes)))
    assert (figures.scored_n, figures.failed_n, figures.stopped_n, figures.failures) == (6, 0, 2, ())
    assert figures.groups[0].median_s == pytest.approx(3.6)
    assert figures.pass_at[0] == (1, 0.25)
    assert figures.wall_s == pytest.approx(3 + 6.1)
    page = page_of(tmp_path / "run")
    assert "ended early, 2 not run" in page.text
    assert "e0-3" not in page.all("id")


def test_time_without_a_policy_thinking() -> None:
    """Known by hand: turns at 0 to 4 and 2 to 6 s; commands at 1 to 3 of the one and all of the other's turn."""
    task = a_task()
    times = Timings(fork_s=0.0, policy_s=4.0, total_s=5.0)
    one = an_episode(task, 0, 1.0, started_s=BEGAN_S, timings=times, trajectory="1" * 64)
    two = an_episode(task, 1, 1.0, started_s=BEGAN_S + 2, timings=times, trajectory="2" * 64)

    class Known:
        run_id = "run-known"
        episodes = [one, two]  # noqa: RUF012
        groups: list[Any] = []  # noqa: RUF012

        def trajectory(self, episode: Any) -> Any:
            spans = [(1.0, 2.5), (2.0, 3.0)] if episode.index == 0 else [(0.0, 4.0)]
            steps = [Step("command", "x", began_s=began_s, ended_s=ended_s) for began_s, ended_s in spans]
            return dataclasses.make_dataclass("T", ["steps"])(steps)

    figures = figures_of(Known())  # type: ignore[arg-type]
    assert figures.wall_s == 7.0
    assert figures.idle_share == pytest.approx(1 - 2 / 7)


def test_stages_add_up_to_the_whole() -> None:
    episode = an_episode(a_task(), 0, 1.0)
    assert sum(stages_of(episode).values()) == pytest.approx(episode.timings.total_s)
    assert stages_of(episode)["thinking"] == pytest.approx(0.5)
    unknown = an_episode(a_task(), 0, None, timings=Timings(total_s=1.0))
    assert stages_of(unknown)["other"] == 1.0


@pytest.mark.parametrize(("hits", "count", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634)])
def test_wilsons_interval(hits: int, count: int, low: float, high: float) -> None:
    interval = wilson(hits, count)
    assert interval
    assert (interval.low, interval.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    assert wilson(0, 0) is None


def test_a_run_without_episodes_and_one_without_rewards_have_a_page(tmp_path: Path) -> None:
    assert "0 rollouts" in page_of(write_run(tmp_path / "none", [])).text
    page = page_of(write_run(tmp_path / "failed", [an_episode(a_task(), index, None) for index in range(2)]))
    assert "no rewards yet" in page.text


def test_what_the_run_does_not_hold_is_told(tmp_path: Path) -> None:
    directory, _, _ = a_run(tmp_path / "run")
    episode = StoredRun(directory).episodes[0]
    (directory / "blobs" / str(episode.diff)[:2] / f"{episode.diff}.zst").write_bytes(b"broken")
    assert "cannot be read" in page_of(directory).text


def test_a_trajectory_that_cannot_be_read_costs_the_others_nothing(tmp_path: Path) -> None:
    directory, _, _ = a_run(tmp_path / "run")
    episode = next(each for each in StoredRun(directory).episodes if each.trajectory)
    (directory / "blobs" / str(episode.trajectory)[:2] / f"{episode.trajectory}.zst").write_bytes(b"broken")
    page = page_of(directory)
    assert "cannot be read" in page.text
    assert figures_of(StoredRun(directory)).scored_n > 0


def test_what_turns_text_round_is_spelled_out() -> None:
    assert escaped("a\u061cb\u2028c\u202ed") == "a\\u061cb\\u2028c\\u202ed"


def test_the_page_is_bounded_and_the_best_and_the_worst_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "run"
    task = a_task()
    told = [f"answer{index}x" * 1000 for index in range(9)]
    episodes = [
        an_episode(task, index, reward, **left(directory, told[index]))
        for index, reward in enumerate((0.5, 0.5, 0.5, 0.0, 0.5, 1.0, 0.5, 0.5, 0.5))
    ]
    write_run(directory, episodes)
    monkeypatch.setattr(episodes_part, "MAX_DETAIL_CHARACTERS", 25_000)
    text = page_of(directory).text
    assert [index for index in range(9) if told[index] in text] == [3, 5]
    assert "too long for this page" in text
    monkeypatch.setattr(episodes_part, "MAX_EPISODES", 4)
    assert "5 more episodes" in page_of(directory).text


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    directory, _, _ = a_run(tmp_path / "run")
    with pytest.raises(ConfigError):
        write_report(StoredRun(directory), tmp_path / "absent" / "report.html")
    assert json.dumps(sorted(each.name for each in tmp_path.iterdir())) == '["run"]'


def test_who_judged_is_told(tmp_path: Path) -> None:
    task = a_task()
    auto = "auto:split:12:pytest:34"
    judged = [(auto, "split:12"), (auto, "split:12"), (auto, "pytest:34"), (auto, ""), ("files:56", "")]
    episodes = [
        an_episode(task, index, 0.5, verifier_id=asked, judged_by=by) for index, (asked, by) in enumerate(judged)
    ]
    directory = write_run(tmp_path / "r", [*episodes, an_episode(task, 5, None, verifier_id=auto)])
    figures = figures_of(StoredRun(directory))
    assert figures.judges == (("split", 2), ("pytest", 1), ("nothing left", 1), ("files", 1))
    page = page_of(directory)
    assert "judged by split 2, pytest 1, nothing left 1, files 1" in page.text
    assert "pytest:34" in page.text
