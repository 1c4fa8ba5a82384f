"""The verbs for images, on real files: a kernel of the user's, a small root, a QEMU that does not boot anything."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.stores import record_of
from tests.unit.cli.conftest import Invoke
from tests.unit.sandbox.microvm.test_initrd import module

from worldfork.cli import image as verbs
from worldfork.cli.lookup import open_store
from worldfork.core.errors import Corrupt
from worldfork.lineage.place import close_places
from worldfork.sandbox.microvm import debian, guest_image, initrd
from worldfork.sandbox.microvm.debian import RootTree

RELEASE = "6.1.0-9-cloud-amd64"


class Machine:
    """A machine with a QEMU under which no guest comes up."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images = top / "home/images"
        self.bin = top / "bin"
        self.bin.mkdir()
        monkeypatch.setenv("PATH", f"{self.bin}:/usr/bin:/bin")
        monkeypatch.setenv("WORLDFORK_HOME", str(top / "home"))
        monkeypatch.setenv("WORLDFORK_SCRATCH", str(top / "home"))
        monkeypatch.delenv("WORLDFORK_ALLOW_TCG", raising=False)
        self.program("qemu-system-x86_64", "[ $1 != --version ] || echo 'QEMU emulator version 7.2.22 (Debian)'")
        boot, modules = top / "boot", top / "lib/modules" / RELEASE
        boot.mkdir()
        modules.mkdir(parents=True)
        self.kernel = boot / f"vmlinuz-{RELEASE}"
        self.kernel.write_bytes(b"\x7fELF kernel")
        for name in initrd.WANTED:
            (modules / f"{name}.ko").write_bytes(module())
        self.root = top / "root"
        (self.root / "bin").mkdir(parents=True)
        (self.root / "bin/true").write_text("true")

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.bin / name).chmod(0o755)

    def line(self, *more: str) -> list[str]:
        return ["image", "build", "--from", f"dir:{self.root}", "--kernel", str(self.kernel), *more]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(tmp_path, monkeypatch)
    close_places()


