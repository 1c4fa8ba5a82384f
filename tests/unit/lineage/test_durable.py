"""The way of snapshots to the disk and the remote: together where they can, each to where its level says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.stores import add_snapshot, record_of

from worldfork.core.errors import ConfigError, NotFound, OutOfSpace, StoreError
from worldfork.lineage import durable
from worldfork.lineage.durable import Synchroniser, check_level, expect_quota
from worldfork.lineage.snapshots import wait_durable
from worldfork.store import durability
from worldfork.store.store import Store

LONG_S = 30.0
ROOT = Path(__file__).resolve().parents[3]


class Setting:
    """A synchroniser whose one slow thread can be kept waiting."""

    def __init__(self, store: Store, remote: str = "") -> None:
        self.rounds = 0
        self.synchroniser = Synchroniser(store, remote, self._count)

    def _count(self) -> None:
        self.rounds += 1

    def keep_waiting(self) -> threading.Event:
        go = threading.Event()
        self.synchroniser._syncing.submit(go.wait)
        return go

    def close(self) -> None:
        self.synchroniser.close()


@pytest.fixture
def setting(store: Store) -> Iterator[Setting]:
    made = Setting(store)
    yield made
    made.close()


def test_all_that_wait_share_one_synchronisation(
    store: Store, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronised: list[int] = []
    monkeypatch.setattr(durability, "syncfs", synchronised.append)
    many = [add_snapshot(store).snapshot_id for _ in range(20)]
    go = setting.keep_waiting()
    futures = [setting.synchroniser.begin(one, "local", None) for one in many]
    assert setting.synchroniser.under_way(many[0]) is futures[0]
    go.set()
    for future in futures:
        future.result(LONG_S)
    assert len(synchronised) == 1
    assert {store.snapshot(one).state for one in many} == {"durable"}
    assert setting.synchroniser.under_way(many[0]) is None
    setting.close()
    assert setting.rounds == 1


def test_one_that_was_deleted_meanwhile_does_not_stop_the_others(store: Store, setting: Setting) -> None:
    keep, lose = add_snapshot(store).snapshot_id, add_snapshot(store).snapshot_id
    go = setting.keep_waiting()
    kept = setting.synchroniser.begin(keep, "local", None)
    lost = setting.synchroniser.begin(lose, "local", None)
    store.delete_snapshot(lose)
    store.collect()
    go.set()
    kept.result(LONG_S)
    with pytest.raises(NotFound):
        lost.result(LONG_S)
    assert store.snapshot(keep).state == "durable"


def test_descriptors_are_closed_whatever_happens(
    store: Store, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durability, "syncfs", fail)
    record = add_snapshot(store)
    fd = os.open(store.home.layers, os.O_RDONLY)
    with pytest.raises(StoreError) as raised:
        setting.synchroniser.begin(record.snapshot_id, "local", fd).result(LONG_S)
    assert raised.value.errno == 5
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert store.snapshot(record.snapshot_id).state == "ready"


def test_a_throw_away_is_never_synchronised(store: Store, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronised: list[int] = []
    monkeypatch.setattr(durability, "syncfs", synchronised.append)
    draft = store.begin_layer(form="trusted")
    draft.path.mkdir()
    record = replace(record_of((draft.layer_id,)), level="volatile")
    store.publish(record, [draft.layer_id])
    fd = os.open(store.home.layers, os.O_RDONLY)
    setting.synchroniser.begin(record.snapshot_id, "volatile", fd).result(LONG_S)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert store.pending_durability() == []
    setting.synchroniser.finish_for_others()
    assert synchronised == []
    assert store.snapshot(record.snapshot_id).state == "ready"


def test_what_is_for_the_remote_is_done_when_it_is_there(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[tuple[str, str, str]] = []

    def push(store: Store, snapshot_id: str, remote: str) -> None:
        pushed.append((snapshot_id, remote, store.snapshot(snapshot_id).state))

    monkeypatch.setattr(durable, "push_one", push)
    setting = Setting(store, "/remote")
    record = add_snapshot(store)
    setting.synchroniser.begin(record.snapshot_id, "exported", None).result(LONG_S)
    setting.close()
    assert pushed == [(record.snapshot_id, "/remote", "durable")]


def test_a_remote_that_fails_is_told_and_the_snapshot_stays(
    store: Store, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def push(store: Store, snapshot_id: str, remote: str) -> None:
        raise StoreError("the remote is gone")

    monkeypatch.setattr(durable, "push_one", push)
    record = add_snapshot(store)
    with pytest.raises(StoreError, match="the remote is gone"):
        setting.synchroniser.begin(record.snapshot_id, "exported", None).result(LONG_S)
    assert store.snapshot(record.snapshot_id).state == "durable"


def test_exported_needs_somewhere_to_go() -> None:
    check_level("exported", "/somewhere")
    check_level("local", "")
    with pytest.raises(ConfigError, match="WORLDFORK_REMOTE"):
        check_level("exported", "")


def test_the_quota_is_told_before_anything_is_stored(store: Store) -> None:
    record = add_snapshot(store)
    with store.database.write() as db:
        db.execute("UPDATE layers SET stored_bytes = 5000 WHERE layer_id = ?", (record.layers[0],))
    expect_quota(store, 0)
    expect_quota(store, 5000)
    with pytest.raises(OutOfSpace) as raised:
        expect_quota(store, 4999)
    assert (raised.value.scope, raised.value.fields["over_bytes"]) == ("quota", 1)


def test_a_waiter_that_gives_up_calls_nothing_off(store: Store, setting: Setting) -> None:
    first, second = add_snapshot(store).snapshot_id, add_snapshot(store).snapshot_id
    go = setting.keep_waiting()
    futures = [setting.synchroniser.begin(one, "local", None) for one in (first, second)]

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await wait_durable(futures[0])

    asyncio.run(give_up())
    assert not futures[0].cancel()
    go.set()
    for future in futures:
        future.result(LONG_S)
    assert store.snapshot(second).state == "durable"


def test_at_the_end_of_the_interpreter_it_is_done_all_the_same(tmp_path: Path) -> None:
    program = f"""\
from pathlib import Path
from tests.stores import add_snapshot, home_at
from worldfork.lineage import durable
from worldfork.lineage.durable import Synchroniser
from worldfork.store.store import Store
store = Store.open(home_at(Path({str(tmp_path / "home")!r})))
durable.push_one = lambda store, snapshot_id, remote: Path({str(tmp_path / "pushed")!r}).write_text(snapshot_id)
synchroniser = Synchroniser(store, "/remote", lambda: None)
synchroniser.begin(add_snapshot(store).snapshot_id, "exported", None)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (tmp_path / "pushed").read_text().startswith("sn-")


def test_what_could_not_be_copied_follows_with_the_next(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[str] = []
    broken = [True]

    def push(store: Store, snapshot_id: str, remote: str) -> None:
        if broken.pop() if broken else False:
            raise StoreError("the remote is gone")
        pushed.append(snapshot_id)

    monkeypatch.setattr(durable, "push_one", push)
    setting = Setting(store, "/remote")
    first, second = add_snapshot(store).snapshot_id, add_snapshot(store).snapshot_id
    with pytest.raises(StoreError):
        setting.synchroniser.begin(first, "exported", None).result(LONG_S)
    setting.synchroniser.begin(second, "exported", None).result(LONG_S)
    setting.close()
    assert pushed == [second, first]
