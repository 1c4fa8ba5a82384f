"""The whole corpus, in the order of the kinds."""

from __future__ import annotations

from tests.redteam.attacks import (
    channel,
    leaving,
    programs,
    reading,
    resources,
    results,
    runner,
    same_process,
    start_up,
    voiding,
)
from tests.redteam.records import Attack

_PARTS = (runner, start_up, leaving, same_process, results, programs, reading, resources, channel, voiding)

ATTACKS: tuple[Attack, ...] = tuple(
    sorted((attack for part in _PARTS for attack in part.ATTACKS), key=lambda attack: attack.number)
)
