"""Attacks before the verifiers that claim to resist them: never more than the same wrong code without the attack.

And never no score at all, which is sworn of every verifier. The correct solution is worth 1.0 beside each kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from tests.redteam.corpus import ATTACKS
from tests.redteam.judges import Judge, judges
from tests.redteam.kinds import GROUPS
from tests.redteam.records import VERIFIERS, Attack
from tests.redteam.running import Arena, Campaign, Rewards, others, sworn
from tests.redteam.tasks import UNFIT

from worldfork.rollout.starts import StartingStates

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]

SHARING = 2
"""Before so many verifiers, another pair for each kind, the correct solution is tried beside an attack."""
MEETING = 2
"""Before so many of the verifiers that claim to resist it an attack is tried, before others each time; the run of
everything tries it before the rest."""


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Mapping[str, Judge]:
    return judges(tmp_path_factory.mktemp("judges"))


@pytest.fixture(scope="module")
def alone() -> Rewards:
    return {}


def of_group(group: str, slow: bool) -> list[Attack]:
    first, last = GROUPS[group]
    return [attack for attack in ATTACKS if first <= attack.number <= last and attack.slow is slow]


def some_sworn(attack: Attack, names: Iterable[str]) -> list[str]:
    every = sworn(attack, names)
    first = ATTACKS.index(attack)
    return [every[(first + each) % len(every)] for each in range(min(MEETING, len(every)))]


def rest_sworn(attack: Attack, names: Iterable[str]) -> list[str]:
    tried = some_sworn(attack, names)
    return [name for name in sworn(attack, names) if name not in tried]


def told(tried: Campaign) -> None:
    """Nothing that was sworn is broken; what nobody could tell is no pass."""
    assert tried.broken == []
    if tried.untold:
        pytest.skip(f"others use this machine's CPUs: nobody can tell whom these starve: {' '.join(tried.untold)}")


def beside(attack: Attack) -> list[str]:
    fit = [name for name in VERIFIERS if name not in UNFIT.get(attack.task, {})]
    return [fit[(attack.number + each) % len(fit)] for each in range(SHARING)]


def campaign(
    attacks: list[Attack],
    verifiers: Mapping[str, Judge],
    alone: Rewards,
    before: Callable[[Attack, Iterable[str]], Iterable[str]],
    beside: Callable[[Attack], Iterable[str]],
) -> Campaign:
    async def run() -> Campaign:
        arena = Arena(await StartingStates.open(), verifiers, alone)
        tried = Campaign(arena, lambda attack: before(attack, verifiers), beside)
        await tried.run(attacks)
        return tried

    return asyncio.run(run())


@pytest.mark.parametrize("group", GROUPS)
def test_attacks_earn_nothing_and_void_nothing(group: str, verifiers: Mapping[str, Judge], alone: Rewards) -> None:
    attacks = of_group(group, slow=False)
    tried = campaign(attacks, verifiers, alone, some_sworn, beside)
    assert tried.tried.keys() == {attack.name for attack in attacks}
    assert all(tried.tried.values()), "no verifier claims to resist an attack"
    assert {each.beside.number for each in tried.honest} == {attack.number for attack in attacks}
    assert all(0 < reward < 1 for rewards in alone.values() for reward in rewards.values()), (
        "wrong code has to be worth something, and not everything"
    )
    told(tried)


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", GROUPS)
def test_attacks_earn_nothing_before_the_rest_either(
    group: str, verifiers: Mapping[str, Judge], alone: Rewards
) -> None:
    attacks = [attack for attack in of_group(group, slow=False) if rest_sworn(attack, verifiers)]
    told(campaign(attacks, verifiers, alone, rest_sworn, lambda attack: ()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", [group for group in GROUPS if of_group(group, slow=True)])
def test_slow_attacks_earn_nothing_and_void_nothing(group: str, verifiers: Mapping[str, Judge], alone: Rewards) -> None:
    told(campaign(of_group(group, slow=True), verifiers, alone, sworn, beside))


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", GROUPS)
def test_attacks_void_nothing_where_they_may_win(group: str, verifiers: Mapping[str, Judge], alone: Rewards) -> None:
    attacks = [attack for slow in (False, True) for attack in of_group(group, slow) if others(attack, verifiers)]
    told(campaign(attacks, verifiers, alone, others, lambda attack: ()))
