"""The first file system of a guest: an archive in cpio's `newc` form, and the kernel modules that go into it."""

from __future__ import annotations

import gzip
import lzma
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from worldfork.core.errors import ConfigError, DriverUnavailable

MODULES_DIRECTORY = "modules"
ORDER_NAME = "order"
"""The file in `MODULES_DIRECTORY` that names the others, one a line, in the order in which they load."""
WANTED = (
    "virtio_mmio", "virtio_pci", "virtio_console", "virtio_blk", "virtio_net", "erofs", "overlay", "tcp_diag",
    "udp_diag",
)  # fmt: skip
"""What a guest loads, with what each depends on; what a kernel has built in needs no file."""

_REMEDY = "install the kernel package again, or name another with its modules beside it"
_MODULE_LIMIT_BYTES = 64 << 20


def pack(files: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Return an archive of (path, mode, content), which is the same for the same files.

    Directories have a mode with `S_IFDIR` and no content; they come before what is in them.
    """
    out = bytearray()
    for number, (path, mode, content) in enumerate(files, start=1):
        _append(out, number, path, mode, content)
    _append(out, 0, "TRAILER!!!", 0, b"")
    out += bytes(-len(out) % 512)
    return bytes(out)


def _append(out: bytearray, number: int, path: str, mode: int, content: bytes) -> None:
    name = os.fsencode(path) + b"\0"
    links = 2 if stat.S_ISDIR(mode) else 1
    fields = (number, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, len(name), 0)
    out += b"070701" + b"".join(b"%08X" % field for field in fields) + name
    out += bytes(-len(out) % 4)
    out += content
    out += bytes(-len(out) % 4)


def build(init: bytes, modules: Iterable[tuple[str, bytes]]) -> bytes:
    """Return an initrd that starts `init` and holds modules in the order in which it is to load them."""
    listed = list(modules)
    order = "".join(f"{name}.ko\n" for name, _ in listed).encode()
    return pack(
        [
            ("dev", stat.S_IFDIR | 0o755, b""),
            ("proc", stat.S_IFDIR | 0o755, b""),
            ("sys", stat.S_IFDIR | 0o755, b""),
            (MODULES_DIRECTORY, stat.S_IFDIR | 0o755, b""),
            (f"{MODULES_DIRECTORY}/{ORDER_NAME}", stat.S_IFREG | 0o644, order),
            *((f"{MODULES_DIRECTORY}/{name}.ko", stat.S_IFREG | 0o644, content) for name, content in listed),
            ("init", stat.S_IFREG | 0o755, init),
        ]
    )


def find_modules(top: Path, wanted: Iterable[str] = WANTED) -> list[tuple[str, bytes]]:
    """Return modules below `/lib/modules/RELEASE` and all that they depend on, in the order in which they load.

    The order comes from the modules themselves: Debian's package holds no `modules.dep`.

    Raises:
        DriverUnavailable: one is neither there nor built into the kernel.
        ConfigError: one is no module.
    """
    files = {_plain(path.name): path for path in sorted(top.rglob("*.ko*")) if path.is_file()}
    built_in = _built_in(top)
    loaded: dict[str, bytes] = {}
    for name in wanted:
        _load(name, files, built_in, loaded, ())
    return list(loaded.items())


def _load(
    name: str, files: Mapping[str, Path], built_in: frozenset[str], loaded: dict[str, bytes], above: tuple[str, ...]
) -> None:
    if name in loaded or name in built_in:
        return
    if name in above:
        raise ConfigError(f"the kernel modules {', '.join(above)} depend on each other", remedy=_REMEDY)
    path = files.get(name)
    if path is None:
        raise DriverUnavailable(f"this kernel has no module {name}", remedy=_REMEDY, module=name)
    content = _read(path)
    for other in _depends(path, content):
        _load(other, files, built_in, loaded, (*above, name))
    loaded[name] = content


def _plain(name: str) -> str:
    # Files may be written with dashes, and the names in `depends` are not.
    return name.split(".ko", 1)[0].replace("-", "_")


def _built_in(top: Path) -> frozenset[str]:
    try:
        text = (top / "modules.builtin").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    return frozenset(_plain(line.rsplit("/", 1)[-1]) for line in text.split())


def _read(path: Path) -> bytes:
    content = path.read_bytes()
    try:
        if path.suffix == ".xz":
            content = lzma.LZMADecompressor().decompress(content, _MODULE_LIMIT_BYTES)
        elif path.suffix == ".gz":
            content = gzip.decompress(content)
        elif path.suffix == ".zst":
            content = _zstd(content)
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise ConfigError(f"{path} is damaged: {error}", remedy=_REMEDY) from error
    return content


def _zstd(content: bytes) -> bytes:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    try:
        return zstd.ZstdDecompressor().decompress(content, _MODULE_LIMIT_BYTES)
    except zstd.ZstdError as error:
        raise ValueError(str(error)) from error


def _depends(path: Path, content: bytes) -> list[str]:
    """Read what a module needs from its `.modinfo`: strings that end with a zero byte."""
    mark = b"\0depends="
    at = content.find(mark)
    end = content.find(b"\0", at + len(mark))
    if not content.startswith(b"\x7fELF") or at < 0 or end < 0:
        raise ConfigError(f"{path} is no kernel module", remedy=_REMEDY)
    return [
        name.replace("-", "_") for name in content[at + len(mark) : end].decode("ascii", "replace").split(",") if name
    ]
