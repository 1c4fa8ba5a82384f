"""Charts as inline SVG. Their colours are the page's variables, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from worldfork.rollout.report.text import escaped, seconds

Point = tuple[float, float]

MAX_DOTS = 3000
"""A scatter with more dots shows every n-th."""

_WIDE, _HALF, _HEIGHT = 960, 460, 220
"""Units of a chart that has the page's width, or half of it: about a pixel each, so that words are of one size."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 16, 18, 30


def over_time(points: Sequence[Point], span_s: float) -> str:
    """Return rewards by the time at which they came, with their moving mean."""
    if not points:
        return empty("no rewards yet")
    span_s = max(span_s, 1e-9)
    step = max(1, math.ceil(len(points) / MAX_DOTS))
    dots = "".join(
        f'<circle cx="{_x(when / span_s, _WIDE):.1f}" cy="{_y(reward):.1f}" r="2.6"/>'
        for when, reward in points[::step]
    )
    line = " ".join(f"{_x(when / span_s, _WIDE):.1f},{_y(mean):.1f}" for when, mean in _moving_mean(points))
    marks = "".join(
        _mark_below(_x(part, _WIDE), seconds(part * span_s) if part else "0") for part in (0, 0.25, 0.5, 0.75, 1)
    )
    return _framed(
        f'{_grid(_WIDE)}<g class="dots">{dots}</g><polyline class="line" points="{line}"/>{marks}',
        f"Rewards of {len(points)} rollouts over {seconds(span_s)}, with their moving mean",
        _WIDE,
    )


def histogram(rewards: Sequence[float]) -> str:
    """Return how often rewards fall into each tenth; 0 and 1 have bars of their own."""
    if not rewards:
        return empty("no rewards yet")
    labels = ["0", *(f"{(place + 1) / 10:.1f}" for place in range(9)), "<1", "1"]
    counts = [0] * 12
    for reward in rewards:
        counts[0 if reward == 0 else 11 if reward == 1 else 1 + min(9, int(reward * 10))] += 1
    most = max(counts)
    wide = (_HALF - 2 * _RIGHT) / len(counts)
    parts = []
    for place, count in enumerate(counts):
        left, top = _RIGHT + place * wide, _y(count / most)
        kind = "bad" if place == 0 else "good" if place == 11 else "some"
        parts.append(
            f'<rect class="{kind}" x="{left + 3:.1f}" y="{top:.1f}" width="{wide - 6:.1f}" '
            f'height="{_HEIGHT - _BOTTOM - top:.1f}" rx="2"><title>{count} rollouts</title></rect>'
        )
        if count:
            parts.append(f'<text x="{left + wide / 2:.1f}" y="{max(10.0, top - 3):.1f}" class="value">{count}</text>')
        word = "between" if place == 6 else labels[place] if place in (0, 11) else ""
        parts.append(_mark_below(left + wide / 2, word))
    base = f'<line class="axis" x1="{_RIGHT}" x2="{_HALF - _RIGHT}" y1="{_y(0)}" y2="{_y(0)}"/>'
    words = f"How often each reward was given: {counts[0]} zeros, {counts[11]} ones"
    return _framed("".join(parts) + base, words, _HALF)


def rising(points: Sequence[tuple[int, float]]) -> str:
    """Return pass@k against k, k on a scale of doublings."""
    if not points:
        return empty("no group with rewards that was not ended early")
    far = math.log2(max(2, points[-1][0]))
    places = [(_x(math.log2(k) / far, _HALF), _y(chance), k, chance) for k, chance in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in places)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>pass@{k}: {chance:.3f}</title></circle>'
        f'<text class="value" x="{max(x, _LEFT + 20):.1f}" y="{y - 8 if y > 24 else y + 18:.1f}">{chance:.2f}</text>'
        for x, y, k, chance in places
    )
    marks = "".join(_mark_below(x, str(k)) for x, _, k, _ in places)
    return _framed(
        f'{_grid(_HALF)}<polyline class="line" points="{line}"/><g class="knots">{dots}</g>{marks}',
        "Chance that at least one of k rollouts of a task has the reward 1",
        _HALF,
    )


