"""The guest's first files: an archive that the kernel can read, and modules in an order in which they load."""

from __future__ import annotations

import lzma
import stat
from pathlib import Path

import pytest

from worldfork.core.errors import ConfigError, DriverUnavailable
from worldfork.sandbox.microvm import initrd


def unpack(archive: bytes) -> dict[str, tuple[int, bytes]]:
    """Read an archive as the kernel does."""
    files = {}
    at = 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name = archive[at + 110 : at + 110 + fields[11] - 1].decode()
        at += 110 + fields[11]
        at += -at % 4
        content = archive[at : at + fields[6]]
        at += fields[6]
        at += -at % 4
        if name == "TRAILER!!!":
            return files
        files[name] = (fields[1], content)


def module(*depends: str) -> bytes:
    return b"\x7fELF....license=GPL\0depends=" + ",".join(depends).encode() + b"\0name=x\0"


def write(top: Path, name: str, content: bytes) -> None:
    path = top / "kernel" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_the_archive_holds_init_and_the_modules_in_order() -> None:
    files = unpack(initrd.build(b"program", [("first", b"1"), ("second", b"22")]))
    assert files["init"] == (stat.S_IFREG | 0o755, b"program")
    assert files["modules/order"][1] == b"first.ko\nsecond.ko\n"
    assert files["modules/second.ko"] == (stat.S_IFREG | 0o644, b"22")
    assert stat.S_ISDIR(files["modules"][0])
    assert list(files).index("modules") < list(files).index("modules/first.ko")


def test_a_module_comes_after_what_it_depends_on(tmp_path: Path) -> None:
    write(tmp_path, "drivers/a-disk.ko", module("ring", "bus"))
    write(tmp_path, "drivers/bus.ko.xz", lzma.compress(module("ring")))
    write(tmp_path, "ring.ko", module())
    write(tmp_path, "unwanted.ko", module())
    assert [name for name, _ in initrd.find_modules(tmp_path, ["a_disk", "ring"])] == ["ring", "bus", "a_disk"]


def test_what_is_built_in_needs_no_file(tmp_path: Path) -> None:
    write(tmp_path, "disk.ko", module("ring"))
    (tmp_path / "modules.builtin").write_text("kernel/drivers/ring.ko\nkernel/fs/over-lay.ko\n")
    assert [name for name, _ in initrd.find_modules(tmp_path, ["disk", "over_lay"])] == ["disk"]


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    write(tmp_path, "disk.ko", module("ring"))
    with pytest.raises(DriverUnavailable) as caught:
        initrd.find_modules(tmp_path, ["disk"])
    assert caught.value.fields["module"] == "ring"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("disk.ko", b"text"),
        ("disk.ko", b"\x7fELF without"),
        ("disk.ko.xz", b"no xz"),
        ("disk.ko.zst", b"no zstd"),
        ("disk.ko.gz", b"no gzip"),
        ("disk.ko", module("disk")),
    ],
)
def test_a_damaged_module_is_told(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path, name, content)
    with pytest.raises(ConfigError):
        initrd.find_modules(tmp_path, ["disk"])
