"""The command line of a virtual machine: what it must hold, and what it must never hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from worldfork.core.errors import ConfigError
from worldfork.sandbox.microvm.machine import DEVICES_LIMIT, Boot, Disk, Machine, Network, Restore, tsc_khz

TEMPLATE = Machine(
    accel="tcg",
    memory_mib=256,
    vcpus=1,
    ram_fd=3,
    share_ram=True,
    qmp_fd=4,
    agent_fd=5,
    start=Boot("/k", "/i", ("wf.more=1",), tsc_khz=2_000_000),
)
FORK = replace(TEMPLATE, share_ram=False, start=Restore("devices", 9))


def option(machine: Machine, name: str) -> str:
    words = machine.arguments()
    return words[words.index(name) + 1]


@pytest.mark.parametrize("machine", [TEMPLATE, FORK, replace(TEMPLATE, accel="kvm"), replace(FORK, board="q35")])
def test_every_machine_is_shut_off(machine: Machine) -> None:
    words = machine.arguments()
    assert option(machine, "-nic") == "none"
    assert "-nodefaults" in words
    assert "-no-user-config" in words
    for denied in ("spawn", "elevateprivileges", "resourcecontrol", "obsolete"):
        assert f"{denied}=deny" in option(machine, "-sandbox")
    assert not any(word.startswith(("exec:", "tcp:", "unix:")) for word in words)


def test_a_template_starts_a_kernel_and_shares_its_memory() -> None:
    assert option(TEMPLATE, "-kernel") == "/k"
    assert option(TEMPLATE, "-object").endswith("mem-path=/proc/self/fd/3,share=on")
    assert option(TEMPLATE, "-append").endswith("tsc_early_khz=2000000 wf.more=1")


def test_a_fork_continues_by_itself_and_keeps_what_it_writes() -> None:
    words = FORK.arguments()
    assert "-kernel" not in words
    assert option(FORK, "-object").endswith("mem-path=/proc/self/fd/3,share=off")
    assert option(FORK, "-incoming") == "fd:9"
    assert FORK.descriptors() == (3, 4, 5, 9)


@pytest.mark.parametrize("machine", [TEMPLATE, FORK, replace(FORK, start=Restore("migration", 9))])
def test_the_states_of_all_machines_are_of_one_form(machine: Machine) -> None:
    assert option(machine, "-global") == "migration.send-configuration=off"
    assert "suppress-vmdesc=on" in option(machine, "-M")


@pytest.mark.parametrize("start", [Restore("migration", 9), Restore("devices", 9, waits=True)])
def test_what_waits_for_orders_gets_its_state_with_them(start: Restore) -> None:
    machine = replace(FORK, start=start)
    assert option(machine, "-incoming") == "defer"
    assert 9 in machine.descriptors()
    assert 9 in machine.descriptors()


def test_a_guest_of_kvm_keeps_its_defences() -> None:
    machine = replace(TEMPLATE, accel="kvm")
    assert option(machine, "-cpu") == "host"
    words = option(machine, "-append").split()
    assert not {"nopti", "mitigations=off", "nokaslr", "tsc=reliable"} & set(words)
    assert not any(word.startswith("tsc_early_khz") for word in words)


@pytest.mark.parametrize(
    ("network", "netdev", "card"),
    [
        ("none", [], "virtio-net-device,id=card,mac=52:54:00:12:34:56,guest_announce=off"),
        (
            "host",
            ["user,id=net0,ipv6=off"],
            "virtio-net-device,id=card,mac=52:54:00:12:34:56,guest_announce=off,netdev=net0",
        ),
        (
            "cut",
            ["user,id=net0,ipv6=off,restrict=on"],
            "virtio-net-device,id=card,mac=52:54:00:12:34:56,guest_announce=off,netdev=net0",
        ),
    ],
)
def test_every_machine_has_a_card_and_few_have_anything_behind_it(
    network: Network, netdev: list[str], card: str
) -> None:
    words = replace(FORK, network=network).arguments()
    assert [words[at + 1] for at, word in enumerate(words) if word == "-netdev"] == netdev
    assert card in words


def test_disks_are_given_by_descriptor_with_what_is_below_them() -> None:
    scratch = Disk(fd=7, format="qcow2", read_only=False, backing=Disk(fd=8, format="raw"))
    machine = replace(FORK, disks=(Disk(fd=6), scratch))
    words = machine.arguments()
    assert sorted(part.split(",")[0] for part in words if part.startswith("fd=")) == ["fd=6", "fd=7", "fd=8"]
    nodes = [json.loads(words[at + 1]) for at, word in enumerate(words) if word == "-blockdev"]
    assert [node["node-name"] for node in nodes] == ["d0", "d1"]
    assert nodes[0]["read-only"] is True
    assert nodes[1]["read-only"] is False
    assert nodes[1]["backing"]["read-only"] is True
    names = [nodes[0]["file"]["filename"], nodes[1]["file"]["filename"], nodes[1]["backing"]["file"]["filename"]]
    given = [f"/dev/fdset/{part.split('set=')[1]}" for part in words if part.startswith("fd=")]
    assert names == given
    assert len(set(names)) == 3
    assert machine.descriptors() == (3, 4, 5, 6, 7, 8, 9)
    assert [word for word in words if word.startswith("virtio-blk")] == [
        "virtio-blk-device,id=disk0,drive=d0,serial=d0,werror=report,rerror=report",
        "virtio-blk-device,id=disk1,drive=d1,serial=d1,werror=report,rerror=report",
    ]


def test_q35_has_its_devices_on_pci() -> None:
    words = replace(TEMPLATE, board="q35", disks=(Disk(path="/d"),)).arguments()
    assert "virtio-serial-pci,id=serial" in words
    assert "virtio-blk-pci,id=disk0,drive=d0,serial=d0,werror=report,rerror=report" in words
    assert "-bios" not in words


@pytest.mark.parametrize(
    "machine",
    [
        replace(TEMPLATE, memory_mib=10),
        replace(TEMPLATE, vcpus=0),
        replace(TEMPLATE, disks=(Disk(path="/d"),) * DEVICES_LIMIT),
        replace(TEMPLATE, disks=(Disk(),)),
        replace(TEMPLATE, disks=(Disk(fd=3, path="/d"),)),
        replace(FORK, share_ram=True),
    ],
)
def test_a_machine_that_cannot_be_is_refused(machine: Machine) -> None:
    with pytest.raises(ConfigError):
        machine.arguments()


@pytest.mark.parametrize(
    ("text", "khz"), [("processor : 0\nbogomips\t: 5400.13\n", 2_700_065), ("", 0), ("bogomips : many\n", 0)]
)
def test_the_speed_of_the_counter_comes_from_the_host(text: str, khz: int) -> None:
    assert tsc_khz(text) == khz
