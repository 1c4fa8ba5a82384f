"""KVM only where a guest booted with it; TCG only by consent; the outcome kept as long as it holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from worldfork.core.errors import DriverUnavailable
from worldfork.sandbox.microvm import accel
from worldfork.sandbox.microvm.accel import Qemu
from worldfork.sandbox.microvm.guest_image import GuestImage

QEMU = Qemu("/usr/bin/qemu", "7.2.22")


class Attempt:
    """What a trial of KVM gives here, and how often it was made."""

    def __init__(self, failure: str) -> None:
        self.failure = failure
        self.made = 0

    def __call__(self) -> str:
        self.made += 1
        return self.failure


@pytest.fixture
def device(tmp_path: Path) -> Path:
    (tmp_path / "kvm").touch(0o666)
    (tmp_path / "kvm").chmod(0o666)
    return tmp_path / "kvm"


def fake_qemu(tmp_path: Path, text: str) -> str:
    path = tmp_path / "qemu"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_booted_guest_means_kvm_and_is_not_tried_again(tmp_path: Path, device: Path) -> None:
    attempt = Attempt("")
    for _ in range(2):
        found = accel.decide(tmp_path, QEMU, allow_tcg=False, attempt=attempt, device=device)
        assert (found.accel, found.isolation) == ("kvm", "kvm")
    assert attempt.made == 1


def test_an_open_device_proves_nothing(tmp_path: Path, device: Path) -> None:
    attempt = Attempt("a guest did not boot within 10 s")
    for _ in range(2):
        found = accel.decide(tmp_path, QEMU, allow_tcg=True, attempt=attempt, device=device)
        assert (found.accel, found.isolation, found.reason) == ("tcg", "none (tcg)", attempt.failure)
    assert attempt.made == 1


@pytest.mark.parametrize(("mode", "needed"), [(0o666, None), (0o660, "its own"), (0o640, 0), (0o600, 0)])
def test_who_may_use_kvm_besides_root_is_looked_at(device: Path, mode: int, needed: int | str | None) -> None:
    device.chmod(mode)
    group = device.stat().st_gid if needed == "its own" else needed
    assert accel.kvm_group(device) == group


def test_kvm_that_is_open_to_root_alone_is_none_for_machines_of_root(
    tmp_path: Path, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.chmod(0o600)
    attempt = Attempt("")
    monkeypatch.setattr(accel, "natural_form", lambda: "trusted")
    assert "root alone" in accel.decide(tmp_path, QEMU, allow_tcg=True, attempt=attempt, device=device).reason
    monkeypatch.setattr(accel, "natural_form", lambda: "user")
    assert accel.decide(tmp_path, QEMU, allow_tcg=True, attempt=attempt, device=device).accel == "kvm"


def test_tcg_wants_consent(tmp_path: Path, device: Path) -> None:
    with pytest.raises(DriverUnavailable, match="did not boot") as caught:
        accel.decide(tmp_path, QEMU, allow_tcg=False, attempt=Attempt("a guest did not boot"), device=device)
    assert accel.ALLOW_TCG in caught.value.remedy


def test_without_the_device_nothing_is_tried_or_kept(tmp_path: Path) -> None:
    attempt = Attempt("")
    found = accel.decide(tmp_path, QEMU, allow_tcg=True, attempt=attempt, device=tmp_path / "none")
    assert (found.accel, attempt.made) == ("tcg", 0)
    assert not (tmp_path / "accel.json").exists()


@pytest.mark.parametrize("key", ["boot_id", "kernel", "qemu"])
def test_another_boot_kernel_or_qemu_is_tried_again(tmp_path: Path, device: Path, key: str) -> None:
    accel.decide(tmp_path, QEMU, allow_tcg=True, attempt=Attempt("no"), device=device)
    kept = tmp_path / "accel.json"
    kept.write_text(json.dumps({**json.loads(kept.read_text()), key: "other"}))
    assert accel.decide(tmp_path, QEMU, allow_tcg=True, attempt=Attempt(""), device=device).accel == "kvm"


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"boot_id": 1}'])
def test_a_damaged_outcome_is_tried_again(tmp_path: Path, device: Path, text: str) -> None:
    (tmp_path / "accel.json").write_text(text)
    assert accel.decide(tmp_path, QEMU, allow_tcg=True, attempt=Attempt(""), device=device).accel == "kvm"


def test_the_version_of_qemu_is_found(tmp_path: Path) -> None:
    path = fake_qemu(tmp_path, "echo 'QEMU emulator version 8.2.2 (Debian 1:8.2.2)'")
    assert accel.find_qemu(path) == Qemu(path, "8.2.2")


@pytest.mark.parametrize(
    "make",
    [
        lambda tmp_path: str(tmp_path / "none"),
        lambda tmp_path: fake_qemu(tmp_path, "echo 'QEMU emulator version 6.2.0'"),
        lambda tmp_path: fake_qemu(tmp_path, "exit 1"),
        lambda tmp_path: fake_qemu(tmp_path, "echo hello"),
    ],
)
def test_no_usable_qemu_is_told_with_the_package(tmp_path: Path, make: Callable[[Path], str]) -> None:
    with pytest.raises(DriverUnavailable) as caught:
        accel.find_qemu(make(tmp_path))
    assert "qemu-system-x86" in caught.value.remedy


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("echo 'Could not access KVM' >&2; exit 1", "Could not access KVM"),
        ("exec sleep 60", "did not boot within 0.3 s"),
        # The agent's descriptor stands in the arguments, where the guest's init would answer.
        ("fd=${*#*socket,id=agent,fd=}; exec bash -c 'echo hello >&$0; exec sleep 60' ${fd%% *}", ""),
    ],
)
def test_a_trial_says_what_it_saw_and_ends_its_guest(tmp_path: Path, program: str, reason: str) -> None:
    image = GuestImage("id", "6.1", tmp_path / "k", tmp_path / "i")
    if "sleep" in program:
        program = f"echo $$ > {tmp_path}/pid; {program}"
    found = accel.boot_under_kvm(
        Qemu(fake_qemu(tmp_path, program), "7.2.22"), image, limit_s=0.3 if "did" in reason else 20
    )
    assert reason in found
    assert bool(found) == bool(reason)
    if (tmp_path / "pid").exists():
        assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_a_saved_machine_of_kvm_belongs_to_one_processor() -> None:
    one = "model name\t: A\ncpu family\t: 6\nmodel\t: 1\nstepping\t: 2\nmicrocode\t: 0x1\n"
    assert accel.cpu_mark("kvm", one) == "A 6 1 2 0x1"
    assert accel.cpu_mark("kvm", one.replace("0x1", "0x2")) != accel.cpu_mark("kvm", one)
    assert accel.cpu_mark("tcg", one) == accel.cpu_mark("tcg", "")
