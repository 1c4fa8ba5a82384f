"""What is asked before machines start, and what is told of those that rest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.stores import add_memory, add_snapshot, home_at, record_of

from worldfork.core.errors import ConfigError, DriverUnavailable, Locked, NotCapturable, NotFound, OutOfSpace
from worldfork.lineage import asynchronous, machines
from worldfork.lineage.arguments import check_outside, start_options
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.deaths import found_dead
from worldfork.lineage.fitting import check_driver
from worldfork.lineage.fork import expect_forks
from worldfork.lineage.listing import all_infos, all_suspended, find_live, is_suspended
from worldfork.lineage.live import Live
from worldfork.lineage.machines import machine_options
from worldfork.lineage.measuring import files_bytes
from worldfork.lineage.memory import refused, suspended_facts
from worldfork.lineage.place import Place
from worldfork.lineage.starting import StartOptions, without_directories
from worldfork.lineage.suspending import drop_resumed, find_suspended
from worldfork.records.death import DeathCause, LimitHits
from worldfork.records.origin import Mount, Origin
from worldfork.records.sandbox import Base, SandboxFacts, SandboxStatus
from worldfork.sandbox.network import HostNetwork
from worldfork.sandbox.pressure import HostKills
from worldfork.store.store import Store

NOWHERE = cast(Place, None)
SAVED = replace(record_of(()), kind="memory", facts={"memory": {"driver": "microvm", "stored_bytes": 64 << 20}})
FACTS = SandboxFacts(
    sandbox_id="sb-aaaaaaaaaaaaaaaa",
    name="sleeper",
    run="/run/of/it",
    form="trusted",
    driver="microvm",
    base=Base("dir", "/srv/root"),
    snapshot_id=None,
    layers=(),
    cgroups=("/sys/fs/cgroup/x",),
    owner_id="ow-aaaaaaaaaaaaaaaa",
    network_env={"https_proxy": "http://user:secret@proxy"},
)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "available_bytes", lambda: 1 << 30)


@pytest.mark.usefixtures("room")
def test_a_memory_decides_on_its_driver() -> None:
    assert machine_options(NOWHERE, SAVED, StartOptions(), 3).driver == "microvm"
    plain = record_of(())
    assert machine_options(NOWHERE, plain, StartOptions(driver="microvm"), 3).driver == "microvm"


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize(
    "changes",
    [
        {"limits": {"memory_mb": 512}},
        {"limits": {"cpus": 2.0, "pids": None}},
        {"mounts": (Mount("/data", Origin(directory="/srv")),)},
    ],
)
def test_a_machine_that_runs_cannot_be_another(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        machine_options(NOWHERE, SAVED, replace(StartOptions(), **changes), 1)


@pytest.mark.usefixtures("room")
def test_no_more_machines_than_memory() -> None:
    most = int((1 << 30) * 0.9) // machines.FORK_BYTES
    plain = record_of(())
    machine_options(NOWHERE, plain, StartOptions(driver="microvm"), most)
    with pytest.raises(OutOfSpace) as caught:
        machine_options(NOWHERE, plain, StartOptions(driver="microvm"), most + 1)
    assert (caught.value.scope, bool(caught.value.remedy)) == ("host", True)
    with pytest.raises(OutOfSpace):
        machine_options(NOWHERE, SAVED, StartOptions(), most)


def live(driver: str) -> Live:
    facts = replace(FACTS, driver=driver)
    place = SimpleNamespace(driver=SimpleNamespace(name="namespace"))
    return cast(Live, SimpleNamespace(place=place, facts=facts, sandbox_id=facts.sandbox_id))


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("driver", ["namespace", "microvm"])
def test_forks_that_make_no_sense_cost_no_snapshot(driver: str) -> None:
    options = StartOptions(driver=driver)
    expect_forks(live(driver), 3, options, memory=False, seeds=[1, 2, 3], max_concurrency=1)
    wrong: list[dict[str, Any]] = [{"n": 0}, {"n": 2, "seeds": [1]}, {"n": 1, "max_concurrency": 0}]
    for each in wrong:
        with pytest.raises(ConfigError):
            expect_forks(live(driver), options=options, memory=False, **each)


@pytest.mark.usefixtures("room")
def test_forks_of_a_machine_for_which_there_is_no_room_cost_no_snapshot() -> None:
    most = int((1 << 30) * 0.9) // machines.FORK_BYTES
    for memory in (False, True):
        expect_forks(live("microvm"), most, StartOptions(driver="microvm"), memory=memory)
        with pytest.raises(OutOfSpace):
            expect_forks(live("microvm"), most + 1, StartOptions(driver="microvm"), memory=memory)
    expect_forks(live("namespace"), most + 1, StartOptions(), memory=False)
    with pytest.raises(ConfigError, match="pids"):
        expect_forks(live("microvm"), 1, StartOptions(driver="microvm", limits={"pids": 4}), memory=True)


def test_a_host_that_tells_nothing_of_its_memory_starts_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "available_bytes", lambda: None)
    machines.expect_memory(10_000)


def test_a_machine_cannot_show_the_userland_of_the_host() -> None:
    check_driver(record_of(()), "namespace")
    with pytest.raises(DriverUnavailable) as caught:
        check_driver(record_of(()), "microvm")
    assert "image build" in caught.value.remedy
    check_driver(replace(record_of(()), base={"kind": "dir", "path": "/srv/root"}), "microvm")


def test_a_machine_has_the_network_only_if_that_is_said() -> None:
    assert start_options(fresh=True).network == "host"
    assert start_options(fresh=True, driver="microvm").network == "none"
    assert start_options(fresh=True, driver="microvm", allow_internet_access=True).network == "host"


def test_a_machine_is_given_no_copy_of_a_package_index(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    network = HostNetwork(
        {"PIP_INDEX_URL": "file:///dev/.worldfork/host-0/simple", "PIP_CERT": "/dev/.worldfork/host-1", "A": "b"},
        [(str(tmp_path), "/dev/.worldfork/host-0"), (str(tmp_path / "ca.pem"), "/dev/.worldfork/host-1")],
        "nameserver 192.0.2.1",
    )
    kept = without_directories(network)
    assert kept.env == {"PIP_CERT": "/dev/.worldfork/host-1", "A": "b"}
    assert kept.binds == [(str(tmp_path / "ca.pem"), "/dev/.worldfork/host-1")]
    assert kept.resolv_conf == network.resolv_conf


def test_what_connections_shall_become_is_one_of_three_words() -> None:
    check_outside("keep")
    with pytest.raises(ConfigError):
        check_outside("drop")


def test_the_refusal_names_the_connections() -> None:
    one = {"protocol": "tcp", "local": "10.0.2.15:4000", "remote": "192.0.2.1:443", "state": "established"}
    error = refused(FACTS, [one] * 6)
    assert isinstance(error, NotCapturable)
    assert "tcp 10.0.2.15:4000 to 192.0.2.1:443" in error.message
    assert "and 2 more" in error.message
    assert error.fields["connections"] == [one] * 6


def test_what_rests_takes_no_secret_of_the_host_along() -> None:
    kept = suspended_facts(FACTS)
    assert (kept["network_env"], kept["owner_id"], kept["cgroups"]) == ({"https_proxy": ""}, "", [])
    assert kept["name"] == "sleeper"


@pytest.fixture
def here(tmp_path: Path) -> Place:
    store = Store.open(home_at(tmp_path / "home"))
    return cast(Place, SimpleNamespace(store=store))


def test_those_that_rest_are_listed_and_found_by_id_name_and_snapshot(here: Place) -> None:
    layers = add_snapshot(here.store).layers
    add_memory(here.store, below=layers)
    record = add_memory(here.store, below=layers, suspended=suspended_facts(FACTS))
    assert [(one.snapshot_id, one.facts.name) for one in all_suspended(here)] == [(record.snapshot_id, "sleeper")]
    assert [(one.sandbox_id, one.status) for one in all_infos(here)] == [(FACTS.sandbox_id, SandboxStatus.SUSPENDED)]
    for wanted in (FACTS.sandbox_id, "sleeper", record.snapshot_id):
        assert find_suspended(here, wanted).facts.sandbox_id == FACTS.sandbox_id
    assert is_suspended(here, FACTS.sandbox_id)
    with pytest.raises(NotFound, match="suspended") as caught:
        find_live(here, "sleeper")
    assert caught.value.remedy.startswith("worldfork resume sleeper; ")
    assert caught.value.remedy.endswith(f"worldfork snapshots rm {record.snapshot_id}")
    with pytest.raises(NotFound):
        find_suspended(here, "nobody")
    here.store.close()


def test_the_snapshot_of_one_that_went_on_and_has_ended_goes_unless_it_has_a_name(here: Place) -> None:
    layers = add_snapshot(here.store).layers
    collected: list[int] = []
    place = cast(Place, SimpleNamespace(store=here.store, collect_soon=lambda: collected.append(1)))
    for named in (False, True):
        record = add_memory(here.store, below=layers)
        if named:
            here.store.set_name("kept", record.snapshot_id)
        drop_resumed(place, replace(FACTS, snapshot_id=record.snapshot_id, resumed=True))
        assert (record.snapshot_id in [one.snapshot_id for one in here.store.snapshots()]) is named
    assert collected == [1]
    here.store.close()


class Racing(AsyncSandbox):
    """One that somebody resumes between the look for a live sandbox and the look for one that rests."""

    looks = 0

    @classmethod
    async def connect(cls, sandbox_id: str, **foreign: Any) -> Any:
        cls.looks += 1
        if cls.looks == 1:
            raise NotFound("it rests")
        return "the one that was resumed"

    @classmethod
    async def create(cls, *arguments: Any, **more: Any) -> Any:
        raise AssertionError("there would be two of one name")


@pytest.mark.parametrize("error", [NotFound("none rests"), Locked("it goes on")])
def test_who_is_resumed_meanwhile_is_not_made_again(
    error: Exception, here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_memory(here.store, below=add_snapshot(here.store).layers, suspended=suspended_facts(FACTS))

    async def work(call: Any) -> Any:
        return call()

    async def place() -> Any:
        return SimpleNamespace(store=here.store, work=work, single_flight=lambda key: contextlib.nullcontext())

    async def resume(sandbox_id: str, **more: Any) -> Any:
        raise error

    monkeypatch.setattr(asynchronous, "_here", place)
    monkeypatch.setattr(Racing, "resume", resume)
    monkeypatch.setattr(Racing, "looks", 0)
    found: object = asyncio.run(Racing.get_or_create("sleeper"))
    assert found == "the one that was resumed"
    here.store.close()


def test_damaged_words_of_one_that_rests_hide_no_other(here: Place, caplog: pytest.LogCaptureFixture) -> None:
    layers = add_snapshot(here.store).layers
    damaged = add_memory(here.store, below=layers, suspended={"sandbox_id": 3})
    whole = add_memory(here.store, below=layers, suspended=suspended_facts(FACTS))
    assert [one.snapshot_id for one in all_suspended(here)] == [whole.snapshot_id]
    assert damaged.snapshot_id in caplog.text
    here.store.close()


def test_nothing_of_machines_is_loaded_where_none_is_asked_for() -> None:
    program = (
        "import sys, worldfork.lineage.synchronous, worldfork.lineage.keeping\n"
        "print([name for name in sys.modules if 'microvm' in name])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


class Played(HostKills):
    def __init__(self, kills: int) -> None:
        super().__init__()
        self.kills = kills

    def lately(self) -> int:
        return self.kills


@pytest.mark.parametrize(
    ("code", "kills", "cause"),
    [
        (3, 0, DeathCause.CRASHED),
        (3, 1, DeathCause.HOST_MEMORY),
        (4, 0, DeathCause.CRASHED),
        (5, 0, DeathCause.CRASHED),
    ],
)
def test_the_keep_of_a_machine_tells_how_it_ended(code: int, kills: int, cause: DeathCause) -> None:
    status = SimpleNamespace(si_code=os.CLD_EXITED, si_status=code)
    death = found_dead(cast(os.waitid_result, status), Played(kills), LimitHits())
    assert death.cause is cause
    assert "machine" in death.detail


def test_what_a_machine_wrote_is_what_its_own_files_take(tmp_path: Path) -> None:
    (tmp_path / "scratch").write_bytes(os.urandom(1 << 20))
    (tmp_path / "of-a-snapshot").write_bytes(os.urandom(1 << 20))
    os.link(tmp_path / "of-a-snapshot", tmp_path / "linked")
    assert 1 << 20 <= files_bytes(str(tmp_path)) < 1 << 21
    assert files_bytes(str(tmp_path / "nothing")) == 0
