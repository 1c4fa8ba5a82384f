"""Cgroups that would not go when their sandbox ended are not forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.victims import wait_clean

from worldfork import Sandbox
from worldfork.lineage import place as places


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    places.close_places()


def test_groups_that_would_not_go_are_removed_by_a_later_sweep(own_home: Path, base: str, tmp_path: Path) -> None:
    busy = tmp_path / "worldfork-stuck" / "busy"
    busy.mkdir(parents=True)
    with Sandbox.create(base=base, network="none") as sandbox:
        here = places.place()
        live = here.live[sandbox.sandbox_id]
        live.facts = replace(live.facts, cgroups=(*live.facts.cgroups, str(busy.parent)))
        here.store.update_facts(sandbox.sandbox_id, live.facts.to_json())
    assert [info.sandbox_id for info in Sandbox.list()] == []
    assert [holder.holder_id for holder in here.store.holders()] == [sandbox.sandbox_id]
    places.close_places()  # the next process to open the home finds its owner gone
    here = places.place()
    assert [name for name, _ in here.sweep().failures] == [sandbox.sandbox_id]
    busy.rmdir()
    assert here.sweep().failures == []
    assert not busy.parent.exists()
    assert wait_clean(own_home) == []
