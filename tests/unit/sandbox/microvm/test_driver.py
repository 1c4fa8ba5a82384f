"""The `microvm` driver as far as it needs no machine: sizes, groups, refusals, what a cancelled start gives back."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sandbox.microvm.test_disks import plan as plan
from tests.unit.sandbox.microvm.test_manifest import SAVED

from worldfork.core.errors import ConfigError, DriverUnavailable, OutOfSpace
from worldfork.core.settings import Settings
from worldfork.records.sandbox import Base, Limits
from worldfork.sandbox.cgroups import CgroupLayout
from worldfork.sandbox.driver import StartPlan
from worldfork.sandbox.microvm import accel, guest_image, sizes
from worldfork.sandbox.microvm import driver as module
from worldfork.sandbox.microvm.accel import Decision, Qemu
from worldfork.sandbox.microvm.driver import MicrovmDriver
from worldfork.sandbox.microvm.guest_image import GuestImage
from worldfork.sandbox.microvm.host import Host, file_mark
from worldfork.sandbox.microvm.keep import walls
from worldfork.sandbox.microvm.starting import Origin


@pytest.fixture
def driver(tmp_path: Path) -> MicrovmDriver:
    return MicrovmDriver(Settings(home=tmp_path), tmp_path / "images")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    image = GuestImage("ab" * 32, "6.1", tmp_path / "vmlinux", tmp_path / "initrd")
    qemu = Qemu("/usr/bin/true", SAVED.build.qemu)
    return Host(qemu, image, Decision("tcg", "none (tcg)", "tried"), SAVED.build.cpu, file_mark(qemu.program))


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work

    asyncio.run(bounded())


@pytest.mark.parametrize(
    ("limits", "mib", "vcpus"),
    [
        (Limits(), 1088, 1),
        (Limits(memory_mb=192, cpus=2.0), 256, 2),
        (Limits(memory_mb=193, cpus=1.01), 320, 2),
        (Limits(memory_mb=1, cpus=0.1), 128, 1),
        (Limits(memory_mb=None, cpus=0.5), 4160, 1),
    ],
)
def test_the_size_of_a_machine_comes_from_the_limits(limits: Limits, mib: int, vcpus: int) -> None:
    assert sizes.machine_size(limits) == (mib << 20, vcpus)


def test_a_sandbox_without_a_limit_of_processors_has_those_of_the_host() -> None:
    assert sizes.machine_size(Limits(cpus=None))[1] == os.cpu_count()


def test_qemu_is_limited_by_what_its_guest_may_take(plan: StartPlan, tmp_path: Path) -> None:
    layout = CgroupLayout({}, tmp_path)
    words = [value for key, value in sizes.group_items(layout, plan.facts, SAVED.build) if key == "cgset"]
    assert f"memory.max\t{(2 * 256 + 128) << 20}" in words
    assert "cpu.max\t100000 100000" in words
    assert any(word.startswith("pids.max") for word in words)
    assert sizes.group_items(CgroupLayout({}, None), plan.facts, SAVED.build) == []


def test_every_machine_of_root_has_a_user_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worldfork.sandbox.microvm.keep.natural_form", lambda: "trusted")
    users = {walls(f"sb-{number}", "tcg", network=False)[0][1] for number in range(100)}
    assert len(users) == 100
    assert all(0x6000_0000 <= int(user) < 0x7000_0000 for user in users)
    monkeypatch.setattr("worldfork.sandbox.microvm.keep.natural_form", lambda: "user")
    assert walls("sb-1", "tcg", network=False) == []


def test_the_userland_of_this_machine_is_refused(driver: MicrovmDriver, plan: StartPlan) -> None:
    plan = replace(plan, facts=replace(plan.facts, base=Base(kind="host")))

    async def work() -> None:
        with pytest.raises(DriverUnavailable) as caught:
            await driver.start(plan, driver.begin("none"))
        assert "dir:PATH" in caught.value.remedy

    run(work())


def test_no_qemu_is_told_with_the_package(
    driver: MicrovmDriver, plan: StartPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)

    async def work() -> None:
        with pytest.raises(DriverUnavailable) as caught:
            await driver.start(plan)
        assert "qemu-system-x86" in caught.value.remedy

    run(work())


def test_no_kernel_is_told_with_the_verb(
    driver: MicrovmDriver, plan: StartPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accel, "find_qemu", lambda: Qemu("/usr/bin/true", "7.2.0"))
    monkeypatch.setattr(guest_image, "find_kernel", lambda images: None)

    async def work() -> None:
        with pytest.raises(DriverUnavailable) as caught:
            await driver.start(plan)
        assert "image build" in caught.value.remedy

    run(work())


def test_a_host_at_its_end_starts_no_machine(
    driver: MicrovmDriver, host: Host, plan: StartPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver._host = host
    monkeypatch.setattr(sizes, "available_bytes", lambda: 10 << 20)

    async def work() -> None:
        with pytest.raises(OutOfSpace) as caught:
            await driver.start(plan)
        assert caught.value.scope == "host"
        assert caught.value.remedy

    run(work())


@pytest.mark.parametrize("other", [{"qemu": "8.2.0"}, {"accel": "kvm"}, {"cpu": "another"}])
def test_a_memory_of_another_kind_of_machine_is_refused(host: Host, other: dict[str, Any]) -> None:
    host.check(SAVED)
    with pytest.raises(DriverUnavailable) as caught:
        host.check(replace(SAVED, build=replace(SAVED.build, **other)))
    assert caught.value.remedy


def test_an_upgraded_qemu_is_looked_at_anew(
    driver: MicrovmDriver, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "qemu"
    program.touch()
    host = replace(host, qemu=Qemu(str(program), "7.2.0"), qemu_file=file_mark(str(program)))
    seen: list[Path] = []

    def find(images: Path, *, allow_tcg: bool) -> Host:
        seen.append(images)
        return replace(host, qemu_file=file_mark(str(program)))

    monkeypatch.setattr(module, "find_host", find)
    driver._find_host()
    driver._find_host()
    assert len(seen) == 1
    os.utime(program, ns=(1, 1))
    driver._find_host()
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("wanted", "had", "behind"), [("none", "none", "none"), ("host", "host", "host"), ("none", "host", "cut")]
)
def test_what_is_behind_the_card_of_a_fork(plan: StartPlan, wanted: str, had: str, behind: str) -> None:
    plan = replace(plan, facts=replace(plan.facts, network=wanted))
    assert sizes.behind_card(replace(SAVED, facts={"network": had}), plan) == behind


def test_a_fork_of_what_had_no_network_cannot_have_one(plan: StartPlan) -> None:
    with pytest.raises(ConfigError):
        sizes.behind_card(SAVED, replace(plan, facts=replace(plan.facts, network="host")))


def test_a_start_cancelled_while_its_memory_is_assembled_gives_it_back(
    driver: MicrovmDriver, host: Host, plan: StartPlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver._host = host
    began, go = threading.Event(), threading.Event()
    lent: list[int] = []

    def slow(*_: object) -> Origin:
        began.set()
        assert go.wait(20)
        lent.append(os.open("/dev/null", os.O_RDONLY))
        return Origin(tmp_path, SAVED, lent[0], ())

    monkeypatch.setattr(driver, "_saved_origin", slow)

    async def work() -> None:
        task = asyncio.create_task(driver.start(replace(plan, memory=tmp_path)))
        await asyncio.to_thread(began.wait, 20)
        task.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(lent[0])

    run(work())


def test_a_start_that_is_begun_has_nothing_under_way(driver: MicrovmDriver) -> None:
    async def work() -> None:
        begun = driver.begin("none")
        assert begun.pid == 0
        await driver.abandon(begun)
        assert begun.sock.fileno() == -1

    driver.stock()
    assert not driver.drop_spare()
    run(work())
