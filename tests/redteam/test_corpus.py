"""The corpus is whole, and the page shows it as it is."""

from __future__ import annotations

import pytest
from tests.redteam.corpus import ATTACKS
from tests.redteam.kinds import GROUPS, KINDS, NOT_APPLICABLE
from tests.redteam.matrix import BEGIN, END, PAGE
from tests.redteam.records import VERIFIERS, Attack, Verdict
from tests.redteam.tasks import TASKS, WRONG, WRONG_CODE


def test_names_are_unique() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)


def test_every_kind_is_in_one_group() -> None:
    assert [number for first, last in GROUPS.values() for number in range(first, last + 1)] == list(KINDS)


@pytest.mark.parametrize("number", KINDS)
def test_every_kind_has_an_attack_and_a_variant_of_our_own_or_a_reason(number: int) -> None:
    of_kind = [attack for attack in ATTACKS if attack.number == number]
    if number in NOT_APPLICABLE:
        assert not of_kind
        assert len(NOT_APPLICABLE[number]) > 40
    else:
        assert {attack.own for attack in of_kind} == {False, True}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_is_well_formed(attack: Attack) -> None:
    assert attack.task in TASKS
    assert attack.does
    assert {name for name in VERIFIERS if attack.claim(name)} == set(VERIFIERS)
    for name in VERIFIERS:
        claim = attack.claim(name)
        assert claim.verdict is Verdict.RESISTS or claim.reason, f"{name} says {claim.verdict.value} without a reason"
    # Else it could not earn less than the wrong code and still win.
    assert attack.files.get("answer.py", WRONG_CODE) != "" or attack.wrong is not None
    assert attack.files or attack.commands
    assert set(WRONG) <= {"answer.py", "values.json"}


def test_the_page_has_the_matrix_of_this_corpus() -> None:
    text = PAGE.read_text(encoding="utf-8")
    matrix = text.partition(BEGIN)[2].partition(END)[0]
    assert matrix, "run python -m tests.redteam.matrix"
    for attack in ATTACKS:
        assert f"`{attack.name}`" in matrix, f"{attack.name} is not on the page; run python -m tests.redteam.matrix"
    assert "**broken**" not in matrix
