"""Random operations on real overlays, with copies of the upper between them: copying alone, without sandboxes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.overlays import ExportingStack, Stack, mounting
from tests.property.conftest import FORMS, examples, operations_for
from tests.trees import Model, Program, differences, live, outcome_differences, with_links_of, without

from worldfork.core.remove import remove_tree


@pytest.fixture(scope="module")
def mounts() -> Iterator[Program]:
    with mounting() as running:
        yield running


def steps(form: str) -> st.SearchStrategy[Any]:
    how = st.sampled_from(["copy", "copy", "copy", "take"])
    return st.lists(st.tuples(st.lists(operations_for(form), max_size=12), how), min_size=1, max_size=8)


def walk(stack: Stack, model: Model, scenario: Any) -> None:
    """Do the same on layers and in a plain directory; what a copy or a taken upper holds is what was there."""
    for operations, how in scenario:
        inside, seen = stack.apply(*operations)
        beside, expected = model.apply(operations, inside)
        lines = outcome_differences(operations, inside, beside, base_dirs_move=stack.form == "trusted")
        lines += differences(
            live(without(expected, "mtime_ns"), stack.form), live(without(seen, "mtime_ns"), stack.form)
        )
        assert not lines, "\n".join(lines)
        if how == "take":
            stack.take()
            model.seal()
        else:
            stack.copy()
        held = stack.copied() if stack.copies else stack.manifest()
        lines = differences(with_links_of(seen, expected), held)
        assert not lines, "\n".join([how, *lines])


@pytest.mark.parametrize("kind", [Stack, ExportingStack])
@pytest.mark.parametrize("form", FORMS)
def test_copies_hold_what_was_there(
    kind: type[Stack], form: str, mounts: Program, plain: Program, ground: Path
) -> None:
    @examples(50)
    @given(steps(form))
    def check(scenario: Any) -> None:
        place = ground / uuid.uuid4().hex
        (place / "stack").mkdir(parents=True)
        stack = kind(mounts, place / "stack", form)
        try:
            walk(stack, Model(plain, stack.layers[0]).clone(place / "model"), scenario)
        finally:
            stack.end()
            plain.ask(place, forget=True, describe=False)
            remove_tree(place)

    check()
