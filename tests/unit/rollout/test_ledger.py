from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reward.played import a_task

from worldfork.core.errors import Locked, NotFound
from worldfork.rollout import ledger as ledgers
from worldfork.rollout.ledger import REMEMBERED_S, Facts, Ledger, forget_old

FACTS = Facts("sb-aaaaaaaaaaaaaaaa", a_task().task_hash, "played", "open", 0, 7, 1, opened_s=1000.0, ends_s=2000.0)
OVER_S = 2000.0 + REMEMBERED_S + 1


def begun(root: Path, sandbox_id: str = FACTS.sandbox_id, **changes: Any) -> Ledger:
    ledger = Ledger(root, sandbox_id)
    ledger.begin(replace(FACTS, sandbox_id=sandbox_id, **changes), a_task())
    return ledger


def test_a_task_is_written_once_for_all_its_rollouts(tmp_path: Path) -> None:
    one, other = begun(tmp_path), begun(tmp_path, "sb-bbbbbbbbbbbbbbbb")
    assert one.task() == other.task() == a_task()
    assert [path.name for path in (tmp_path / "tasks").iterdir()] == [f"{a_task().task_hash}.json"]
    assert sum(path.stat().st_size for path in one.path.iterdir()) < 1000
    assert oct(os.stat(tmp_path / "tasks").st_mode & 0o777) == "0o700"
    with pytest.raises(NotFound):
        Ledger(tmp_path, "sb-cccccccccccccccc").task()


def test_what_was_over_long_ago_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "_looked_s", {})
    begun(tmp_path)
    later = begun(tmp_path, "sb-bbbbbbbbbbbbbbbb", ends_s=3000.0)
    forget_old(tmp_path, OVER_S - 2)
    assert len(list(tmp_path.glob("sb-*"))) == 2
    # Not looked for again so soon.
    forget_old(tmp_path, OVER_S)
    assert len(list(tmp_path.glob("sb-*"))) == 2
    forget_old(tmp_path, OVER_S + ledgers.LOOK_EVERY_S)
    assert list(tmp_path.glob("sb-*")) == [later.path]
    assert later.task() == a_task()
    forget_old(tmp_path, OVER_S + 1000 + ledgers.LOOK_EVERY_S)
    assert [path.name for path in tmp_path.rglob("*")] == ["tasks"]


def test_no_forked_child_keeps_a_turn(tmp_path: Path) -> None:
    ledger = begun(tmp_path)

    async def fork_in_turn() -> tuple[int, int]:
        read, write = os.pipe()
        async with ledger.turn(0.0):
            child = os.fork()
            if child == 0:
                os.close(write)
                os.read(read, 1)
                os._exit(0)
        os.close(read)
        return child, write

    child, write = asyncio.run(fork_in_turn())

    async def take() -> None:
        async with ledger.turn(0.0):
            with pytest.raises(Locked):
                async with ledger.turn(0.0):
                    pass

    try:
        asyncio.run(take())
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_what_is_closed_and_left_keeps_no_state(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    assert ledger.states() is None
    ledger.set_closed()

    async def while_graded() -> set[str] | None:
        async with ledger.turn(0.0):
            return ledger.states()

    assert asyncio.run(while_graded()) is None
    assert ledger.states() == set()


def test_steps_of_many_are_read_in_order_up_to_what_was_torn(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    assert list(ledger.steps()) == []
    ledger.add_step({"step": {"kind": "note", "action": "a"}})
    Ledger(tmp_path, FACTS.sandbox_id).add_step({"step": {"kind": "note", "action": "b"}})
    with (ledger.path / "steps.jsonl").open("ab") as file:
        file.write(b'{"step": {"ki')
    assert [line["step"]["action"] for line in ledger.steps()] == ["a", "b"]
    ledger.forget_end()
    assert list(ledger.steps()) == []
    # Whoever writes down what nobody asks for any more meets no error.
    Ledger(tmp_path, "sb-cccccccccccccccc").add_step({})
