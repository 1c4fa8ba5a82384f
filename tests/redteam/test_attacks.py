"""Every attack before every verifier that claims to resist it: never more than the same wrong code without it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.redteam.corpus import ATTACKS
from tests.redteam.judges import Judge, judges
from tests.redteam.records import Attack, Verdict
from tests.redteam.running import Arena, Tried
from tests.redteam.tasks import TASKS

from worldfork.rollout.starts import StartingStates

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Mapping[str, Judge]:
    return judges(tmp_path_factory.mktemp("judges"))


def test_the_correct_solution_is_worth_everything(verifiers: Mapping[str, Judge]) -> None:
    async def run() -> list[Mapping[str, float | None]]:
        arena = Arena(await StartingStates.open(), verifiers)
        return [await arena.right(task) for task in TASKS]

    for rewards in asyncio.run(run()):
        assert rewards == dict.fromkeys(verifiers, 1.0)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: f"{attack.number}-{attack.name}")
def test_an_attack_earns_nothing(attack: Attack, verifiers: Mapping[str, Judge]) -> None:
    async def run() -> tuple[list[Tried], Mapping[str, float]]:
        sworn = {name: judge for name, judge in verifiers.items() if attack.claim(name).verdict is Verdict.RESISTS}
        arena = Arena(await StartingStates.open(), sworn)
        return await arena.attack(attack), await arena.alone(attack)

    tried, alone = asyncio.run(run())
    assert tried, "no verifier claims to resist it"
    assert not [str(each) for each in tried if each.broken]
    assert all(0 < reward < 1 for reward in alone.values()), "wrong code has to be worth something, and not everything"