def built(invoke: Invoke, *line: str) -> Any:
    result = invoke(*line, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def listed(invoke: Invoke) -> list[Any]:
    found = json.loads(invoke("image", "list", "--json").stdout)
    assert isinstance(found, list)
    return found


def test_a_build_says_first_what_it_does_and_last_how_to_use_it(machine: Machine, invoke: Invoke) -> None:
    result = invoke(*machine.line())
    assert result.exit_code == 0, result.stderr
    first, *steps = result.stderr.splitlines()
    assert first.startswith("About ")
    assert "s and at the most" in first
    assert any(f"use the kernel {RELEASE}" in step for step in steps)
    assert f'Sandbox.create(image="dir:{machine.root}", driver="microvm")' in result.stdout
    assert f"worldfork create --driver microvm --base dir:{machine.root}" in result.stdout
    # No guest comes up here under KVM, and nobody allowed the other way.
    assert "none (tcg)" in result.stdout
    assert "WORLDFORK_ALLOW_TCG=1" in result.stderr


def test_what_was_made_is_there_and_is_made_once(machine: Machine, invoke: Invoke) -> None:
    made = built(invoke, *machine.line())
    assert (made["kernel"], made["image"], made["allowed"]) == (RELEASE, f"dir:{machine.root}", False)
    guest = guest_image.read_image(machine.images, made["image_id"])
    image = Path(made["root_image"])
    before = (guest.kernel.stat().st_ino, image.stat().st_ino)
    assert built(invoke, *machine.line()) == made
    assert (guest.kernel.stat().st_ino, image.stat().st_ino) == before
    # The kernel that was named stays the one of guests.
    assert built(invoke, "image", "build", "--from", f"dir:{machine.root}") == made
    kinds = {each["kind"]: each["id"] for each in listed(invoke)}
    assert kinds == {"kernel": RELEASE, "guest": made["image_id"], "disks": "trees"}


def test_where_it_is_allowed_a_machine_is_booted(
    machine: Machine, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    booted = []
    monkeypatch.setenv("WORLDFORK_ALLOW_TCG", "1")
    monkeypatch.setattr(verbs, "ensure_template", lambda images, host, ram, cpus: booted.append((ram, cpus)))
    made = built(invoke, *machine.line())
    assert (made["allowed"], made["isolation"]) == (True, "none (tcg)")
    assert booted == [verbs.machine_size(verbs.Limits())]


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--from nothing", 2, "dir:PATH"),
        ("--from dir:", 2, "dir:PATH"),
        ("--from dir:/nonexistent", 2, "not a directory"),
        ("--from host", 2, "dir:PATH"),
        ("--from debian --driver namespace", 2, "needs no image"),
        ("--from debian --modules /lib", 2, "--kernel"),
        ("--from debian --kernel /nonexistent/vmlinuz-6.1.0", 2, "no file"),
        ("--from debian --include --yes", 2, "name of a package"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_made(
    machine: Machine, invoke: Invoke, line: str, code: int, words: str
) -> None:
    result = invoke("image", "build", *line.split())
    assert result.exit_code == code
    assert words in result.stderr
    assert not (machine.images / "kernels").exists()


def test_packages_are_for_a_debian_root(machine: Machine, invoke: Invoke) -> None:
    result = invoke(*machine.line("--include", "gcc"))
    assert (result.exit_code, "--from debian" in result.stderr) == (2, True)


def test_no_qemu_is_told_before_anything_is_made(
    machine: Machine, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.program("qemu-system-x86_64", "echo 'QEMU emulator version 6.2.0'")
    result = invoke(*machine.line())
    assert (result.exit_code, "too old" in result.stderr) == (20, True)
    monkeypatch.setenv("PATH", str(machine.root))
    result = invoke(*machine.line())
    assert (result.exit_code, "qemu-system-x86" in result.stderr) == (20, True)
    assert not (machine.images / "kernels").exists()


def test_a_kernel_without_its_modules_is_told(machine: Machine, invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "lib/modules" / RELEASE / f"{initrd.WANTED[0]}.ko").unlink()
    result = invoke(*machine.line())
    assert (result.exit_code, initrd.WANTED[0] in result.stderr) == (20, True)


def test_a_debian_root_is_asked_for_with_its_packages(
    machine: Machine, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = []

    def make(images: Path, more: tuple[str, ...]) -> RootTree:
        wanted.append((images, more))
        return RootTree("0" * 16, machine.root, 140, more, 0.0)

    monkeypatch.setattr(debian, "plan_debian", lambda images: ("download packages",))
    monkeypatch.setattr(debian, "debian_root", make)
    line = [
        "image",
        "build",
        "--from",
        "debian",
        "--kernel",
        str(machine.kernel),
        "--include",
        "gcc",
        "--include",
        "g++",
    ]
    result = invoke(*line)
    assert result.exit_code == 0, result.stderr
    assert "download packages" in result.stderr
    assert wanted == [(machine.images, ("gcc", "g++"))]


def a_root(images: Path, name: str = "0123456789abcdef") -> Path:
    tree = images / "roots" / name / "fs"
    tree.mkdir(parents=True)
    (tree / "file").write_text("content")
    (tree.parent / "manifest.json").write_text(json.dumps({"packages": 3, "wanted": ["gcc"], "made_s": 5.0}))
    return tree


def test_images_are_removed_by_the_beginning_of_their_ids(machine: Machine, invoke: Invoke) -> None:
    made = built(invoke, *machine.line())
    tree = a_root(machine.images)
    assert [each["what"] for each in listed(invoke) if each["kind"] == "root"] == ["3 packages with gcc"]
    assert "0123456789ab" in invoke("image", "list").stdout
    result = invoke("image", "remove", "0123456", made["image_id"][:20], RELEASE)
    assert (result.exit_code, result.stdout.splitlines()) == (0, ["0123456789abcdef", made["image_id"], RELEASE])
    assert not tree.exists()
    invoke("image", "prune", "--unused", "0")
    assert listed(invoke) == []
    assert "image build" in invoke("image", "list").stdout


def test_an_id_that_means_nothing_or_too_much_is_told(machine: Machine, invoke: Invoke) -> None:
    for name in ("0123456789abcdef", "0123456789abcde0"):
        a_root(machine.images, name)
    assert invoke("image", "remove", "012345").exit_code == 2
    for text in ("ffff", "..", "012", "roots"):
        assert invoke("image", "remove", text).exit_code == 13
    assert len(listed(invoke)) == 2


def test_a_damaged_root_can_be_removed(machine: Machine, invoke: Invoke) -> None:
    tree = a_root(machine.images)
    (tree.parent / "manifest.json").unlink()
    with pytest.raises(Corrupt):
        debian.read_root(machine.images, "0123456789abcdef")
    assert invoke("image", "remove", "0123456789abcdef").exit_code == 0
    assert not tree.exists()


def test_a_root_that_a_snapshot_needs_stays(machine: Machine, invoke: Invoke) -> None:
    tree = a_root(machine.images)
    base = {"kind": "dir", "path": str(tree)}
    with open_store() as store:
        records = []
        for made_by in ("base", "checkpoint"):
            draft = store.begin_layer(form="trusted")
            draft.path.mkdir()
            records.append(dataclasses.replace(record_of((draft.layer_id,)), base=base, made_by=made_by))
            store.publish(records[-1], [draft.layer_id])
    result = invoke("image", "remove", "0123456789abcdef", "--json")
    assert result.exit_code == 11
    assert json.loads(result.stderr)["error"]["fields"]["holders"] == [records[1].snapshot_id]
    assert (tree / "file").exists()


def test_a_guest_image_of_a_running_machine_stays(
    machine: Machine, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = built(invoke, *machine.line())
    template = machine.images / made["image_id"] / "templates/one"
    monkeypatch.setattr(verbs, "used_by_machines", lambda runs: {template: "sb-a"})
    result = invoke("image", "remove", made["image_id"], "--json")
    assert result.exit_code == 11
    assert json.loads(result.stderr)["error"]["fields"]["holders"] == ["sb-a"]


def test_disks_are_pruned_and_made_again(machine: Machine, invoke: Invoke) -> None:
    made = built(invoke, *machine.line())
    assert built(invoke, "image", "prune") == {"disks": 0, "guests": 0, "freed_bytes": 0}
    assert invoke("image", "remove", "trees").exit_code == 2
    pruned = invoke("image", "prune", "--unused", "0")
    assert "Removed 1 disks" in pruned.stdout
    assert not Path(made["root_image"]).exists()
    assert built(invoke, *machine.line())["root_image"] == made["root_image"]
    assert invoke("image", "prune", "--unused", "-1").exit_code == 2


def test_every_remedy_that_is_a_build_can_be_run_as_it_stands() -> None:
    sources = Path(verbs.__file__).parents[1].rglob("*.py")
    named = [
        (path.name, line.strip())
        for path in sources
        for line in path.read_text(encoding="utf-8").splitlines()
        if "worldfork image build -" in line
    ]
    assert named
    assert [each for each in named if "--from " not in each[1]] == []
