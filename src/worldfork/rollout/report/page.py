"""The page of a run: one file, complete in itself, that is read without scripts and without a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from worldfork.core.errors import ConfigError
from worldfork.core.whole_file import whole_file
from worldfork.rollout.report import charts
from worldfork.rollout.report.episodes import episode_anchor, episode_sections
from worldfork.rollout.report.figures import STAGES, GroupFigures, Interval, RunFigures, figures_of
from worldfork.rollout.report.style import STYLE
from worldfork.rollout.report.text import escaped, number, seconds
from worldfork.rollout.stored import StoredRun

MAX_ROWS = 2000
"""Groups in the table; all of them are in the figures."""
SLOWEST = 10

_STAGE_WORDS = {
    "fork": "fork",
    "thinking": "policy, thinking",
    "commands": "policy, its commands",
    "carry": "carrying out",
    "calibrate": "waiting for calibration",
    "grade": "grading",
    "clean_up": "clean-up",
    "other": "waiting for a place, and the rest",
}


def write_report(run: StoredRun, path: str | Path) -> RunFigures:
    """Write the page of a run to a file, which appears whole or not at all; return the figures on it.

    Raises:
        ConfigError: the file cannot be written.
    """
    figures = figures_of(run)
    target = Path(path)
    try:
        with whole_file(target) as beside, beside.open("w", encoding="utf-8") as file:
            for part in page(run, figures):
                file.write(part)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror or error}", path=str(target)) from error
    return figures


def page(run: StoredRun, figures: RunFigures) -> Iterator[str]:
    """Yield the page in pieces."""
    yield (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Nothing on this page may load or run anything, whatever a policy wrote.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Run {escaped(figures.run_id)}</title><style>{STYLE}</style></head><body><main>"
    )
    yield _header(figures)
    yield _rewards(figures)
    yield _groups(figures)
    yield _failures(figures)
    yield _times(figures)
    yield '<h2 id="episodes">Episodes</h2><p class="lead">Each group unfolds to its episodes, and each of those to '
    yield "what it left and what it did.</p>"
    yield from episode_sections(run, figures)
    yield "<footer>Made by worldfork from the episodes of this run alone.</footer></main></body></html>\n"


def _header(figures: RunFigures) -> str:
    began = datetime.fromtimestamp(figures.began_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    policies = ", ".join(figures.policies[:6]) + (", ..." if len(figures.policies) > 6 else "")
    tiles = [
        ("mean reward", number(figures.mean.value if figures.mean else None), _between(figures.mean)),
        (
            "reward 1",
            _percent(figures.rate),
            f"{figures.full_n} of {figures.scored_n} scored; {_between(figures.rate)}",
        ),
        ("tasks solved", f"{figures.solved_n} of {figures.tasks_n}", "by at least one rollout"),
        ("failed", str(figures.failed_n), _of_all(figures)),
        ("wall time", seconds(figures.wall_s), f"{number(figures.parallel, 1)} rollouts at a time"),
    ]
    shown = "".join(
        f'<div class="tile"><span class="name">{name}</span><b>{escaped(value)}</b><span>{escaped(words)}</span></div>'
        for name, value, words in tiles
    )
    places = (("rewards", "Rewards"), ("groups", "Groups"), ("failures", "Failures"), ("times", "Times"),
              ("episodes", "Episodes"))  # fmt: skip
    judges = ", ".join(f"{kind} {count}" for kind, count in figures.judges)
    links = "".join(f'<a href="#{place}">{words}</a>' for place, words in places)
    return (
        f"<header><h1>{figures.ran_n} rollouts of {figures.tasks_n} tasks</h1>"
        f"<p>{escaped(policies)} · {escaped(figures.run_id)} · began {began}"
        f"{f' · judged by {escaped(judges)}' if judges else ''}</p><nav>{links}</nav></header>"
        f'<div class="tiles">{shown}</div>'
    )


def _rewards(figures: RunFigures) -> str:
    scored = [reward for group in figures.groups for reward in group.scored]
    return (
        '<h2 id="rewards">Rewards</h2><p class="lead">One dot per rollout at the time it ended; the line is the mean '
        "of the last tenth. Intervals on this page hold 95 %.</p>"
        f'<div class="card">{charts.over_time(figures.over_time, figures.wall_s)}</div><div class="two">'
        f'<div class="card"><h3>How often each reward</h3>{charts.histogram(scored)}</div>'
        f'<div class="card"><h3>Solved by one of k rollouts (pass@k)</h3>{charts.rising(figures.pass_at)}'
        '<p class="soft">For groups that ran in full: a rule that ends them at a success makes it too high.</p>'
        "</div></div>"
    )


def _groups(figures: RunFigures) -> str:
    rows = "".join(_group_row(place, group) for place, group in enumerate(figures.groups[:MAX_ROWS]))
    missing = len(figures.groups) - MAX_ROWS
    more = f'<p class="empty">and {missing} more groups</p>' if missing > 0 else ""
    flat = sum(group.constant and len(group.scored) > 1 for group in figures.groups)
    return (
        f'<h2 id="groups">Groups</h2><p class="lead">Ticks are rewards from 0 to 1, the dot is their mean, the band '
        f"the interval of the share with reward 1. {flat} of {len(figures.groups)} groups have no variance.</p>"
        '<div class="card wide"><table><thead><tr><th>task</th><th class="number">rollouts</th>'
        '<th class="number">mean</th><th class="rewards">rewards</th><th class="number">reward 1</th>'
        '<th class="number">failed</th>'
        f"</tr></thead><tbody>{rows}</tbody></table>{more}</div>"
    )


def _group_row(place: int, figures: GroupFigures) -> str:
    rate = figures.rate
    band = (rate.low, rate.high) if rate else (None, None)
    title = f' title="{_between(rate)}"' if rate else ""
    return (
        f'<tr><td><a href="#g{place}">{escaped(figures.group.task_id)}</a></td>'
        f'<td class="number">{figures.ran_n}</td><td class="number">{number(figures.mean)}</td>'
        f"<td>{charts.strip(figures.group.rewards, *band)}</td>"
        f'<td class="number"{title}>{_percent(rate)}</td><td class="number">{figures.failed_n or ""}</td></tr>'
    )


def _failures(figures: RunFigures) -> str:
    places = {
        episode.key: episode_anchor(place, episode)
        for place, group in enumerate(figures.groups)
        for episode in group.group.episodes
    }
    kinds = charts.bars([(kind, count, str(count)) for kind, count, _ in figures.failures], "bad")
    examples = "".join(
        f'<tr><td>{escaped(kind)}</td><td><a href="#{escaped(places[episode.key])}">{escaped(episode.task_id)} '
        f"{episode.index}</a></td><td>{escaped(episode.failure.message[:300] if episode.failure else '')}</td></tr>"
        for kind, _, found in figures.failures
        for episode in found
    )
    table = (
        f'<div class="card wide"><table><thead><tr><th>kind</th><th>episode</th><th>what it was</th></tr></thead>'
        f"<tbody>{examples}</tbody></table></div>"
    )
    ends = charts.bars([(end, count, str(count)) for end, count in figures.ends], "some")
    return (
        '<h2 id="failures">Failures</h2><p class="lead">A failure is a fault of the machinery: it has no reward and '
        f"counts nowhere. What a policy did to its own sandbox is scored. {figures.retried_n} rollouts needed more "
        'than one attempt.</p><div class="two">'
        f'<div class="card"><h3>By kind</h3>{kinds if figures.failures else charts.empty("none")}</div>'
        f'<div class="card"><h3>How turns ended</h3>{ends}</div></div>{table if examples else ""}'
    )


def _times(figures: RunFigures) -> str:
    total = sum(figures.stages.values())
    legend = "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="s-{name}" width="10" height="10"/></svg>'
        f"{_STAGE_WORDS[name]} <b>{figures.stages[name] / total:.1%}</b> {seconds(figures.stages[name])}</li>"
        for name in STAGES
        if total > 0 and figures.stages[name] > 0
    )
    idle = "" if figures.idle_share is None else (
        f" For {figures.idle_share:.0%} of the wall time no policy was thinking: a model would have stood idle."
    )  # fmt: skip
    return (
        f'<h2 id="times">Where the time went</h2><p class="lead">All rollouts together: {seconds(total)} in '
        f"{seconds(figures.wall_s)} of wall time.{idle}</p>"
        f'<div class="card">{charts.stacked([(name, figures.stages[name]) for name in STAGES])}'
        f'<ul class="legend">{legend}</ul></div>{_slowest(figures.groups)}'
    )


def _slowest(groups: Sequence[GroupFigures]) -> str:
    order = sorted(range(len(groups)), key=lambda place: (-groups[place].median_s, place))[:SLOWEST]
    rows = "".join(
        f'<tr><td><a href="#g{place}">{escaped(groups[place].group.task_id)}</a></td>'
        f'<td class="number">{seconds(groups[place].median_s)}</td>'
        f"<td>{charts.stacked([(name, groups[place].stages[name]) for name in STAGES], thin=True)}</td></tr>"
        for place in order
    )
    return (
        '<div class="card wide"><h3>Slowest tasks</h3><table><thead><tr><th>task</th><th class="number">median rollout'
        f'</th><th class="rewards">where it went</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _of_all(figures: RunFigures) -> str:
    why = ", ".join(f"{escaped(code)} {count}" for code, count in figures.stops)
    stopped = f"; {figures.stopped_n} more were not run to their end: {why}" if figures.stopped_n else ""
    return f"of {figures.ran_n}: no reward, left out of every figure{stopped}"


def _percent(share: Interval | None) -> str:
    return "-" if share is None else f"{share.value:.0%}"


def _between(interval: Interval | None) -> str:
    return "no rewards" if interval is None else f"{interval.low:.2f} to {interval.high:.2f}"
