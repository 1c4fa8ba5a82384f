"""The verbs for what virtual machines start from: image build, list, remove, prune."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from worldfork import Sandbox
from worldfork.cli.boundary import verb
from worldfork.cli.lookup import open_store
from worldfork.cli.printing import human_bytes, note, print_json, print_line, print_table, progress
from worldfork.cli.sandboxes import AsJson, remove_each
from worldfork.cli.shapes import when
from worldfork.core.errors import ConfigError, Locked
from worldfork.core.settings import Settings, load_settings
from worldfork.records.sandbox import Limits
from worldfork.sandbox.bases import dir_base
from worldfork.sandbox.microvm import debian, guest_image, inside
from worldfork.sandbox.microvm.accel import ALLOW_TCG, Decision, boot_under_kvm, decide, find_qemu
from worldfork.sandbox.microvm.disks import TREES, tree_mark
from worldfork.sandbox.microvm.guest_image import KernelFiles
from worldfork.sandbox.microvm.host import find_host
from worldfork.sandbox.microvm.packages import check_name
from worldfork.sandbox.microvm.sizes import machine_size
from worldfork.sandbox.microvm.template import ensure_template
from worldfork.sandbox.microvm.trees import cached_image
from worldfork.sandbox.microvm.unused import allocated_bytes, drop_unused, used_by_machines
from worldfork.sandbox.program import program_path
from worldfork.store.home import Home, open_home

image = typer.Typer(help="Make what virtual machines start from; list it, remove it.", no_args_is_help=True)

_DEBIAN = "debian"
_BOOT_S = 20
_SHORTEST = 4
_SHOWN = 12


@dataclass(frozen=True)
class _Wanted:
    """What is to be built."""

    base: Path | None
    """A root file system; None: one of Debian's packages."""
    kernel: KernelFiles | None
    include: tuple[str, ...]


