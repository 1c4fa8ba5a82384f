"""What doctor says of virtual machines: on real files, with a QEMU under which no guest comes up."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from tests.unit.sandbox.microvm.test_initrd import module

from worldfork.sandbox.microvm import accel, guest_image, initrd, probe
from worldfork.sandbox.microvm.guest_image import KernelFiles
from worldfork.sandbox.microvm.machine import QEMU
from worldfork.sandbox.microvm.probe import probe_machines
from worldfork.sandbox.probe import ProbeResult


class Here:
    """A machine on which programs can be put, and a kernel for guests."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top, self.images, self.bin = top, top / "images", top / "bin"
        self.bin.mkdir()
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setattr(guest_image, "_installed", lambda root: iter(()))
        self.booted = "a guest did not boot within 10 s"
        monkeypatch.setattr(probe, "boot_under_kvm", lambda qemu, image: self.booted)
        (top / "init").write_bytes(b"\x7fELF init")
        monkeypatch.setattr(probe, "program_path", lambda: top / "init")

    def install_qemu(self, version: str = "7.2.22") -> None:
        path = self.bin / QEMU
        path.write_text(f"#!/bin/sh\necho QEMU emulator version {version}\n")
        path.chmod(0o755)

    def keep_kernel(self) -> None:
        (self.top / "modules").mkdir()
        (self.top / "vmlinuz").write_bytes(b"\x7fELF kernel")
        for name in initrd.WANTED:
            (self.top / "modules" / f"{name}.ko").write_bytes(module())
        guest_image.choose_kernel(self.images, KernelFiles("6.1.0", self.top / "vmlinuz", self.top / "modules"))

    def look(self, *, allow_tcg: bool = False) -> list[ProbeResult]:
        return probe_machines(self.images, allow_tcg=allow_tcg)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(tmp_path, monkeypatch)


def test_what_lacks_is_said_with_what_mends_it(here: Here) -> None:
    qemu, _, kernel, runs = here.look()
    assert (qemu.ok, kernel.ok, runs.ok) == (False, False, False)
    assert "apt-get install" in qemu.remedy
    assert kernel.remedy == "worldfork image build --from debian"
    assert runs.detail.startswith("not tried")


def test_an_old_qemu_is_as_none(here: Here) -> None:
    here.install_qemu("5.2.0")
    assert "too old" in here.look()[0].detail


def test_tcg_works_only_where_it_is_allowed(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.install_qemu()
    here.keep_kernel()
    qemu, _, kernel, runs = here.look()
    assert (qemu.ok, kernel.detail, runs.ok) == (True, "6.1.0", False)
    assert "WORLDFORK_ALLOW_TCG=1" in runs.remedy
    allowed = here.look(allow_tcg=True)[-1]
    assert (allowed.ok, "no security boundary" in allowed.detail) == (True, True)


@pytest.mark.skipif(not Path("/dev/kvm").exists(), reason="needs a device whose guests can be played")
def test_kvm_works_where_a_guest_booted(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "kvm_group", lambda _device: 7)  # whoever may open it on this host
    here.install_qemu()
    here.keep_kernel()
    here.booted = ""
    runs = here.look()[-1]
    assert (runs.ok, runs.detail) == (True, "a guest booted under KVM")


def test_a_processor_that_runs_no_guest_is_named(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    [found] = here.look()
    assert (found.ok, "aarch64" in found.detail) == (False, True)
