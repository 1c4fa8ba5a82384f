"""What a report tells of a run, as numbers. Times are seconds of wall time."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from worldfork.core.errors import Corrupt
from worldfork.records.episode import Episode, FailureKind
from worldfork.records.trajectory import Trajectory
from worldfork.reward.advantages import pass_at_k
from worldfork.rollout.stored import StoredGroup, StoredRun

STAGES = ("fork", "thinking", "commands", "carry", "calibrate", "grade", "clean_up", "other")
"""Where the time of a rollout goes. `thinking` is the policy's turn less the time in which a command of it ran."""

_Z = 1.959964
"""Standard deviations that hold 95 % of a normal distribution."""

MAX_EXAMPLES = 5


@dataclass(frozen=True)
class Interval:
    """A share or a mean with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class GroupFigures:
    """One group."""

    group: StoredGroup
    scored: tuple[float, ...]
    """The rewards that there are, by index."""
    full_n: int
    """How many rewards are 1."""
    failed_n: int
    """Rollouts without a reward; those that were stopped are none of them."""
    stopped_n: int
    """Rollouts that were not run, or given up, because there was enough or the run was over."""
    rate: Interval | None
    """Of rollouts with the reward 1 among the scored ones, by Wilson's interval; None where nothing is scored."""
    stages: Mapping[str, float]
    """Seconds by stage, all rollouts together."""
    median_s: float
    """Of whole rollouts."""

    @property
    def ran_n(self) -> int:
        """Rollouts that were run to their end."""
        return len(self.scored) + self.failed_n

    @property
    def mean(self) -> float | None:
        """The mean reward."""
        return statistics.fmean(self.scored) if self.scored else None

    @property
    def constant(self) -> bool:
        """Whether all rewards are the same, so that nothing is learned from the group."""
        return len(self.scored) > 0 and max(self.scored) == min(self.scored)


@dataclass(frozen=True)
class RunFigures:
    """A whole run."""

    run_id: str
    episodes_n: int
    scored_n: int
    full_n: int
    failed_n: int
    stopped_n: int
    tasks_n: int
    solved_n: int
    """Tasks of which at least one rollout has the reward 1."""
    policies: tuple[str, ...]
    began_s: float
    """Since the Unix epoch."""
    wall_s: float
    """From the first rollout's start to the last one's end."""
    mean: Interval | None
    """The mean reward; its interval takes each group's mean as one observation."""
    rate: Interval | None
    """Share of the scored rollouts with the reward 1."""
    idle_share: float | None
    """Of the wall time, in which no policy was thinking: a model would have stood idle."""
    parallel: float | None
    """How many rollouts ran at a time, on average."""
    stages: Mapping[str, float]
    failures: tuple[tuple[str, int, tuple[Episode, ...]], ...]
    """(kind, how many, the first few), most frequent first."""
    stops: tuple[tuple[str, int], ...]
    """Why rollouts were not run to their end, `enough` or another code, most frequent first."""
    ends: tuple[tuple[str, int], ...]
    """How the policies' turns ended, most frequent first."""
    judges: tuple[tuple[str, int], ...]
    """Which kind of verifier gave the rewards, most frequent first; `nothing left` where none had anything to judge."""
    retried_n: int
    pass_at: tuple[tuple[int, float], ...]
    """(k, estimated chance that one of k rollouts of a task has the reward 1), over the groups with k scored ones
    that were not ended early: one that ends at its first success tells nothing of k others."""
    over_time: tuple[tuple[float, float], ...]
    """(seconds since the start at which a rollout ended, its reward), in that order."""
    groups: tuple[GroupFigures, ...]

    @property
    def ran_n(self) -> int:
        """Rollouts that were run to their end."""
        return self.scored_n + self.failed_n


def figures_of(run: StoredRun) -> RunFigures:
    """Work out the figures of a stored run. A trajectory that cannot be read counts as one that was not kept."""
    episodes = run.episodes
    groups = tuple(_group(group) for group in run.groups)
    scored = [each.reward for each in episodes if each.reward is not None]
    # One that was never begun has no start.
    ran = [each for each in episodes if not was_stopped(each)]
    began_s = min((each.started_s for each in ran), default=0.0)
    wall_s = max((each.started_s + each.timings.total_s for each in ran), default=0.0) - began_s
    solved = {each.task_hash for each in episodes if each.reward == 1.0}
    return RunFigures(
        run_id=run.run_id,
        episodes_n=len(episodes),
        scored_n=len(scored),
        full_n=scored.count(1.0),
        failed_n=sum(each.failed_n for each in groups),
        stopped_n=sum(each.stopped_n for each in groups),
        tasks_n=len({each.task_hash for each in episodes}),
        solved_n=len(solved),
        policies=tuple(sorted({each.policy_id for each in episodes})),
        began_s=began_s,
        wall_s=wall_s,
        mean=_mean([each.mean for each in groups if each.mean is not None], scored),
        rate=wilson(scored.count(1.0), len(scored)),
        idle_share=_idle_share(run, began_s, wall_s),
        parallel=sum(each.timings.total_s for each in episodes) / wall_s if wall_s > 0 else None,
        stages=_added(each.stages for each in groups),
        failures=_failures(episodes),
        stops=tuple(
            Counter(each.failure.code for each in episodes if was_stopped(each) and each.failure).most_common()
        ),
        ends=tuple(Counter(each.policy_end for each in episodes if not was_stopped(each)).most_common()),
        judges=tuple(Counter(_judge(each) for each in episodes if each.valid and each.verifier_id).most_common()),
        retried_n=sum(each.attempt > 1 for each in episodes),
        pass_at=tuple(_pass_at(groups)),
        over_time=tuple(_over_time(episodes, began_s)),
        groups=groups,
    )


