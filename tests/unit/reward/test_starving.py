"""Who had the CPU, from made-up counts of a kernel: whatever a sandbox does, only others can have starved it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from worldfork.records.cpu import CpuUse, ThreadUse
from worldfork.reward.starving import Counts

WALL_S = 100.0
LOOKS = 200

At = Callable[[float, random.Random], CpuUse]
"""What is counted at some time."""


def thread(ran_s: float, waited_s: float, wants: bool = True, stands_back: bool = False) -> ThreadUse:
    return ThreadUse(ran_s, waited_s, wants, stands_back)


def use(used_s: float, *threads: ThreadUse, throttled_s: float = 0.0, first: int = 10, **changes: Any) -> CpuUse:
    return CpuUse(used_s, throttled_s, {first + number: each for number, each in enumerate(threads)}, **changes)


def missed_share(at: At, looks: int = LOOKS, wall_s: float = WALL_S, seed: int = 0, needed_cpu_s: float = 0.0) -> float:
    draw, counts = random.Random(seed), Counts()
    counts.take(0.0, [at(0.0, draw)])
    for at_s in sorted(draw.uniform(0, wall_s) for _ in range(looks)):
        counts.take(at_s, [at(at_s, draw)])
    counts.take(wall_s, [at(wall_s, draw)])
    return counts.missed_s(wall_s, needed_cpu_s=needed_cpu_s) / wall_s


def spinning(many: int, cpus: float, wants: float = 1.0, of: int = 1) -> At:
    """So many threads share so many CPUs evenly; each wants one for a share of the time."""

    def at(now_s: float, draw: random.Random) -> CpuUse:
        ran_s = cpus * now_s / many
        awake = draw.random() < wants
        return use(cpus * now_s, *[thread(ran_s, wants * now_s - ran_s, awake) for _ in range(many)], cpus=of)

    return at


def passing(cpus: float) -> At:
    """One process after the other, each for an instant, all of them with a thread of its own."""

    def at(now_s: float, draw: random.Random) -> CpuUse:
        return use(cpus * now_s, thread(0.001, 0.01), first=10 + int(now_s * 100))

    return at


def asleep(now_s: float, draw: random.Random) -> CpuUse:
    return use(0.01, thread(0.01, 0.0, wants=False))


@pytest.mark.parametrize(
    "honest",
    [
        spinning(1, 0.25),
        spinning(2, 0.25),
        spinning(8, 0.25),
        spinning(2, 0.4),
        passing(0.25),
        spinning(2, 0.5, of=2),
        spinning(2, 0.7, of=2),
        spinning(8, 2.0, of=8),
    ],
    ids=["one", "two", "eight", "two of more", "one after the other", "two at 4x", "two at 3x", "eight at 4x"],
)
@pytest.mark.parametrize("seed", range(5))
def test_what_works_on_a_full_machine_is_starved(honest: At, seed: int) -> None:
    assert missed_share(honest, seed=seed) >= 0.5


def behind(now_s: float, draw: random.Random) -> CpuUse:
    """Many children take a whole CPU and are gone; the tests wait for it, and then sleep."""
    busy_s = min(now_s, 95.0)
    tests = thread(0.05 * busy_s, 0.95 * busy_s, wants=now_s < 95)
    return use(busy_s, tests, *[thread(0.01, 0.2)] * 40 * (now_s < 95))


def idling(now_s: float, draw: random.Random) -> CpuUse:
    return use(0.01 * now_s, thread(0.01 * now_s, 0.99 * now_s, stands_back=True))


def toggling(now_s: float, draw: random.Random) -> CpuUse:
    """It keeps to a full CPU but for one part in ten."""
    return use(0.01 * now_s, thread(0.01 * now_s, 0.99 * now_s, stands_back=draw.random() < 0.9))


def stopped_by_its_limit(now_s: float, draw: random.Random) -> CpuUse:
    return use(0.2 * now_s, thread(0.1 * now_s, 0.9 * now_s), thread(0.1 * now_s, 0.9 * now_s), throttled_s=0.8 * now_s)


def working_apart(now_s: float, draw: random.Random) -> CpuUse:
    """A thread of its own takes a CPU that another one waits for, and would be starved otherwise."""
    return use(0.6 * now_s, thread(0.0, 0.6 * now_s), thread(0.6 * now_s, 0.4 * now_s))


def on_two_cpus(other: At) -> At:
    return lambda now_s, draw: replace(other(now_s, draw), cpus=2)


def crowded_unseen(now_s: float, draw: random.Random) -> CpuUse:
    """What takes the CPU is gone when it is looked at, or comes behind the last that is."""
    return use(now_s, thread(0.05 * now_s, 0.95 * now_s), cpus=2, whole=False)


def kept_busy_by_pid_1(now_s: float, draw: random.Random) -> CpuUse:
    return use(0.7 * now_s, thread(0.1 * now_s, 0.9 * now_s), cpus=1, init_s=0.6 * now_s)


MANY_THREADS = spinning(40, 0.7, of=2)
OTHERS = [
    asleep,
    spinning(1, 1.0),
    spinning(40, 1.0),
    spinning(40, 2.0),
    spinning(1, 0.67),
    spinning(1, 0.03, wants=0.4),
    passing(1.0),
    behind,
    idling,
    toggling,
    stopped_by_its_limit,
    working_apart,
    on_two_cpus(behind),
    on_two_cpus(idling),
    on_two_cpus(toggling),
    on_two_cpus(stopped_by_its_limit),
    spinning(3, 1.0, of=2),
    MANY_THREADS,
    spinning(2, 1.2, of=2),
    crowded_unseen,
    kept_busy_by_pid_1,
]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("seed", range(5))
def test_what_sleeps_or_takes_the_cpu_from_itself_is_not(other: At, seed: int) -> None:
    assert missed_share(other, seed=seed) < 0.5
    # Nor where its work is known to need any time; but others have most of what forty threads want on two CPUs here.
    assert other is MANY_THREADS or missed_share(other, seed=seed, needed_cpu_s=1e9) < 0.5


@pytest.mark.parametrize("many", [9, 40])
@pytest.mark.parametrize(("cpus", "of"), [(0.5, 2), (0.7, 2), (2.0, 8), (3.0, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_more_workers_than_cpus_are_starved_where_their_work_needs_more_than_they_got(
    many: int, cpus: float, of: int, seed: int
) -> None:
    workers = spinning(many, cpus, of=of)
    # Less what chance allows.
    assert missed_share(workers, seed=seed, needed_cpu_s=cpus * WALL_S + 1) >= 0.95 - cpus / of
    # What makes threads for nothing uses more than that; of it no more is known than of any other.
    assert missed_share(workers, seed=seed, needed_cpu_s=cpus * WALL_S - 1) == missed_share(workers, seed=seed)


@pytest.mark.parametrize("seed", range(200))
def test_luck_in_a_few_looks_proves_nothing(seed: int) -> None:
    """It wants a CPU two times in five, by many processes, of which none waits for long."""

    def at(now_s: float, draw: random.Random) -> CpuUse:
        wants = draw.random() < 0.4
        return use(0.0, thread(0.0, 0.001, wants), first=10 + int(now_s * 1000))

    for looks in (1, 3, 8, 40):
        assert missed_share(at, looks=looks, seed=seed) < 0.5


def test_one_thread_that_waits_is_seen_by_two_looks() -> None:
    assert missed_share(spinning(1, 0.25), looks=0) == pytest.approx(0.75)


def test_what_was_before_does_not_count() -> None:
    counts = Counts()
    counts.take(0.0, [use(50.0, thread(1.0, 90.0))])
    counts.take(10.0, [use(50.0, thread(1.0, 90.5, wants=False))])
    assert counts.missed_s(10.0) == pytest.approx(0.5)


def test_a_part_of_the_time_counts_by_itself() -> None:
    counts = Counts()
    for at_s in range(101):
        # It has a CPU until 60, none until 80, and one again.
        ran_s = min(at_s, 60) + max(0, at_s - 80)
        counts.take(at_s, [use(ran_s, thread(ran_s, at_s - ran_s))])
    assert counts.missed_s(100.0) == pytest.approx(20.0, abs=0.1)
    assert counts.missed_s(20.0) == pytest.approx(20.0, abs=0.1)
    assert counts.missed_s(20.0, since_s=81.0) == pytest.approx(0.0, abs=0.1)
    assert counts.missed_s(0.5) == 0.0


def test_two_that_take_turns_are_one() -> None:
    tests, candidate = Counts(), Counts()
    for at_s in range(101):
        turn = at_s % 2
        one = use(0.1 * at_s, thread(0.1 * at_s, 0.4 * at_s, wants=turn == 0), first=10)
        two = use(0.1 * at_s, thread(0.1 * at_s, 0.4 * at_s, wants=turn == 1), first=90)
        tests.take(at_s, [one])
        candidate.take(at_s, [one, two])
    assert tests.missed_s(100.0) < 50
    assert candidate.missed_s(100.0) >= 50
    # The other takes the CPU meanwhile.
    both = [lambda now_s: thread(0.0, 0.7 * now_s), lambda now_s: thread(0.7 * now_s, 0.0)]
    assert missed_share(lambda now_s, draw: use(0.7 * now_s, *(each(now_s) for each in both))) < 0.5


@pytest.mark.parametrize(("machine_s", "missed_s"), [(20.0, 7.5), (5.5, 3.02), (2.5, 0.02)])
def test_somebody_else_must_have_had_the_cpu(machine_s: float, missed_s: float) -> None:
    counts = Counts()
    for at_s in range(11):
        ran_s = 0.25 * at_s
        # Of what the machine ran a part was the sandbox's.
        counts.take(at_s, [use(ran_s, thread(ran_s, at_s - ran_s))], machine_s=at_s * machine_s / 10)
    assert counts.missed_s(10.0) == pytest.approx(missed_s)


def test_many_looks_and_threads_take_no_long_time() -> None:
    counts = Counts()
    for at_s in range(1000):
        counts.take(at_s, [use(0.2 * at_s, *[thread(0.001 * at_s, 0.9 * at_s) for _ in range(256)])])
    assert len(counts._looks[-1].threads) <= 64
    # Its cost is bounded by pairs of looks, not by their number.
    began_s = time.thread_time()
    assert counts.missed_s(1000.0) >= 500
    assert counts.missed_s(10.0) >= 5
    assert counts.missed_s(133.0) >= 66
    assert time.thread_time() - began_s < 1.0
