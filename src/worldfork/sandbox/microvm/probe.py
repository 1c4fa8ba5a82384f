"""What this machine has of all that virtual machines need, each with what mends it."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from worldfork.core.errors import WorldforkError
from worldfork.sandbox.microvm.accel import ALLOW_TCG, Qemu, boot_under_kvm, decide, find_qemu
from worldfork.sandbox.microvm.blank import find_mkfs
from worldfork.sandbox.microvm.guest_image import KernelFiles, build_image
from worldfork.sandbox.microvm.host import expect_kernel
from worldfork.sandbox.probe import ProbeResult
from worldfork.sandbox.program import program_path

_T = TypeVar("_T")
_ARCHITECTURE = "x86_64"


def probe_machines(images: Path, *, allow_tcg: bool) -> list[ProbeResult]:
    """Look for QEMU, for what else machines need, and for what runs their instructions.

    Blocking, up to 10 s where KVM is tried for the first time since this machine started: a guest is really booted.

    Args:
        images: such as `home/images`.
        allow_tcg: whether QEMU may interpret guests.
    """
    if platform.machine() != _ARCHITECTURE:
        why = f"guests are made for {_ARCHITECTURE}, and this machine is {platform.machine()}"
        return [ProbeResult("machines", False, why)]
    qemu, has_qemu = _found("machines: QEMU", _look_for_qemu)
    _, has_mkfs = _found("machines: mke2fs", lambda: (None, find_mkfs()))
    kernel, has_kernel = _found("machines: kernel for guests", lambda: _look_for_kernel(images))
    name = "machines: KVM, or else TCG"
    if qemu is None or kernel is None:
        runs = ProbeResult(name, False, "not tried: that takes QEMU and a kernel")
    else:
        _, runs = _found(name, lambda: (None, _decide(images, qemu, kernel, allow_tcg)))
    return [has_qemu, has_mkfs, has_kernel, runs]


def _found(name: str, look: Callable[[], tuple[_T, str]]) -> tuple[_T | None, ProbeResult]:
    try:
        found, detail = look()
    except WorldforkError as error:
        return None, ProbeResult(name, False, error.message, error.remedy)
    except OSError as error:
        return None, ProbeResult(name, False, str(error))
    return found, ProbeResult(name, True, detail)


def _look_for_qemu() -> tuple[Qemu, str]:
    qemu = find_qemu()
    return qemu, f"{qemu.version}, {qemu.program}"


def _look_for_kernel(images: Path) -> tuple[KernelFiles, str]:
    kernel = expect_kernel(images)
    return kernel, kernel.release


def _decide(images: Path, qemu: Qemu, kernel: KernelFiles, allow_tcg: bool) -> str:
    def attempt() -> str:
        return boot_under_kvm(qemu, build_image(images, kernel, program_path().read_bytes()))

    decision = decide(images, qemu, allow_tcg=allow_tcg, attempt=attempt)
    if decision.accel == "kvm":
        return decision.reason
    return f"no KVM ({decision.reason}); {ALLOW_TCG} allows TCG, which is slow and no security boundary"
