"""A guest's image: made once from a kernel on the disk, told beforehand, and damaged ones made again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.sandbox.microvm.test_initrd import module
from tests.unit.sandbox.microvm.test_initrd import unpack as read_archive

from worldfork.core.errors import ConfigError, Corrupt, DriverUnavailable, NotFound
from worldfork.sandbox.microvm import guest_image, initrd
from worldfork.sandbox.microvm.guest_image import KernelFiles

INIT = b"\x7fELF init"


@pytest.fixture
def kernel(tmp_path: Path) -> KernelFiles:
    """A kernel with every module that is wanted."""
    top = tmp_path / "package"
    (top / "modules").mkdir(parents=True)
    (top / "vmlinuz").write_bytes(b"\x7fELF kernel")
    for name in initrd.WANTED:
        (top / "modules" / f"{name}.ko").write_bytes(module())
    return KernelFiles("6.1.0-1-cloud-amd64", top / "vmlinuz", top / "modules")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return tmp_path / "images"


def without_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def program(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_an_image_is_made_once(images: Path, kernel: KernelFiles) -> None:
    image = guest_image.build_image(images, kernel, INIT)
    assert image.kernel.read_bytes() == b"\x7fELF kernel"
    assert read_archive(image.initrd.read_bytes())["init"][1] == INIT
    before = image.kernel.stat().st_ino
    assert guest_image.build_image(images, kernel, INIT) == image == guest_image.read_image(images, image.id)
    assert image.kernel.stat().st_ino == before


def test_another_init_is_another_image(images: Path, kernel: KernelFiles) -> None:
    one = guest_image.build_image(images, kernel, INIT)
    assert guest_image.build_image(images, kernel, INIT + b"2").id != one.id


@pytest.mark.parametrize("name", ["vmlinux", "initrd"])
def test_a_damaged_image_is_told_and_made_again(images: Path, kernel: KernelFiles, name: str) -> None:
    image = guest_image.build_image(images, kernel, INIT)
    os.truncate(images / image.id / name, 3)
    with pytest.raises(Corrupt):
        guest_image.read_image(images, image.id)
    assert guest_image.build_image(images, kernel, INIT) == image
    (images / image.id / name).unlink()
    with pytest.raises(Corrupt):
        guest_image.read_image(images, image.id)


@pytest.mark.parametrize("name", ["../etc", "0" * 64, ""])
def test_an_image_that_is_not_there_is_told(images: Path, name: str) -> None:
    with pytest.raises(NotFound) as caught:
        guest_image.read_image(images, name)
    assert "image build" in caught.value.remedy


def test_what_is_no_kernel_and_no_program_is_told(images: Path, kernel: KernelFiles, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        guest_image.build_image(images, kernel, b"text")
    with pytest.raises(ConfigError):
        guest_image.build_image(images, KernelFiles("x", tmp_path / "none", kernel.modules), INIT)
    with pytest.raises(ConfigError):
        guest_image.build_image(images, KernelFiles("../x", kernel.vmlinuz, kernel.modules), INIT)


def test_a_plan_does_nothing_and_names_the_kernel(images: Path, kernel: KernelFiles) -> None:
    plan = guest_image.plan_image(images, kernel)
    assert plan.kernel == kernel
    assert kernel.release in plan.steps[0]
    assert plan.seconds > 0
    assert not images.exists()


def test_a_machine_without_apt_gets_the_remedy_beforehand(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_image, "find_kernel", lambda _: None)
    without_programs(monkeypatch, tmp_path)
    with pytest.raises(DriverUnavailable) as caught:
        guest_image.plan_image(images)
    assert caught.value.fields["lacks"] == "apt-get"
    assert "--kernel" in caught.value.remedy


@pytest.mark.parametrize(
    ("apt_cache", "apt_get", "message"),
    [
        ("exit 0", "exit 0", "no package"),
        ("echo '  Depends: linux-image-6.1.0-9-cloud-amd64'", "echo 'E: no net' >&2; exit 100", "no net"),
        ("echo '  Depends: linux-image-6.1.0-9-cloud-amd64'", "exit 0", "downloaded no linux-image-6.1.0-9"),
        ("echo '  Depends: linux-image-6.1.0-9-cloud-amd64'", ": > a.deb", "dpkg-deb"),
    ],
)
def test_a_package_that_is_not_to_be_had_is_told(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apt_cache: str, apt_get: str, message: str
) -> None:
    without_programs(monkeypatch, tmp_path)
    program(tmp_path, "apt-config", "exit 0")
    program(tmp_path, "apt-cache", apt_cache)
    program(tmp_path, "apt-get", apt_get)
    program(tmp_path, "dpkg-deb", "echo 'dpkg-deb: no package' >&2; exit 2")
    with pytest.raises(DriverUnavailable, match=message) as caught:
        guest_image.fetch_kernel(images)
    assert caught.value.remedy
    assert not list((images / "kernels").iterdir())


def test_a_fetched_kernel_is_kept_with_its_few_modules(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: KernelFiles
) -> None:
    without_programs(monkeypatch, tmp_path)
    program(tmp_path, "apt-config", "exit 0")
    program(tmp_path, "apt-cache", "echo ' |Depends: linux-image-6.1.0-9-cloud-amd64'")
    program(tmp_path, "apt-get", ": > a.deb")
    release = "6.1.0-9-cloud-amd64"
    modules = f"root/lib/modules/{release}/kernel"
    unpack = f"/bin/mkdir -p root/boot {modules}; /bin/cp {kernel.vmlinuz} root/boot/vmlinuz-{release}"
    program(tmp_path, "dpkg-deb", f"{unpack}; /bin/cp {kernel.modules}/*.ko {modules}")
    fetched = guest_image.fetch_kernel(images)
    assert fetched.release == release
    assert guest_image.find_kernel(images) == fetched == guest_image.fetch_kernel(images)
    assert [path.name for path in (images / "kernels").iterdir()] == [release]
    assert guest_image.build_image(images, fetched, INIT).release == release


def test_a_kernel_that_was_kept_with_too_few_modules_is_passed_over_and_fetched_again(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: KernelFiles
) -> None:
    monkeypatch.setattr(guest_image, "_installed", lambda root: iter(()) if root == Path("/") else iter([kernel]))
    without_programs(monkeypatch, tmp_path)
    for name, text in (("apt-config", ""), ("apt-get", ": > a.deb"), ("dpkg-deb", "")):
        program(tmp_path, name, text)
    program(tmp_path, "apt-cache", f"echo '  Depends: linux-image-{kernel.release}'")
    lost = guest_image.fetch_kernel(images).modules / f"{initrd.WANTED[-1]}.ko"
    assert guest_image.find_kernel(images) is not None
    lost.unlink()
    assert guest_image.find_kernel(images) is None
    assert guest_image.fetch_kernel(images) == guest_image.find_kernel(images)
    assert lost.exists()


def test_a_kernel_of_the_users_is_chosen_over_a_newer_one(images: Path, kernel: KernelFiles, tmp_path: Path) -> None:
    newer = guest_image.choose_kernel(images, KernelFiles("6.9.0-1", kernel.vmlinuz, kernel.modules))
    assert guest_image.find_kernel(images) == newer
    chosen = guest_image.choose_kernel(images, kernel)
    assert guest_image.find_kernel(images) == chosen
    assert guest_image.list_kernels(images) == [chosen, newer]
    rebuilt = tmp_path / "vmlinuz-again"
    rebuilt.write_bytes(b"\x7fELF another")
    again = guest_image.choose_kernel(images, KernelFiles(kernel.release, rebuilt, kernel.modules))
    assert again.vmlinuz.read_bytes() == b"\x7fELF another"
    guest_image.remove_image(images, kernel.release)
    assert guest_image.find_kernel(images) == newer
    with pytest.raises(NotFound):
        guest_image.remove_image(images, kernel.release)


def test_a_kernel_that_lacks_a_module_leaves_the_one_that_was_chosen(images: Path, kernel: KernelFiles) -> None:
    chosen = guest_image.choose_kernel(images, kernel)
    (kernel.modules / f"{initrd.WANTED[0]}.ko").unlink()
    with pytest.raises(DriverUnavailable):
        guest_image.choose_kernel(images, kernel)
    assert guest_image.find_kernel(images) == chosen


def test_the_release_of_a_named_kernel_is_read_from_its_name(tmp_path: Path) -> None:
    boot, modules = tmp_path / "boot", tmp_path / "lib/modules/6.1.0-9"
    boot.mkdir()
    for name in ("vmlinuz-6.1.0-9", "mine"):
        (boot / name).touch()
    with pytest.raises(ConfigError, match="no directory"):
        guest_image.named_kernel(boot / "vmlinuz-6.1.0-9", None)
    modules.mkdir(parents=True)
    named = guest_image.named_kernel(boot / "vmlinuz-6.1.0-9", None)
    assert named == KernelFiles("6.1.0-9", boot / "vmlinuz-6.1.0-9", modules)
    assert guest_image.named_kernel(boot / "mine", modules).release == "6.1.0-9"
    with pytest.raises(ConfigError, match="release"):
        guest_image.named_kernel(boot / "mine", None)
    with pytest.raises(ConfigError, match="no file"):
        guest_image.named_kernel(boot / "vmlinuz-6.1.0-8", modules)


@pytest.mark.parametrize("name", ["..", ".", "../images", "", "a/b"])
def test_only_images_can_be_removed(images: Path, name: str) -> None:
    (images / "kernels").mkdir(parents=True)
    with pytest.raises(NotFound):
        guest_image.remove_image(images, name)
    assert (images / "kernels").is_dir()
