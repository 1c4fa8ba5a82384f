from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from worldfork.reward.calibration import Calibration, CalibrationStore
from worldfork.reward.needs import Need

FOUND = Calibration("ab" * 32, "sn-one", ("t::ä", "t::b"), ("t::b",), (), 0.5)


class Maker:
    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None

    async def __call__(self) -> Calibration:
        self.calls += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return FOUND


async def ask(store: CalibrationStore, make: Maker, snapshot_id: str = "sn-one") -> Calibration:
    return await store.get_or_make(FOUND.task_hash, snapshot_id, make)


def test_made_once_for_all_who_ask(tmp_path: Path) -> None:
    make = Maker()

    async def many() -> None:
        one, other = CalibrationStore(tmp_path / "tasks"), CalibrationStore(tmp_path / "tasks")
        found = await asyncio.gather(*(ask(store, make) for store in (one, other) for _ in range(4)))
        assert found == [FOUND] * 8

    asyncio.run(many())
    assert make.calls == 1
    assert asyncio.run(ask(CalibrationStore(tmp_path / "tasks"), make)) == FOUND
    assert make.calls == 1


def test_another_starting_state_is_another_calibration(tmp_path: Path) -> None:
    make, store = Maker(), CalibrationStore(tmp_path)
    asyncio.run(ask(store, make))
    asyncio.run(ask(store, make, "sn-two"))
    assert make.calls == 2


def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    make, store = Maker(), CalibrationStore(tmp_path)
    make.error = RuntimeError("no")
    with pytest.raises(RuntimeError):
        asyncio.run(ask(store, make))
    make.error = None
    assert asyncio.run(ask(store, make)) == FOUND


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"expected": 1}', b"\xff"])
def test_a_file_that_was_cut_short_is_found_out_again(tmp_path: Path, content: bytes) -> None:
    make = Maker()
    asyncio.run(ask(CalibrationStore(tmp_path), make))
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(content)
    assert asyncio.run(ask(CalibrationStore(tmp_path), make)) == FOUND
    assert make.calls == 2


def test_one_that_tells_nothing_of_wall_times_is_read(tmp_path: Path) -> None:
    make = Maker()
    asyncio.run(ask(CalibrationStore(tmp_path), make))
    (path,) = tmp_path.glob("*.json")
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name not in ("wall_s", "rebuild_s")}
    path.write_text(json.dumps(kept))
    found = asyncio.run(ask(CalibrationStore(tmp_path), make))
    assert (make.calls, found.need) == (1, Need(cpu_s=0.5))


def test_no_lock_stays_and_none_is_held_twice(tmp_path: Path) -> None:
    inside, most = 0, 0

    async def make() -> Calibration:
        nonlocal inside, most
        inside, most = inside + 1, max(most, inside + 1)
        await asyncio.sleep(0.002)
        inside -= 1
        raise LookupError

    async def many() -> None:
        stores = [CalibrationStore(tmp_path) for _ in range(8)]
        asked = (store.get_or_make(FOUND.task_hash, "sn-one", make) for store in stores)
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(each, LookupError) for each in results)

    asyncio.run(many())
    assert most == 1
    assert list(tmp_path.iterdir()) == []


def test_the_lock_is_let_go(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(ask(CalibrationStore(tmp_path), Maker()))
    assert len(os.listdir("/proc/self/fd")) == before


def test_flaky_ids_count_for_nothing_in_any_process(tmp_path: Path) -> None:
    make, store = Maker(), CalibrationStore(tmp_path)
    asyncio.run(ask(store, make))
    asyncio.run(store.leave_out(FOUND.task_hash, "sn-one", ["t::b", "none of it"]))
    for each in (store, CalibrationStore(tmp_path)):
        found = asyncio.run(ask(each, make))
        assert (found.expected, found.untouched, found.flaky) == (("t::ä",), (), ("t::b",))
    assert make.calls == 1


def test_what_nobody_found_out_yet_is_left_alone(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    asyncio.run(store.leave_out(FOUND.task_hash, "sn-one", ["t::b"]))
    assert asyncio.run(ask(store, Maker())) == FOUND


def test_some_test_always_counts() -> None:
    assert FOUND.without(FOUND.expected) == FOUND


def test_long_runs_keep_no_more_in_memory_than_there_is_room_for(tmp_path: Path) -> None:
    make, store = Maker(), CalibrationStore(tmp_path, most_bytes=1000)
    for number in range(20):
        asyncio.run(ask(store, make, f"sn-{number}"))
    assert 0 < len(store._held) < 10
    assert not store._turns
    assert asyncio.run(ask(store, make, "sn-0")) == FOUND
    assert make.calls == 20
