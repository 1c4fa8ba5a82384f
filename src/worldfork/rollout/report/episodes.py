"""The part of the page that leads from a group to each of its episodes, and from there to what it did and left."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from worldfork.core.errors import Corrupt
from worldfork.records.episode import Episode, ranked
from worldfork.records.trajectory import Step, Trajectory
from worldfork.rollout.journal import Key
from worldfork.rollout.recording import bounded
from worldfork.rollout.report.charts import stacked, strip
from worldfork.rollout.report.figures import GroupFigures, RunFigures, stages_of, was_stopped
from worldfork.rollout.report.text import escaped, number, seconds
from worldfork.rollout.stored import StoredRun

MAX_DETAIL_CHARACTERS = 12 << 20
"""What trajectories and diffs may take of the page, together."""
MAX_SHOWN_OUTPUT = 8_000
MAX_SHOWN_DIFF = 40_000
MAX_SHOWN_STEPS = 200
MAX_SHOWN_IDS = 40
MAX_EPISODES = 20_000
"""Episodes with a place of their own on the page."""


def episode_anchor(group: int, episode: Episode) -> str:
    """Return the place of an episode on the page."""
    return f"e{group}-{episode.index}" + (f"-{episode.rollout_id}" if episode.rollout_id else "")


def episode_sections(run: StoredRun, figures: RunFigures) -> Iterator[str]:
    """Yield the folded section of each group with its episodes.

    Where there is not room for the trajectories and diffs of all, each group's best and worst come first.
    """
    details = _details(run, figures)
    room = MAX_EPISODES
    for place, group in enumerate(figures.groups):
        ran = [each for each in group.group.episodes if not was_stopped(each)]
        shown = ran[:room]
        room -= len(shown)
        yield _group(place, group, [_episode(place, each, details.get(each.key)) for each in shown], len(ran))


def _details(run: StoredRun, figures: RunFigures) -> dict[Key, str]:
    found: dict[Key, str] = {}
    room = MAX_DETAIL_CHARACTERS
    ranked = [_by_worth(group.group.episodes) for group in figures.groups]
    for row in itertools.zip_longest(*ranked):
        for episode in row:
            if episode is None or was_stopped(episode):
                continue
            text = _detail(run, episode)
            if len(text) > room:
                return found
            room -= len(text)
            found[episode.key] = text
    return found


def _by_worth(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the best, the worst, and then the rest by index."""
    order = ranked(episodes)
    ends = order[:1] + order[1:][-1:]
    keys = {each.key for each in ends}
    return ends + [each for each in episodes if each.key not in keys]


def _group(place: int, figures: GroupFigures, episodes: Sequence[str], ran: int) -> str:
    group = figures.group
    marks = [f'<span class="soft">mean {number(figures.mean)}</span>']
    marks.append(f'<span class="soft">{figures.full_n} of {ran} with 1</span>')
    if figures.failed_n:
        marks.append(f'<span class="mark bad">{figures.failed_n} failed</span>')
    if figures.stopped_n:
        marks.append(f'<span class="mark">ended early, {figures.stopped_n} not run</span>')
    if figures.constant and len(figures.scored) > 1:
        marks.append('<span class="mark">no variance</span>')
    missing = ran - len(episodes)
    rest = f'<p class="empty">{missing} more episodes are in the run, not on this page</p>' if missing else ""
    return (
        f'<details id="g{place}"><summary><b>{escaped(group.task_id)}</b>'
        f'<span class="soft">{escaped(group.policy_id)}</span>{"".join(marks)}</summary>'
        f'<div class="inside">{strip(group.rewards)}{"".join(episodes)}{rest}</div></details>'
    )


def _episode(place: int, episode: Episode, detail: str | None) -> str:
    if episode.failure is not None:
        mark = f'<span class="mark bad">{escaped(episode.failure.kind.value)}</span>'
    else:
        kind = " good" if episode.reward == 1.0 else ""
        mark = f'<span class="mark{kind}">{number(episode.reward)}</span>'
    ended = "" if episode.policy_end == "finished" else f'<span class="soft">{escaped(episode.policy_end)}</span>'
    if detail is None:
        detail = '<p class="empty">too long for this page; `worldfork export-episodes` has it</p>'
    return (
        f'<details id="{escaped(episode_anchor(place, episode))}"><summary><b>{episode.index}</b>{mark}'
        f'<span class="soft">{seconds(episode.timings.total_s)}</span>{ended}</summary>'
        f'<div class="inside">{detail}</div></details>'
    )


def _detail(run: StoredRun, episode: Episode) -> str:
    try:
        diff, trajectory = run.diff(episode), run.trajectory(episode)
    except Corrupt as error:
        return _facts(episode) + f'<p class="empty">{escaped(error.message)}</p>'
    parts = [_facts(episode), stacked(list(stages_of(episode).items()), thin=True), _tests(episode)]
    parts += ["<h3>What it left</h3>", _diff(diff)]
    parts += ["<h3>What it did</h3>", _steps(trajectory)]
    return "".join(parts)