def stacked(parts: Sequence[tuple[str, float]], *, thin: bool = False) -> str:
    """Return shares of a whole as one bar; `parts` are (name, amount), and each name is a class of the page."""
    total = sum(amount for _, amount in parts)
    if total <= 0:
        return empty("no times")
    height = 10 if thin else 30
    pieces, left = [], 0.0
    for name, amount in parts:
        wide = 1000 * amount / total
        if wide > 0:
            pieces.append(
                f'<rect class="s-{escaped(name)}" x="{left:.2f}" y="0" width="{wide:.2f}" height="{height}">'
                f"<title>{escaped(name.replace('_', ' '))}: {seconds(amount)}, {amount / total:.0%}</title></rect>"
            )
        left += wide
    said = ", ".join(f"{name.replace('_', ' ')} {amount / total:.0%}" for name, amount in parts if amount > 0)
    return (
        f'<svg class="stack{" thin" if thin else ""}" viewBox="0 0 1000 {height}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escaped(said)}">{"".join(pieces)}</svg>'
    )


def strip(rewards: Sequence[float | None], low: float | None = None, high: float | None = None) -> str:
    """Return one group's rewards as ticks on a line from 0 to 1, over the span from `low` to `high`."""
    shown = [reward for reward in rewards if reward is not None]
    ticks = "".join(
        f'<line x1="{4 + 192 * reward:.1f}" x2="{4 + 192 * reward:.1f}" y1="3" y2="15"/>'
        for reward in sorted(set(shown))
    )
    band = ""
    if low is not None and high is not None:
        band = (
            f'<rect class="band" x="{4 + 192 * low:.1f}" y="6" width="{max(1.0, 192 * (high - low)):.1f}" height="6"/>'
        )
    mean = ""
    if shown:
        middle = 4 + 192 * sum(shown) / len(shown)
        mean = f'<circle class="mean" cx="{middle:.1f}" cy="9" r="3.4"/>'
    said = f"rewards from {min(shown):.2f} to {max(shown):.2f}" if shown else "no rewards"
    return (
        f'<svg class="strip" viewBox="0 0 200 18" role="img" aria-label="{said}">'
        f'<line class="axis" x1="4" x2="196" y1="9" y2="9"/>{band}<g class="ticks">{ticks}</g>{mean}</svg>'
    )


def bars(rows: Sequence[tuple[str, float, str]], kind: str) -> str:
    """Return horizontal bars as a table that reads without its bars too; rows are (name, amount, words)."""
    most = max((amount for _, amount, _ in rows), default=0.0) or 1.0
    lines = "".join(
        f'<tr><th scope="row">{escaped(name)}</th><td class="bar"><svg viewBox="0 0 100 10" '
        f'preserveAspectRatio="none" aria-hidden="true"><rect class="{kind}" width="{100 * amount / most:.2f}" '
        f'height="10"/></svg></td><td class="number">{escaped(words)}</td></tr>'
        for name, amount, words in rows
    )
    return f'<table class="bars"><tbody>{lines}</tbody></table>'


def empty(words: str) -> str:
    """Return what stands where there is nothing to draw."""
    return f'<p class="empty">{escaped(words)}</p>'


def _moving_mean(points: Sequence[Point]) -> Iterator[Point]:
    """Yield the mean over the last tenth of the rewards, at most 200 places of it."""
    width = max(1, len(points) // 10)
    step = max(1, len(points) // 200)
    total = 0.0
    for place, (when, reward) in enumerate(points):
        total += reward - (points[place - width][1] if place >= width else 0.0)
        if place % step == 0 or place == len(points) - 1:
            yield when, min(1.0, max(0.0, total / min(width, place + 1)))


def _framed(inside: str, words: str, width: int) -> str:
    return f'<svg class="chart" viewBox="0 0 {width} {_HEIGHT}" role="img" aria-label="{escaped(words)}">{inside}</svg>'


def _grid(width: int) -> str:
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{_y(part):.1f}" y2="{_y(part):.1f}"/>'
        f'<text class="side" x="{_LEFT - 6}" y="{_y(part) + 4:.1f}">{part:g}</text>'
        for part in (0, 0.25, 0.5, 0.75, 1)
    )


def _mark_below(x: float, words: str) -> str:
    return f'<text class="below" x="{x:.1f}" y="{_HEIGHT - 10}">{escaped(words)}</text>'


def _x(part: float, width: int) -> float:
    return _LEFT + min(1.0, max(0.0, part)) * (width - _LEFT - _RIGHT)


def _y(part: float) -> float:
    return _HEIGHT - _BOTTOM - part * (_HEIGHT - _BOTTOM - _TOP)