def wilson(hits: int, count: int) -> Interval | None:
    """Return a share with Wilson's 95 % interval; None of nothing."""
    if count < 1:
        return None
    share, square = hits / count, _Z * _Z
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count * count)) / (1 + square / count)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def was_stopped(episode: Episode) -> bool:
    """Tell whether a rollout was not run to its end because there was enough, or no time."""
    return episode.failure is not None and episode.failure.kind is FailureKind.STOPPED


def stages_of(episode: Episode) -> dict[str, float]:
    """Return where the time of one rollout went."""
    times = episode.timings
    policy_s = times.policy_s or 0.0
    commands_s = min(times.commands_s or 0.0, policy_s)
    found = {
        "fork": times.fork_s or 0.0,
        "thinking": policy_s - commands_s,
        "commands": commands_s,
        "carry": times.carry_s or 0.0,
        "calibrate": times.calibrate_s or 0.0,
        "grade": times.grade_s or 0.0,
        "clean_up": times.stop_s or 0.0,
    }
    return {**found, "other": max(0.0, times.total_s - sum(found.values()))}


def _judge(episode: Episode) -> str:
    kind = episode.verifier_id.partition(":")[0]
    if kind != "auto":
        return kind
    return episode.judged_by.partition(":")[0] or "nothing left"


def _group(group: StoredGroup) -> GroupFigures:
    scored = tuple(reward for reward in group.rewards if reward is not None)
    ran = [each for each in group.episodes if not was_stopped(each)]
    return GroupFigures(
        group=group,
        scored=scored,
        full_n=scored.count(1.0),
        failed_n=len(ran) - len(scored),
        stopped_n=len(group.episodes) - len(ran),
        rate=wilson(scored.count(1.0), len(scored)),
        stages=_added(stages_of(each) for each in group.episodes),
        median_s=statistics.median(each.timings.total_s for each in ran) if ran else 0.0,
    )


def _added(stages: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total = dict.fromkeys(STAGES, 0.0)
    for each in stages:
        for name, seconds in each.items():
            total[name] += seconds
    return total


def _mean(means: Sequence[float], scored: Sequence[float]) -> Interval | None:
    if not scored:
        return None
    value = statistics.fmean(scored)
    # One group alone says nothing of others: then its rollouts are the observations.
    sample = means if len(means) > 1 else scored
    half = _Z * statistics.stdev(sample) / math.sqrt(len(sample)) if len(sample) > 1 else 0.0
    return Interval(value, max(0.0, value - half), min(1.0, value + half))


def _pass_at(groups: Sequence[GroupFigures]) -> list[tuple[int, float]]:
    groups = [each for each in groups if not each.stopped_n]
    most = max((len(each.scored) for each in groups), default=0)
    found = []
    k = 1
    while k <= most:
        chances = [pass_at_k(len(each.scored), each.full_n, k) for each in groups if len(each.scored) >= k]
        found.append((k, statistics.fmean(chances)))
        k = min(2 * k, most) if k < most else most + 1
    return found


def _over_time(episodes: Sequence[Episode], began_s: float) -> list[tuple[float, float]]:
    return sorted(
        (each.started_s + each.timings.total_s - began_s, each.reward) for each in episodes if each.reward is not None
    )


def _failures(episodes: Sequence[Episode]) -> tuple[tuple[str, int, tuple[Episode, ...]], ...]:
    by_kind: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.failure is not None and not was_stopped(episode):
            by_kind.setdefault(episode.failure.kind.value, []).append(episode)
    ordered = sorted(by_kind.items(), key=lambda each: (-len(each[1]), each[0]))
    return tuple((kind, len(found), tuple(found[:MAX_EXAMPLES])) for kind, found in ordered)


def _idle_share(run: StoredRun, began_s: float, wall_s: float) -> float | None:
    """Return the share of the wall time in which no policy thought.

    Each rollout's thinking is its policy's turn without the commands that its trajectory shows; where there is no
    trajectory, or none that can be read, it is the whole turn.
    """
    if wall_s <= 0:
        return None
    spans: list[tuple[float, float]] = []
    for episode in run.episodes:
        if episode.timings.policy_s is None:
            continue
        start = episode.started_s - began_s + (episode.timings.fork_s or 0.0)
        end = start + episode.timings.policy_s
        trajectory = _trajectory(run, episode)
        commands = [
            (start + step.began_s, start + step.ended_s)
            for step in (trajectory.steps if trajectory else ())
            if step.kind == "command"
        ]
        for left, right in _joined(commands):
            if left > start:
                spans.append((start, min(left, end)))
            start = max(start, right)
        if end > start:
            spans.append((start, end))
    busy = sum(right - left for left, right in _joined(spans))
    return min(1.0, max(0.0, 1.0 - busy / wall_s))


def _trajectory(run: StoredRun, episode: Episode) -> Trajectory | None:
    with contextlib.suppress(Corrupt):
        return run.trajectory(episode)
    return None


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same times as spans that do not overlap, in order."""
    found: list[tuple[float, float]] = []
    for left, right in sorted(spans):
        if found and left <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], right)
        elif right > left:
            found.append((left, right))
    return found
