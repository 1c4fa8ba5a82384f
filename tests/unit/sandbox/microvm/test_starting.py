"""What a guest is told to launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.sandbox.microvm.test_disks import plan as plan

from worldfork.records.sandbox import Limits
from worldfork.sandbox.connection import IN_MACHINE
from worldfork.sandbox.driver import StartPlan
from worldfork.sandbox.microvm.starting import guest_cgroup, identity_items, launch_items


def items(plan: StartPlan, key: str) -> list[str]:
    return [value for name, value in launch_items(plan) if name == key]


def test_a_sandbox_stands_on_its_layers_and_its_base(plan: StartPlan) -> None:
    assert items(plan, "layer") == ["/layers/0", "/layers/1", "/base/b"]
    assert items(plan, "upper") == ["/scratch/upper"]
    assert items(plan, "id") == [IN_MACHINE], "with its memory forked it cannot know which one it is in"


@pytest.mark.parametrize(
    ("form", "ids", "told"),
    [
        ("trusted", "", {("form", "trusted")}),
        ("user", "", {("form", "user")}),
        ("user", "0 1000 1\n1 100000 65536\n", {("form", "trusted"), ("marks", "user")}),
    ],
)
def test_owners_and_marks_are_those_of_the_layers(
    plan: StartPlan, form: str, ids: str, told: set[tuple[str, str]]
) -> None:
    plan = replace(plan, facts=replace(plan.facts, form=form, ids=ids))
    assert {(key, value) for key, value in launch_items(plan) if key in ("form", "marks")} == told


@pytest.mark.parametrize(("cpus", "limited"), [(1.0, False), (2, False), (None, False), (0.5, True), (1.5, True)])
def test_a_guest_divides_only_what_is_no_whole_processor(plan: StartPlan, cpus: float | None, limited: bool) -> None:
    facts = replace(plan.facts, limits=Limits(cpus=cpus))
    assert any("cpu.max" in value for _, value in guest_cgroup(facts)) == limited
    assert any("memory.max" in value for _, value in guest_cgroup(facts))


def test_names_are_asked_of_qemu_on_the_hosts_network(plan: StartPlan) -> None:
    files = (("/etc/resolv.conf", "search a b\nnameserver 127.0.0.53\noptions edns0\n"), ("/etc/hostname", "x\n"))
    plan = replace(plan, identity=files)
    assert dict(identity_items(plan))["idfile"] == "/etc/hostname\tx\n"
    outside = list(identity_items(replace(plan, facts=replace(plan.facts, network="host"))))
    assert outside[0] == ("idfile", "/etc/resolv.conf\tnameserver 10.0.2.3\nsearch a b\noptions edns0\n")
    assert outside[1] == ("idfile", "/etc/hostname\tx\n")
