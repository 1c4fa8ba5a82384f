"""What the rules keep, and why; and that a wrong clock only ever keeps more."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stores import record_of

from worldfork.core.errors import ConfigError
from worldfork.keeping.keep_rules import KeepRules, choose
from worldfork.records.snapshot import SnapshotRecord

NOW_S = 1_700_000_000.0


def records(*ages_s: float, labels: tuple[str | None, ...] = ()) -> list[SnapshotRecord]:
    found = []
    for number, age_s in enumerate(ages_s):
        label = labels[number] if number < len(labels) else None
        found.append(dataclasses.replace(record_of(()), created_s=NOW_S - age_s, label=label))
    return found


def numbers(all_of_them: list[SnapshotRecord], chosen: list[str]) -> list[int]:
    ids = [record.snapshot_id for record in all_of_them]
    return [ids.index(snapshot_id) for snapshot_id in chosen]


def dropped(found: list[SnapshotRecord], rules: KeepRules, names: dict[str, str] | None = None) -> list[int]:
    choice = choose(found, names or {}, rules, NOW_S)
    assert sorted([*choice.kept, *choice.dropped]) == sorted(record.snapshot_id for record in found)
    assert all(choice.kept.values()), "each kept one has a reason"
    return numbers(found, choice.dropped)


@pytest.mark.parametrize("rules", [KeepRules(), KeepRules(ancestors=True)])
def test_without_a_rule_everything_stays(rules: KeepRules) -> None:
    found = records(30, 20, 10)
    assert not rules.any
    assert dropped(found, rules) == []
    assert choose(found, {}, rules, NOW_S).kept[found[0].snapshot_id] == ("there is no rule",)


def test_the_last_ones() -> None:
    found = records(50, 40, 30, 20, 10)
    assert dropped(found, KeepRules(last=2)) == [0, 1, 2]
    assert dropped(found, KeepRules(last=99)) == []
    assert dropped(found, KeepRules(last=0)) == [0, 1, 2, 3, 4]
    assert choose(found, {}, KeepRules(last=1), NOW_S).kept == {found[4].snapshot_id: ("one of the last 1",)}


def test_the_last_by_publication_and_not_by_the_clock() -> None:
    assert dropped(records(10, 20, 99_999), KeepRules(last=1)) == [0, 1]


def test_the_young() -> None:
    found = records(7200, 3600, 60)
    assert dropped(found, KeepRules(within_s=3600)) == [0]
    assert dropped(found, KeepRules(within_s=0)) == [0, 1, 2]
    kept = choose(found, {}, KeepRules(within_s=100), NOW_S).kept
    assert kept == {found[2].snapshot_id: ("not older than 100 s",)}


def test_a_clock_that_was_set_back_and_mended() -> None:
    # The last was published after one that is a minute old, and cannot be older itself.
    assert dropped(records(7200, 60, 86_400), KeepRules(within_s=3600)) == [0]


def test_a_clock_that_is_set_back_now() -> None:
    assert dropped(records(-100, -200, -50), KeepRules(within_s=0)) == []


def test_names_stay_by_themselves() -> None:
    found = records(30, 20, 10)
    names = {"best": found[0].snapshot_id, "gone": "sn-aaaaaaaaaaaaaaaa"}
    assert dropped(found, KeepRules(last=0), names) == [1, 2]
    assert choose(found, names, KeepRules(last=0), NOW_S).kept == {found[0].snapshot_id: ("named best",)}


def test_chosen_names_and_our_own() -> None:
    found = records(*range(50, 0, -10))
    given = ("best", "run/1", "base:host:1", "world:trusted:x")
    names = {name: record.snapshot_id for name, record in zip(given, found, strict=False)}
    assert dropped(found, KeepRules(names=("run/*",)), names) == [0, 4]
    assert dropped(found, KeepRules(names=("*",)), names) == [4]
    assert dropped(found, KeepRules(names=()), names) == [0, 1, 4]


def test_labels() -> None:
    found = records(3, 2, 1, labels=("step 1", "Step 2", None))
    assert dropped(found, KeepRules(labels=("step*",))) == [1, 2]
    assert dropped(found, KeepRules(labels=("x", "[sS]tep*"))) == [2]
    assert dropped(found, KeepRules(labels=("*",))) == [2]


def test_rules_add_up() -> None:
    found = records(4000, 3000, 2000, 1000, labels=("a",))
    choice = choose(found, {"n": found[3].snapshot_id}, KeepRules(last=1, within_s=2000, labels=("a",)), NOW_S)
    assert numbers(found, choice.dropped) == [1]
    assert choice.kept[found[3].snapshot_id] == ("named n", "one of the last 1", "not older than 2000 s")


def test_ancestors() -> None:
    found = records(50, 40, 30, 20, 10)
    lineage = [None, found[0].snapshot_id, found[1].snapshot_id, found[0].snapshot_id, found[2].snapshot_id]
    found = [dataclasses.replace(record, parent_id=parent) for record, parent in zip(found, lineage, strict=True)]
    assert dropped(found, KeepRules(last=1)) == [0, 1, 2, 3]
    assert dropped(found, KeepRules(last=1, ancestors=True)) == [3]
    kept = choose(found, {}, KeepRules(last=1, ancestors=True), NOW_S).kept
    assert kept[found[0].snapshot_id] == (f"ancestor of {found[4].snapshot_id}",)


def test_a_lineage_that_ends_or_turns_in_a_circle() -> None:
    found = records(3, 2, 1)
    first, second = (record.snapshot_id for record in found[:2])
    found[0] = dataclasses.replace(found[0], parent_id=second)
    found[1] = dataclasses.replace(found[1], parent_id=first)
    found[2] = dataclasses.replace(found[2], parent_id="sn-aaaaaaaaaaaaaaaa")
    assert dropped(found, KeepRules(last=2, ancestors=True)) == []
    assert dropped(found, KeepRules(last=1, ancestors=True)) == [0, 1]


def test_a_chain_of_ten_thousand() -> None:
    found = records(*range(10_000, 0, -1))
    for number in range(1, len(found)):
        found[number] = dataclasses.replace(found[number], parent_id=found[number - 1].snapshot_id)
    assert dropped(found, KeepRules(last=1, ancestors=True)) == []


@pytest.mark.parametrize("wrong", [{"last": -1}, {"within_s": -0.1}, {"within_s": math.nan}, {"within_s": math.inf}])
def test_what_cannot_be_meant(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        KeepRules(**wrong)  # type: ignore[arg-type]


ages = st.lists(st.floats(0, 1000), max_size=8)


@given(ages, st.floats(0, 1000), st.lists(st.floats(0, 10_000), min_size=8, max_size=8), st.floats(0, 10_000))
def test_a_clock_set_back_never_drops_more(
    ages_s: list[float], within_s: float, back_s: list[float], now_back_s: float
) -> None:
    right = records(*sorted(ages_s, reverse=True))
    rules = KeepRules(within_s=within_s)
    expected = choose(right, {}, rules, NOW_S).dropped
    set_back = [
        dataclasses.replace(record, created_s=record.created_s - back)
        if number
        else record  # the first tells when this store was young; nothing before it can
        for number, (record, back) in enumerate(zip(right, back_s, strict=False))
    ]
    assert set(choose(right, {}, rules, NOW_S - now_back_s).dropped) <= set(expected)
    young = {record.snapshot_id for record in right[:1]} - set(expected)
    if young:
        assert choose(set_back, {}, rules, NOW_S).dropped == []