def _facts(episode: Episode) -> str:
    failure = episode.failure
    rows: list[tuple[str, object]] = [
        ("failure", None if failure is None else f"{failure.kind.value} ({failure.code}): {failure.message}"),
        ("turn", episode.policy_end),
        ("grading", episode.grade_end),
        ("parts", ", ".join(f"{name} {value:.3f}" for name, value in sorted(episode.parts.items()))),
        ("verifier", f"{episode.verifier_id} ({episode.trust})" if episode.verifier_id else episode.trust),
        ("judged by", episode.judged_by),
        ("attempt", episode.attempt if episode.attempt > 1 else None),
        ("faults before", ", ".join(episode.faults)),
        ("seed", episode.seed),
        ("started from", episode.snapshot_id),
        ("acted in", episode.sandbox_id),
        ("graded in", episode.grading_sandbox_id),
        ("end kept as", episode.final_snapshot_id),
    ]
    lines = "".join(
        f"<dt>{name}</dt><dd>{escaped(bounded(str(value), MAX_SHOWN_OUTPUT))}</dd>"
        for name, value in rows
        if value not in (None, "")
    )
    return f"<dl>{lines}</dl>"


def _tests(episode: Episode) -> str:
    if not episode.expected:
        return ""
    passed, failed = set(episode.passed), set(episode.failed)
    missed = [each for each in episode.expected if each not in passed]
    words = f"<p>{len(passed)} of {len(episode.expected)} expected tests passed.</p>"
    shown = "".join(
        f"<li><code>{escaped(each)}</code> {'' if each in failed else '<span class=soft>did not run</span>'}</li>"
        for each in missed[:MAX_SHOWN_IDS]
    )
    more = f"<li class=soft>and {len(missed) - MAX_SHOWN_IDS} more</li>" if len(missed) > MAX_SHOWN_IDS else ""
    return words + (f"<ul>{shown}{more}</ul>" if shown else "")


def _diff(diff: str | None) -> str:
    if diff is None:
        return '<p class="empty">not kept</p>'
    if not diff.strip():
        return '<p class="empty">nothing was changed</p>'
    lines = "".join(
        f'<span class="{_kind_of(line)}">{escaped(line) or " "}</span>'
        for line in bounded(diff, MAX_SHOWN_DIFF).rstrip("\n").split("\n")
    )
    return f"<pre>{lines}</pre>"


def _kind_of(line: str) -> str:
    if line.startswith(("+++", "---", "@@", "diff ", "index ")):
        return "place"
    return {"+": "add", "-": "cut"}.get(line[:1], "same")


def _steps(trajectory: Trajectory | None) -> str:
    if trajectory is None:
        return '<p class="empty">not kept</p>'
    if not trajectory.steps:
        return '<p class="empty">no steps</p>'
    shown = "".join(f"<li>{_step(step)}</li>" for step in trajectory.steps[:MAX_SHOWN_STEPS])
    missing = len(trajectory.steps) - MAX_SHOWN_STEPS
    more = f"<li class=soft>and {missing} more steps</li>" if missing > 0 else ""
    cut = "<li class=soft>the record was cut off here</li>" if trajectory.truncated else ""
    facts = ", ".join(f"{name}: {value}" for name, value in sorted(trajectory.facts.items()))
    told = f'<p class="soft">{escaped(bounded(facts, MAX_SHOWN_OUTPUT))}</p>' if facts else ""
    return f'{told}<ol class="steps">{shown}{more}{cut}</ol>'


def _step(step: Step) -> str:
    said = f"<p>{escaped(bounded(step.message, MAX_SHOWN_OUTPUT))}</p>" if step.message else ""
    action = escaped(bounded(step.action, MAX_SHOWN_OUTPUT))
    if step.kind == "command":
        action = f"<pre>$ {action}</pre>"
    elif step.kind == "write":
        action = f"<p><code>{action}</code> {escaped(step.reason) or 'written'}</p>"
    else:
        action = f"<p>{action}</p>"
    output = f"<pre>{escaped(bounded(step.output, MAX_SHOWN_OUTPUT))}</pre>" if step.output else ""
    return f'<span class="when">{_when(step)}</span>{said}{action}{output}'


def _when(step: Step) -> str:
    words = [f"{seconds(step.began_s)}", escaped(step.kind)]
    if step.ended_s > step.began_s:
        words.append(f"took {seconds(step.ended_s - step.began_s)}")
    if step.exit_code is not None:
        words.append(f"exit code {escaped(step.exit_code)}")
    if step.reason not in ("", "exited") and step.kind == "command":
        words.append(escaped(step.reason))
    if step.prompt_tokens is not None or step.completion_tokens is not None:
        words.append(f"{escaped(step.prompt_tokens or 0)} + {escaped(step.completion_tokens or 0)} tokens")
    return " · ".join(words)