@image.command("build")
@verb
def build(
    source: Annotated[str, typer.Option("--from", help="The root file system: debian, or dir:PATH.")],
    driver: Annotated[str, typer.Option(help="The driver that it is for.")] = "microvm",
    kernel: Annotated[
        Path | None, typer.Option(help="A kernel, such as /boot/vmlinuz-RELEASE. Default: the distribution's.")
    ] = None,
    modules: Annotated[Path | None, typer.Option(help="The directory of its modules.")] = None,
    include: Annotated[
        list[str] | None, typer.Option(metavar="PACKAGE", help="One more package of a Debian root; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make kernel, initrd and root image of virtual machines; say beforehand what it needs. What is there is kept."""
    if driver != "microvm":
        raise ConfigError(f"the driver {driver!r} needs no image", remedy="give --driver microvm")
    settings = load_settings()
    wanted = _wanted(source, kernel, modules, tuple(include or ()))
    images = open_home(settings).images
    find_qemu()
    for line in _plan(images, wanted):
        note(line)
    made = _make(settings, images, wanted, as_json)
    if as_json:
        print_json(made)
        return
    print_table(
        ("made", "what", "where"),
        [
            ("kernel", made["kernel"], f"image {made['image_id'][:_SHOWN]}"),
            ("root", made["root"], made["root_image"]),
            ("runs by", made["isolation"], made["reason"] or "-"),
        ],
    )
    print_line("\nA sandbox in a virtual machine:\n")
    print_line(f'  Sandbox.create(image="dir:{made["root"]}", driver="microvm")')
    print_line(f"  worldfork create --driver microvm --base dir:{made['root']}")
    if not made["allowed"]:
        note(f"worldfork: {made['remedy']}")


def _wanted(source: str, kernel: Path | None, modules: Path | None, include: tuple[str, ...]) -> _Wanted:
    if modules is not None and kernel is None:
        raise ConfigError("--modules belongs to a --kernel, and there is none", remedy="give --kernel VMLINUZ")
    found = None if kernel is None else guest_image.named_kernel(kernel, modules)
    if source == _DEBIAN:
        return _Wanted(None, found, tuple(check_name(name) for name in include))
    kind, _, path = source.partition(":")
    if kind != "dir" or not path:
        raise ConfigError(f"--from {source!r} is neither debian nor dir:PATH", remedy="give one of them")
    if include:
        raise ConfigError("--include is for --from debian", remedy="install packages in the directory yourself")
    return _Wanted(Path(dir_base(os.path.abspath(path)).path), found, ())


def _plan(images: Path, wanted: _Wanted) -> list[str]:
    """Return what is about to be done, as lines."""
    plan = guest_image.plan_image(images, wanted.kernel)
    steps, seconds, disk_bytes = list(plan.steps), plan.seconds + _BOOT_S, plan.disk_bytes
    if wanted.base is None:
        steps += debian.plan_debian(images)
        seconds += debian.SECONDS
        disk_bytes = max(disk_bytes, debian.DISK_BYTES)
        steps.append("write it as one read-only image (about 200 MB)")
    else:
        steps.append(f"write {wanted.base} as one read-only image, of about its own size; keep the directory as it is")
    steps.append("try KVM; boot a machine once and keep its memory (80 MB), from which sandboxes start")
    head = f"About {seconds} s and at the most {human_bytes(disk_bytes)} of disk, less for what is there already:"
    return [head, *(f"  - {step}" for step in steps)]


def _make(settings: Settings, images: Path, wanted: _Wanted, quiet: bool) -> dict[str, Any]:
    qemu = find_qemu()
    with progress("kernel", total=5, quiet=quiet) as steps:
        kernel = wanted.kernel and guest_image.choose_kernel(images, wanted.kernel)
        kernel = kernel or guest_image.find_kernel(images) or guest_image.fetch_kernel(images)
        guest = guest_image.build_image(images, kernel, program_path().read_bytes())
        steps.advance("root file system")
        path = wanted.base or debian.debian_root(images, wanted.include).path
        steps.advance("root image")
        root_image = cached_image(images / TREES, {inside.BASE_NAME: (tree_mark(path), path)})
        steps.advance("trying KVM")
        decision = decide(images, qemu, allow_tcg=True, attempt=lambda: boot_under_kvm(qemu, guest))
        allowed = decision.accel == "kvm" or settings.allow_tcg
        if allowed:
            steps.advance("booting a machine")
            host = find_host(images, allow_tcg=settings.allow_tcg)
            ensure_template(images, host, *machine_size(Limits()))
        steps.advance()
    return {
        "image_id": guest.id,
        "kernel": guest.release,
        "root": str(path),
        "root_image": str(root_image),
        "accel": decision.accel,
        "isolation": decision.isolation,
        "reason": decision.reason,
        "allowed": allowed,
        "remedy": "" if allowed else _consent(decision),
        "image": f"dir:{path}",
    }


def _consent(decision: Decision) -> str:
    return (
        f"no machine runs under KVM here ({decision.reason}). Those that QEMU interprets are slow and no security "
        f"boundary; set {ALLOW_TCG}=1 to allow them. None was booted."
    )


@image.command("list")
@verb
def list_made(as_json: AsJson = False) -> None:
    """List kernels, guest images and root file systems that were made here."""
    images = open_home(load_settings()).images
    found = _made(images)
    if as_json:
        print_json(found)
        return
    rows = [
        (each["id"] if each["kind"] == "kernel" else each["id"][:_SHOWN], each["kind"], each["what"],
         human_bytes(each["size_bytes"]), when(each["made_at"]))
        for each in found
    ]  # fmt: skip
    print_table(("id", "kind", "what", "size", "made"), rows, empty="No image is there: worldfork image build")


def _made(images: Path) -> list[dict[str, Any]]:
    found = [
        _entry("kernel", kernel.release, kernel.release, kernel.vmlinuz.parent)
        for kernel in guest_image.list_kernels(images)
    ]
    found += [
        _entry("guest", guest.id, f"kernel {guest.release}", guest.kernel.parent)
        for guest in guest_image.list_images(images)
    ]
    if any((images / TREES).glob("*")):
        found.append(_entry("disks", TREES, "of base directories and layers", images / TREES))
    for root in debian.list_roots(images):
        more = f" with {', '.join(root.wanted)}" if root.wanted else ""
        entry = _entry("root", root.id, f"{root.packages} packages{more}", root.path)
        found.append({**entry, "made_at": root.made_s, "image": f"dir:{root.path}"})
    return found


def _entry(kind: str, id: str, what: str, place: Path) -> dict[str, Any]:
    return {
        "id": id,
        "kind": kind,
        "what": what,
        "size_bytes": allocated_bytes(place),
        "made_at": place.stat().st_mtime,
        "path": str(place),
    }


@image.command("remove")
@verb
def remove(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="From `image list`; its beginning is enough.")],
    as_json: AsJson = False,
) -> int:
    """Remove images; a root file system only if no sandbox and no snapshot needs it."""
    home = open_home(load_settings())
    return remove_each(ids, lambda text: _remove(home, text), as_json=as_json)


@image.command("prune")
@verb
def prune(
    unused: Annotated[float, typer.Option(metavar="HOURS", help="Only what nobody asked for in so many hours.")] = 24.0,
    as_json: AsJson = False,
) -> None:
    """Remove disks of bases and layers, and guests of other kernels. What is wanted again is made again."""
    if unused < 0:
        raise ConfigError(f"--unused {unused:g} is no number of hours", remedy="give 0 or more")
    home = open_home(load_settings())
    dropped = drop_unused(home.images, home.run, unused * 3600)
    if as_json:
        print_json(asdict(dropped))
    else:
        freed = human_bytes(dropped.freed_bytes)
        print_line(f"Removed {dropped.disks} disks and {dropped.guests} guest images: {freed}.")


def _remove(home: Home, text: str) -> str:
    images = home.images
    found = [each for each in _made(images) if each["id"] == text]
    if not found and len(text) >= _SHORTEST:
        found = [each for each in _made(images) if each["id"].startswith(text)]
    if not found:
        debian.remove_root(images, text)  # one that is damaged is not listed
        return text
    if len(found) > 1:
        raise ConfigError(f"{text!r} is the beginning of {len(found)} ids", remedy="give more of it")
    one = found[0]
    if one["kind"] == "disks":
        raise ConfigError("disks are made and removed together", remedy="worldfork image prune")
    if one["kind"] == "root":
        _expect_unused(one["path"])
        debian.remove_root(images, one["id"])
    else:
        users = {name for path, name in used_by_machines(home.run).items() if Path(one["path"]) in path.parents}
        _expect_none(one["path"], sorted(users))
        guest_image.remove_image(images, one["id"])
    return str(one["id"])


def _expect_unused(path: str) -> None:
    """Refuse a root that somebody needs.

    Raises:
        Locked: with the ids of who needs it.
    """
    path = os.path.realpath(path)  # as bases are kept
    holders = [info.sandbox_id for info in Sandbox.list() if info.base == f"dir:{path}"]
    with open_store() as store:
        # The snapshot of a base itself is made again with the base.
        holders += [
            record.snapshot_id
            for record in store.snapshots()
            if record.base.get("path") == path and record.made_by != "base"
        ]
    _expect_none(path, holders)


def _expect_none(path: str, holders: list[str]) -> None:
    if holders:
        raise Locked(
            f"{len(holders)} sandboxes and snapshots need {path}",
            remedy="end and remove these first: worldfork ls, worldfork snapshots",
            holders=holders,
        )
