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

pytestmark = pytest.mark.timeout(900)

SHARING = 2
"""Before so many verifiers, another pair for each kind, the correct solution is tried beside an attack."""


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Mapping[str, Judge]:
    return judges(tmp_path_factory.mktemp("judges"))


@pytest.fixture(scope="module")
def alone() -> Rewards:
    return {}


def of_group(group: str, slow: bool) -> list[Attack]:
    first, last = GROUPS[group]
    return [attack for attack in ATTACKS if first <= attack.number <= last and attack.slow is slow]


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
    tried = campaign(attacks, verifiers, alone, sworn, beside)
    assert tried.tried.keys() == {attack.name for attack in attacks}
    assert all(tried.tried.values()), "no verifier claims to resist an attack"
    assert tried.broken == []
    assert {each.beside.number for each in tried.honest} == {attack.number for attack in attacks}
    assert all(0 < reward < 1 for rewards in alone.values() for reward in rewards.values()), (
        "wrong code has to be worth something, and not everything"
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", [group for group in GROUPS if of_group(group, slow=True)])
def test_slow_attacks_earn_nothing_and_void_nothing(group: str, verifiers: Mapping[str, Judge], alone: Rewards) -> None:
    tried = campaign(of_group(group, slow=True), verifiers, alone, sworn, beside)
    assert tried.broken == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", GROUPS)
def test_attacks_void_nothing_where_they_may_win(group: str, verifiers: Mapping[str, Judge], alone: Rewards) -> None:
    attacks = [attack for slow in (False, True) for attack in of_group(group, slow) if others(attack, verifiers)]
    tried = campaign(attacks, verifiers, alone, others, lambda attack: ())
    assert tried.broken == []
