"""What every guest starts from: a kernel and an initrd, made from the distribution's kernel package."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from worldfork.core.errors import ConfigError, Corrupt, DriverUnavailable, NotFound
from worldfork.core.ids import content_id
from worldfork.core.remove import remove_tree
from worldfork.core.whole_file import whole_file
from worldfork.sandbox.microvm import initrd, packages
from worldfork.sandbox.microvm.kernel import extract_kernel
from worldfork.sandbox.microvm.packages import Apt, with_apt
from worldfork.sandbox.microvm.programs import run_program

PACKAGE = "linux-image-cloud-amd64"
"""A small kernel for virtual machines; it names the package of its latest version as what it depends on."""
REMEDY = "worldfork image build --from debian"
_BY_HAND = "worldfork image build --from dir:PATH --kernel VMLINUZ --modules DIRECTORY, of Debian's " + PACKAGE

_FORMAT = b"guest-1"
_KERNEL, _INITRD, _MANIFEST = "vmlinux", "initrd", "manifest.json"
_KERNELS, _CHOSEN = "kernels", "chosen"
_UNPACK_S = 120.0
_VERSIONED = re.compile(r"^\s*\|?Depends: (linux-image-\d\S*)$", re.MULTILINE)
_RELEASE = re.compile(r"[A-Za-z0-9._+~-]{1,100}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class KernelFiles:
    """A kernel on this machine's disk, to be read and never to be started as the machine's own."""

    release: str
    vmlinuz: Path
    modules: Path
    """The directory with its modules, somewhere below."""


@dataclass(frozen=True)
class GuestImage:
    """A kernel and an initrd that are ready to start."""

    id: str
    release: str
    """Of the kernel."""
    kernel: Path
    initrd: Path


@dataclass(frozen=True)
class ImagePlan:
    """What making an image will take; made without doing any of it."""

    kernel: KernelFiles | None
    """None: its package is downloaded."""
    steps: tuple[str, ...]
    seconds: int
    """About."""
    disk_bytes: int
    """About, at the most, while it is made."""


def plan_image(images: Path, kernel: KernelFiles | None = None) -> ImagePlan:
    """Say what `build_image` will need on this machine.

    Args:
        images: such as `home/images`.
        kernel: taken instead of what is found.

    Raises:
        DriverUnavailable: there is no kernel, and no way to get one.
    """
    found = kernel or find_kernel(images)
    making = f"unpack the kernel and pack an initrd into {images}"
    if found is not None:
        return ImagePlan(found, (f"use the kernel {found.release} at {found.vmlinuz}", making), 5, 80 << 20)
    if platform.machine() != "x86_64":
        raise DriverUnavailable(f"guests are made for x86_64, and this machine is {platform.machine()}")
    if lacks := packages.missing_program():
        raise DriverUnavailable(
            f"this machine has no kernel package and no {lacks} to get one",
            remedy=_BY_HAND,
            lacks=lacks,
        )
    steps = (f"download the package of {PACKAGE} (30 MB) with apt-get; it is unpacked and not installed", making)
    return ImagePlan(None, steps, 30, 250 << 20)


def find_kernel(images: Path) -> KernelFiles | None:
    """Return the kernel that was chosen last, or the newest that was fetched, or the newest cloud kernel installed."""
    kept = list_kernels(images)
    chosen = _chosen(images)
    if kept:
        return next((kernel for kernel in kept if kernel.release == chosen), kept[-1])
    # A kernel for all hardware works as well, but not every one has the few modules that are needed.
    installed = sorted(_installed(Path("/")), key=lambda files: _order(files.release))
    return installed[-1] if installed else None


def list_kernels(images: Path) -> list[KernelFiles]:
    """Return the kernels that are kept for guests and have what these load, the newest last."""
    found = filter(_has_modules, _with_modules((images / _KERNELS).glob("*/vmlinuz")))
    return sorted(found, key=lambda files: _order(files.release))


def _has_modules(kernel: KernelFiles) -> bool:
    # One that was kept when guests loaded less is no use.
    with contextlib.suppress(ConfigError, DriverUnavailable):
        return bool(initrd.find_modules(kernel.modules)) or (kernel.modules / "modules.builtin").exists()
    return False


def _chosen(images: Path) -> str:
    try:
        return (images / _KERNELS / _CHOSEN).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def choose_kernel(images: Path, kernel: KernelFiles) -> KernelFiles:
    """Keep a kernel that the user names, as the one that guests start with from here on. Blocking.

    Raises:
        ConfigError: it cannot be read, or is no kernel.
        DriverUnavailable: it lacks a module.
    """
    if not _RELEASE.fullmatch(kernel.release):
        raise ConfigError(f"{kernel.release!r} is no release of a kernel", remedy="name the kernel's own")
    kernels = images / _KERNELS
    kernels.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=".part-", dir=kernels))
    try:
        # One of the same release may have been built otherwise.
        kept = _keep(kernels, place, kernel, replaces=True)
    except OSError as error:
        raise ConfigError(f"{kernel.vmlinuz} cannot be read: {error.strerror}", remedy="name another kernel") from error
    finally:
        remove_tree(place)
    with whole_file(kernels / _CHOSEN) as part:
        part.write_text(f"{kernel.release}\n", encoding="utf-8")
    return kept


def named_kernel(vmlinuz: Path, modules: Path | None) -> KernelFiles:
    """Return the kernel of a file that the user names, such as `/boot/vmlinuz-6.1.0-9-cloud-amd64`.

    Args:
        vmlinuz: its name ends in the release, or that of `modules` does.
        modules: a directory with its modules; by default `lib/modules/RELEASE` beside the directory of `vmlinuz`.

    Raises:
        ConfigError: one of them is not there, or no release is to be seen.
    """
    words = (vmlinuz.name.partition("-")[2], modules.name if modules is not None else "")
    release = next((word for word in words if re.match(r"\d+\.\d+", word)), "")
    if not release or not _RELEASE.fullmatch(release):
        raise ConfigError(f"no release is to be seen in {str(vmlinuz)!r}", remedy="name it vmlinuz-RELEASE")
    top = modules if modules is not None else vmlinuz.absolute().parent.parent / "lib/modules" / release
    if not vmlinuz.is_file():
        raise ConfigError(f"{vmlinuz} is no file", remedy="name a kernel")
    if not top.is_dir():
        raise ConfigError(f"{top} is no directory", remedy="say where the kernel's modules are: --modules DIRECTORY")
    return KernelFiles(release, vmlinuz, top)


def _with_modules(kernels: Iterator[Path]) -> Iterator[KernelFiles]:
    for vmlinuz in kernels:
        if (vmlinuz.parent / "modules").is_dir():
            yield KernelFiles(vmlinuz.parent.name, vmlinuz, vmlinuz.parent / "modules")


def _installed(root: Path) -> Iterator[KernelFiles]:
    for vmlinuz in (root / "boot").glob("vmlinuz-*"):
        release = vmlinuz.name.removeprefix("vmlinuz-")
        modules = root / "lib/modules" / release
        if "cloud" in release and (modules / "kernel").is_dir() and os.access(vmlinuz, os.R_OK):
            yield KernelFiles(release, vmlinuz, modules)


def _order(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]


def fetch_kernel(images: Path) -> KernelFiles:
    """Download the kernel package of the distribution and keep what guests need of it. Blocking.

    Nothing is installed, and no right of root is needed.

    Raises:
        DriverUnavailable: the package is not to be had; the remedy says what to do.
    """
    kernels = images / _KERNELS
    kernels.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=".part-", dir=kernels))
    try:
        package = with_apt(place / "apt", _download)
        run_program(["dpkg-deb", "-x", str(package), "root"], place, _UNPACK_S, packages.REMEDY)
        found = list(_installed(place / "root"))
        if not found:
            raise DriverUnavailable(f"the package {package.name} holds no kernel with modules")
        target = kernels / found[0].release
        old = KernelFiles(target.name, target / "vmlinuz", target / "modules")
        return _keep(kernels, place, found[0], replaces=target.exists() and not _has_modules(old))
    finally:
        remove_tree(place)


def _keep(kernels: Path, place: Path, found: KernelFiles, *, replaces: bool = False) -> KernelFiles:
    """Move a kernel and the few modules that guests load to where they stay."""
    kept = place / "kept"
    (kept / "modules").mkdir(parents=True)
    for name, content in initrd.find_modules(found.modules):
        (kept / "modules" / f"{name}.ko").write_bytes(content)
    built_in = found.modules / "modules.builtin"
    if built_in.exists():
        shutil.copyfile(built_in, kept / "modules" / built_in.name)
    shutil.copyfile(found.vmlinuz, kept / "vmlinuz")
    target = kernels / found.release
    if replaces:
        remove_tree(target)
    if not target.exists():
        try:
            os.rename(kept, target)
        except OSError:
            if not target.exists():  # else somebody else was first
                raise
    return KernelFiles(found.release, target / "vmlinuz", target / "modules")


def _download(apt: Apt) -> Path:
    found = _VERSIONED.search(apt.depends(PACKAGE))
    if found is None:
        raise DriverUnavailable(
            f"this distribution has no package {PACKAGE}",
            remedy=_BY_HAND,
            lacks=PACKAGE,
        )
    return apt.download(found.group(1))


def build_image(images: Path, kernel: KernelFiles, init: bytes) -> GuestImage:
    """Return the image of a kernel and an init program, made if it is not there yet. Blocking.

    Args:
        images: such as `home/images`.
        kernel: from `find_kernel`, `fetch_kernel`, or named by the user.
        init: a static program, which becomes `/init`.

    Raises:
        ConfigError: the files are none of a kernel.
        DriverUnavailable: the kernel lacks a module.
    """
    if not _RELEASE.fullmatch(kernel.release):
        raise ConfigError(f"{kernel.release!r} is no release of a kernel", remedy="name the kernel's own")
    if not init.startswith(b"\x7fELF"):
        raise ConfigError("init is no program", remedy="install Worldfork again")
    packed, modules = _read(kernel)
    name = _name(packed, init, modules)
    # One that is damaged is made again.
    with contextlib.suppress(NotFound, Corrupt):
        return read_image(images, name)
    contents = {_KERNEL: extract_kernel(packed), _INITRD: initrd.build(init, modules)}
    place = images / name
    place.mkdir(parents=True, exist_ok=True)
    for file, content in contents.items():
        with whole_file(place / file) as part:
            part.write_bytes(content)
    # Written last: what has a manifest is complete.
    sizes = {file: len(content) for file, content in contents.items()}
    with whole_file(place / _MANIFEST) as part:
        part.write_text(json.dumps({"format": 1, "release": kernel.release, "sizes": sizes}, indent=1) + "\n")
    return GuestImage(name, kernel.release, place / _KERNEL, place / _INITRD)


def image_name(kernel: KernelFiles, init: bytes) -> str:
    """Return the id that `build_image` gives to an image; raises as it does."""
    packed, modules = _read(kernel)
    return _name(packed, init, modules)


def _read(kernel: KernelFiles) -> tuple[bytes, list[tuple[str, bytes]]]:
    try:
        return kernel.vmlinuz.read_bytes(), initrd.find_modules(kernel.modules)
    except OSError as error:
        raise ConfigError(f"{kernel.vmlinuz} cannot be read: {error.strerror}", remedy="name another kernel") from error


def _name(packed: bytes, init: bytes, modules: list[tuple[str, bytes]]) -> str:
    return content_id(_FORMAT, packed, init, *(part for module, body in modules for part in (module.encode(), body)))


def read_image(images: Path, id: str) -> GuestImage:
    """Return an image that was made before.

    Raises:
        NotFound: there is none with this id.
        Corrupt: a file of it is gone or has another size.
    """
    place = images / id
    try:
        manifest = json.loads((place / _MANIFEST).read_text(encoding="utf-8")) if _DIGEST.fullmatch(id) else None
    except FileNotFoundError:
        manifest = None
    except ValueError:
        manifest = {}
    if manifest is None:
        raise NotFound(f"there is no guest image {id}", remedy=REMEDY, id=id)
    release, sizes = manifest.get("release"), manifest.get("sizes")
    actual = {name: _size(place / name) for name in (_KERNEL, _INITRD)}
    if not isinstance(release, str) or sizes != actual:
        raise Corrupt(
            f"the guest image {id} is damaged", remedy=f"remove {place}, then {REMEDY}", expected=sizes, actual=actual
        )
    return GuestImage(id, release, place / _KERNEL, place / _INITRD)


def list_images(images: Path) -> list[GuestImage]:
    """Return all guest images that are whole."""
    found = []
    for place in sorted(images.glob("[0-9a-f]*")):
        with contextlib.suppress(NotFound, Corrupt):
            found.append(read_image(images, place.name))
    return found


def remove_image(images: Path, name: str) -> None:
    """Remove a guest image with its templates, or a kernel by its release. What runs of it is not touched. Blocking.

    Raises:
        NotFound: there is none of this name.
        StoreError: something of it is left.
    """
    place = images / name if _DIGEST.fullmatch(name) else images / _KERNELS / name
    if not _RELEASE.fullmatch(name) or name in (".", "..") or not place.is_dir():
        raise NotFound(f"there is no guest image or kernel {name}", remedy="worldfork image list", id=name)
    remove_tree(place)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
