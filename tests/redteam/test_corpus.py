"""The corpus is whole, and the page shows it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.redteam.corpus import ATTACKS
from tests.redteam.kinds import GROUPS, KINDS, NOT_APPLICABLE, OWN_KINDS
from tests.redteam.matrix import BEGIN, END, PAGE, Made, add_kept, cell, page_part, read_kept
from tests.redteam.records import PLAIN, VERIFIERS, Attack, Verdict, Way, is_open
from tests.redteam.running import Campaign, Honest, Tried, others, sworn
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
    elif number in OWN_KINDS:
        assert len(of_kind) > 1
        assert all(attack.own for attack in of_kind)
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


WON = Attack("won", 19, "it wins", Way.CODE, {"answer.py": ""})


def test_no_score_is_a_win_and_breaks_a_claim_of_every_verifier() -> None:
    for name in VERIFIERS:
        if WON.claim(name).verdict is not Verdict.NOT:
            void = Tried(WON, name, None, 0.3)
            assert (void.held, void.void, void.overpaid, void.broken) == (False, True, False, True)
            assert cell(WON, name, void) == "**voids**"
    assert not Tried(WON, PLAIN, None, 0.3).broken


def test_more_than_the_same_wrong_code_breaks_a_claim_where_there_is_one() -> None:
    assert Tried(WON, "split", 0.4, 0.3).broken
    assert cell(WON, "split", Tried(WON, "split", 0.4, 0.3)) == "**broken**"
    assert not Tried(WON, "split", 0.3, 0.3).broken
    assert not Tried(WON, "pytest", 1.0, 0.3).broken
    assert cell(WON, "pytest", Tried(WON, "pytest", 1.0, 0.3)) == "**wins** 1.00"


def test_what_is_broken_is_told_and_counted() -> None:
    void = Tried(WON, "pytest", None, 0.3, "overload: no CPU")
    poor = Honest(WON, {"split": 0.5}, {})
    campaign = Campaign(None, sworn, lambda attack: ())  # type: ignore[arg-type]
    campaign.tried, campaign.honest = {"won": [void]}, [poor, Honest(WON, {"split": 1.0}, {})]
    assert campaign.broken == [str(void), str(poor)]
    page = page_part(Made({"won": {"pytest": void}}, [poor], campaign.broken, {}))
    assert "| sworn: never without a score | 1 |\n| of these broken | 1 |" in page


def test_a_run_can_be_gone_on_with(tmp_path: Path) -> None:
    kept, attack = tmp_path / "kept", ATTACKS[0]
    assert read_kept(kept).rows == {}
    void, held = Tried(attack, "pytest", None, 0.3, "why"), Tried(attack, "pytest", 0.3, 0.3)
    add_kept(kept, attack, [void], Honest(attack, {"split": 1.0}, {}), 2.0)
    assert read_kept(kept).broken == [str(void)]
    add_kept(kept, attack, [held], Honest(attack, {"split": None}, {"split": "lost"}), 1.0)
    made = read_kept(kept)
    assert made.rows == {attack.name: {"pytest": held}}
    assert made.broken == [str(Honest(attack, {"split": None}, {"split": "lost"}))]
    assert made.seconds == {attack.name: 1.0}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_every_verifier_that_an_attack_meets_is_tried(attack: Attack) -> None:
    met = [name for name in VERIFIERS if attack.claim(name).verdict is not Verdict.NOT]
    assert sorted([*sworn(attack, VERIFIERS), *others(attack, VERIFIERS)]) == sorted(met)
    assert all(attack.never_none(name) for name in met)


def test_what_is_sworn_of_a_score_holds_where_winning_is_open() -> None:
    assert WON.but(pytest=is_open("it shares a process")).never_none("pytest")


def test_the_page_has_the_matrix_of_this_corpus() -> None:
    text = PAGE.read_text(encoding="utf-8")
    matrix = text.partition(BEGIN)[2].partition(END)[0]
    assert matrix, "run python -m tests.redteam.matrix"
    for attack in ATTACKS:
        assert f"`{attack.name}`" in matrix, f"{attack.name} is not on the page; run python -m tests.redteam.matrix"
    assert "**broken**" not in matrix
