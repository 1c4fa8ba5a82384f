"""Stacks that random operations on real overlays left, as our own lookup shows them, and with runs of them merged."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.merged import seen_by_kernel, seen_by_us
from tests.overlays import Stack, mounting
from tests.property.conftest import FORMS, examples, operations_for
from tests.trees import Program, differences

from worldfork.content.merge import merge_layers
from worldfork.core.remove import remove_tree


@pytest.fixture(scope="module")
def mounts() -> Iterator[Program]:
    with mounting() as running:
        yield running


def layers_of(form: str) -> st.SearchStrategy[Any]:
    # Directories that go into new ones, and what takes their place: where redirects and opaque marks come from.
    early, spot = st.integers(0, 12), st.tuples(st.integers(0, 6), st.sampled_from("abd")).map(list)
    moves = st.one_of(
        st.tuples(st.just("rename"), early, spot).map(list),
        st.tuples(st.just("mkdir"), spot, st.just(0o755)).map(list),
        st.tuples(st.sampled_from(["turn", "remake", "remove_all"]), early).map(list),
    )
    operation = st.one_of(operations_for(form), moves)
    return st.lists(st.lists(operation, min_size=1, max_size=12), min_size=1, max_size=5)


def build(mounts: Program, place: Path, form: str, scenario: Any) -> list[Path]:
    """Two to six layers, each what its operations left over those below; top first."""
    stack = Stack(mounts, place, form)
    try:
        for operations in scenario:
            stack.apply(*operations)
            stack.take()
    finally:
        stack.end()
    return stack.layers


@pytest.mark.parametrize("form", FORMS)
def test_view_shows_what_the_kernel_shows(form: str, mounts: Program, plain: Program, ground: Path) -> None:
    @examples(60)
    @given(layers_of(form))
    def check(scenario: Any) -> None:
        place = ground / uuid.uuid4().hex
        place.mkdir()
        try:
            layers = build(mounts, place, form, scenario)
            expected = seen_by_kernel(mounts, place / "point", layers, form)
            lines = differences(expected, seen_by_us(layers, form))
            assert not lines, "\n".join(lines)
        finally:
            plain.ask(place, forget=True, describe=False)
            remove_tree(place)

    check()


def check_runs(mounts: Program, place: Path, form: str, layers: list[Path]) -> None:
    """Whichever consecutive layers are merged, the kernel shows the same over the outcome."""
    expected = seen_by_kernel(mounts, place / "point", layers, form)
    for first, last in itertools.combinations(range(len(layers) + 1), 2):
        if last - first < 2:
            continue
        merged = place / f"merged.{first}.{last}"
        merge_layers(layers[first:last], merged, form, ends=last == len(layers))
        stack = [*layers[:first], merged, *layers[last:]]
        lines = differences(expected, seen_by_kernel(mounts, place / "point", stack, form))
        assert not lines, "\n".join([f"layers {first} to {last - 1} of {len(layers)} merged", *lines])
        lines = differences(expected, seen_by_us(stack, form))
        assert not lines, "\n".join([f"our own view of {first} to {last - 1} merged", *lines])


@pytest.mark.parametrize("form", FORMS)
def test_merged_runs_show_the_same(form: str, mounts: Program, plain: Program, ground: Path) -> None:
    @examples(40)
    @given(layers_of(form))
    def check(scenario: Any) -> None:
        place = ground / uuid.uuid4().hex
        place.mkdir()
        try:
            check_runs(mounts, place, form, build(mounts, place, form, scenario))
        finally:
            plain.ask(place, forget=True, describe=False)
            remove_tree(place)

    check()
