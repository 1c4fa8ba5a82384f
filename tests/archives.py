"""Archives to test with: of real trees, and forged record by record."""

from __future__ import annotations

import io
import json
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blake3 import blake3

from worldfork.content.archive import ArchiveReader, ArchiveWriter, LayerHead
from worldfork.content.blocks import BlockWriter
from worldfork.content.entry import Entry, encode
from worldfork.content.layer import walk
from worldfork.content.manifest import digest_of
from worldfork.content.writing import Writer

HEAD = {"what": "test"}
MIB = 1 << 20


def make_tree(root: Path, *, large: bool = False) -> None:
    """A tree with some of everything that an ordinary user may have."""
    root.mkdir()
    (root / "a" / "deep" / "er").mkdir(parents=True)
    (root / "a" / "file").write_bytes(b"hello\n")
    (root / "a" / "empty").write_bytes(b"")
    os.link(root / "a" / "file", root / "a" / "deep" / "twin")
    (root / "a" / "zeros").write_bytes(bytes(10_000))
    (root / "a-").write_bytes(b"sorts between a and a/")
    (root / "link").symlink_to("../nowhere")
    os.mkfifo(root / "pipe", 0o640)
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.open(root, os.O_RDONLY)
        listening.bind(f"/proc/self/fd/{here}/sock")
        os.close(here)
    (root / os.fsdecode(b"\xff\xfe")).write_bytes(b"no text")
    with open(root / "sparse", "wb") as file:
        file.truncate(3 * MIB)
        file.seek(MIB + 5)
        file.write(b"x" * 5000)
    os.setxattr(root / "a", "user.k", b"v\0w")
    os.chmod(root / "a" / "deep", 0o2750)
    os.utime(root / "a" / "file", ns=(0, 1_700_000_000_123_456_789))
    os.utime(root / "a-", ns=(0, -5_000_000_001))
    if large:
        block = os.urandom(MIB)
        with open(root / "large", "wb") as file:
            for number in range(11):
                file.write(block if number % 3 else bytes(MIB + 4096))
            file.write(b"end")
    os.utime(root, ns=(7, 8))


def entries_of(root: Path, form: str = "user") -> list[Entry]:
    return [found.entry for found in walk(root, form)]


def head_of(root: Path, form: str = "user") -> LayerHead:
    sealed = digest_of(walk(root, form))
    return LayerHead(sealed.digest, sealed.entries, sealed.logical_bytes)


def archive_of(*roots: Path, form: str = "user") -> bytes:
    out = io.BytesIO()
    with ArchiveWriter(out, HEAD) as archive:
        for root in roots:
            archive.layer(head_of(root, form), root, entries_of(root, form))
        archive.end()
    return out.getvalue()


def extract(data: bytes, target: Path, form: str = "user") -> Path:
    """Write the layers of an archive to target/0, target/1, ..."""
    target.mkdir()
    reader = ArchiveReader(io.BytesIO(data))
    for number, layer in enumerate(reader.layers()):
        with Writer(target / str(number), form) as writer:
            for entry, content in layer.files():
                writer.add(entry, content)  # type: ignore[arg-type]
            writer.finish()
    return target


def read_through(data: bytes) -> None:
    for layer in ArchiveReader(io.BytesIO(data)).layers():
        for _, content in layer.files():
            for _ in content:
                pass


def record(kind: str, payload: bytes = b"") -> bytes:
    return struct.pack("<cI", kind.encode(), len(payload)) + payload


def data(offset: int, content: bytes) -> bytes:
    return record("D", struct.pack("<Q", offset) + content)


def entry(path: str, kind: str = "f", **more: Any) -> bytes:
    if kind == "f" and "content" not in more:
        more.setdefault("size_bytes", 0)
        more["content"] = blake3(b"").hexdigest()
    return record("E", encode(Entry(path, kind, 0o755, **more)))


def file(path: str, content: bytes) -> list[bytes]:
    """The records of a file."""
    facts = {"size_bytes": len(content), "content": blake3(content).hexdigest()}
    return [entry(path, **facts), data(0, content)]


def forged(*records: bytes) -> bytes:
    """An archive of these records, sound but for them."""
    out = io.BytesIO()
    with BlockWriter(out) as blocks:
        for one in records:
            blocks.write(one)
        blocks.end()
    return out.getvalue()


def forged_layer(records: Iterable[bytes], **head: Any) -> bytes:
    """An archive of one layer, whose head fits its records unless told otherwise."""
    listed = list(records)
    lines = [one[5:] for one in listed if one[:1] == b"E"]
    facts = {"digest": f"b3:{blake3(b''.join(lines)).hexdigest()}", "entries": len(lines), "logical_bytes": 1 << 40}
    facts["logical_bytes"] = sum(_size(line) for line in lines)
    facts |= head
    return forged(record("H", b"{}"), record("L", json.dumps(facts).encode()), *listed, record("F"), record("Z"))


def _size(line: bytes) -> int:
    try:
        fields = json.loads(line)
        return int(fields[6]) if fields[1] == "f" and not fields[10] else 0
    except (ValueError, LookupError, RecursionError):
        return 0
