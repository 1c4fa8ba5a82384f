"""A saved memory that somebody altered on the disk: what goes on from it is what was saved, or nothing does."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sandbox.microvm import stand_ins

from worldfork.core.errors import Corrupt, WorldforkError
from worldfork.sandbox.microvm import manifest, ram
from worldfork.sandbox.microvm.disks import chains_in, open_chains

pytestmark = pytest.mark.slow

VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 4096, 1 << 45, 1 << 62, 2**70, 10**30, "", "..", "../../etc/passwd", "ram.0", "state",
    [], [[]], [{}], ["ram.0"] * 3, ["../ram.0"], {}, {"path": "../x", "format": "raw"},
]  # fmt: skip
Place = tuple[str | int, ...]


def places_in(value: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_in(inner, (*place, key))


def with_value(good: Any, place: Place, value: Any) -> Any:
    if not place:
        return value
    copy = json.loads(json.dumps(good))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copy


def taken(fd: int) -> bytes:
    try:
        return os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)


def restored(directory: Path) -> tuple[bytes, bytes]:
    """Read all that a restore reads; return memory and state."""
    saved = manifest.read_saved(directory)
    content = taken(ram.assemble([directory / name for name in saved.ram], saved.build.ram_bytes))
    state = taken(manifest.open_state(directory, saved))
    for path, fd in open_chains(chains_in(directory, saved.disks)).items():
        os.close(fd)
        assert Path(path).resolve().parent == directory.resolve()
    return content, state


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    os.close(stand_ins.write_memory(tmp_path / "memory"))
    for path in (tmp_path / "memory").iterdir():
        path.chmod(0o600)
    return tmp_path / "memory"


def test_a_manifest_with_anything_in_any_place_is_one_or_an_error_of_ours(memory: Path) -> None:
    path = memory / manifest.MANIFEST
    good = json.loads(path.read_text(encoding="utf-8"))
    for place in places_in(good):
        for value in VALUES:
            path.write_text(json.dumps(with_value(good, place, value)), encoding="utf-8")
            try:
                restored(memory)
            except WorldforkError:
                continue
            except Exception as error:
                raise AssertionError(f"{place} {value!r}") from error


@pytest.mark.parametrize("name", ["state", "ram.0"])
def test_one_bit_that_was_turned_is_found_or_means_nothing(memory: Path, name: str) -> None:
    content, good, missed = (memory / name).read_bytes(), restored(memory), 0
    bits = [*range(0, 8 * min(len(content), 64)), *range(8 * 4096, 8 * len(content), 8 * 1021)]
    for bit in bits:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (memory / name).write_bytes(changed)
        with contextlib.suppress(WorldforkError):
            assert restored(memory) == good, bit
            missed += 1
    # Behind the table of a page file is nothing up to the next page.
    assert missed <= 8 * 4096 // (8 * 1021)


@pytest.mark.parametrize("name", ["state", "ram.0"])
@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 5000])
def test_what_was_cut_off_is_missed(memory: Path, name: str, length: int) -> None:
    if length >= (memory / name).stat().st_size:
        pytest.skip("it is no longer than that")
    os.truncate(memory / name, length)
    with pytest.raises(Corrupt):
        restored(memory)
