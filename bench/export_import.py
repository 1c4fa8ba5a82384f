"""Export and import of a world of 520 MB in 11,000 files beside tar with zstd -3, and beside restic."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.harness import Options, bar, figure, interleave, percentile, ratio, say, summary_ms

FILES = 11_000
BYTES = 520_000_000


def run(options: Options) -> dict[str, Any]:
    """Each side carries the same tree out and in, in turns; whoever writes files waits until they are on the disk."""
    place = options.home / "export_import"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    scale = 20 if options.quick else 1
    tree = place / "tree"
    say(f"  making a tree of {FILES // scale} files")
    make_tree(tree, FILES // scale, BYTES // scale)
    sides: dict[str, _Side] = {"worldfork": _Worldfork(place, tree), "tar_zstd": _Tar(place, tree)}
    if shutil.which("restic"):
        sides["restic"] = _Restic(place, tree)
    # A run for each that is not counted: what is read is in memory for all of them then.
    for side in sides.values():
        side.out()
    parts: dict[str, Callable[[], Sequence[float]]] = {}
    for name, side in sides.items():
        parts[f"{name}_out"] = side.timed_out
        parts[f"{name}_in"] = side.timed_in
    taken = interleave(options.samples(5, 1), parts)
    for name in sides:
        pairs = zip(taken[f"{name}_out"], taken[f"{name}_in"], strict=True)
        taken[f"{name}_both"] = [out + back for out, back in pairs]
    values: dict[str, Any] = {name: summary_ms(samples) for name, samples in taken.items()}
    values |= {f"{name}_stored_bytes": side.stored_bytes() for name, side in sides.items()}
    values["tree_bytes"] = BYTES // scale
    others = [name for name in sides if name != "worldfork"]
    fastest = min(others, key=lambda name: percentile(taken[f"{name}_both"], 0.5))
    bars = []
    for other in others:
        values[f"both_p50_ratio_to_{other}"] = round(ratio(taken["worldfork_both"], taken[f"{other}_both"]), 3)
        bars.append(
            bar(
                f"out and in, against {other}",
                values[f"both_p50_ratio_to_{other}"],
                1.0,
                unit="ratio",
                strict=False,
            )
        )
    shutil.rmtree(place)
    return figure(
        "export_import",
        "export and import of a world against tar | zstd -3 and restic",
        values,
        bars,
        f"the fastest of the others: {fastest}",
        "import ends durable, its digests compared; tar and restic are followed by one synchronisation of that disk",
        "an export of a sealed snapshot; restic without its cache, into a new repository each time, and encrypted",
        *([] if "restic" in sides else ["restic is not installed"]),
    )


def make_tree(root: Path, files: int, size_bytes: int) -> None:
    """Write a tree of the shape of site-packages, filled with stretches of this Python's own sources and libraries."""
    chance = random.Random(11)
    library = Path(os.__file__).parent
    texts = b"".join(path.read_bytes() for path in sorted(library.glob("**/*.py")) if "site-packages" not in path.parts)
    objects = b"".join(path.read_bytes() for path in sorted(library.glob("lib-dynload/*.so"))) or texts
    sizes = [int(chance.lognormvariate(8.6, 1.6)) + 1 for _ in range(files)]
    by_size = sorted(range(files), key=sizes.__getitem__)
    rest = size_bytes - sum(sizes)
    for rank, index in enumerate(reversed(by_size[-40:])):  # what is missing is in the largest
        sizes[index] += max(0, int(rest * 0.5 ** (rank // 8 + 1) / 8))
    for index, size in enumerate(sizes):
        directory = root / f"package_{index // 60:03d}" / f"part_{index // 12 % 5}"
        directory.mkdir(parents=True, exist_ok=True)
        is_text = index % 4 != 0
        name = f"file_{index:05d}.{'py' if is_text else 'so'}"
        (directory / name).write_bytes(_stretches(chance, texts if is_text else objects, size))


def _stretches(chance: random.Random, source: bytes, size: int) -> bytes:
    """Pieces of the source from anywhere: as compressible as it is, and hardly ever the same twice."""
    kept = bytearray()
    while len(kept) < size:
        begin = chance.randrange(len(source))
        kept += source[begin : begin + chance.randrange(10_000, 100_000)]
    return bytes(kept[:size])


class _Side:
    """One way to carry a tree out and in."""

    def __init__(self, place: Path, tree: Path) -> None:
        self._place = place
        self._tree = tree
        self._count = 0

    def fresh(self, what: str) -> Path:
        """A new place each time: ext4 is slow to give out what was removed in the last five seconds."""
        self._count += 1
        return self._place / f"{type(self).__name__}-{what}-{self._count}"

    def timed_out(self) -> list[float]:
        """Carry it out; the disk is at rest before and after."""
        os.sync()
        start = time.perf_counter()
        self.out()
        elapsed = time.perf_counter() - start
        return [elapsed]

    def timed_in(self) -> list[float]:
        """Carry it in, until it is on the disk."""
        os.sync()
        start = time.perf_counter()
        self.back()
        return [time.perf_counter() - start]

    def out(self) -> None:
        """Carry it out."""
        raise NotImplementedError

    def back(self) -> None:
        """Carry it in, onto the disk."""
        raise NotImplementedError

    def stored_bytes(self) -> int:
        """What it took on the way."""
        raise NotImplementedError


def _sync_file_system(place: Path) -> None:
    subprocess.run(["sync", "-f", str(place)], check=True)


class _Worldfork(_Side):
    def __init__(self, place: Path, tree: Path) -> None:
        super().__init__(place, tree)
        from worldfork.core.ids import new_id
        from worldfork.core.settings import Settings
        from worldfork.keeping.sealing import seal
        from worldfork.records.snapshot import SnapshotRecord
        from worldfork.store.home import open_home
        from worldfork.store.store import Store

        self._open: Callable[[Path], Any] = lambda at: Store.open(open_home(Settings(home=at, scratch=at)))
        self._form = "trusted" if os.geteuid() == 0 else "user"
        self._store = self._open(place / "home")
        draft = self._store.begin_layer(form=self._form)
        shutil.copytree(tree, draft.path, symlinks=True)
        base = {"kind": "host", "fingerprint": "bench"}
        record = SnapshotRecord(
            new_id("sn"), None, None, time.time(), "filesystem", "ready", self._form, base, (draft.layer_id,)
        )
        self._store.publish(record, [draft.layer_id])
        seal(self._store, draft.layer_id)
        self._snapshot_id = record.snapshot_id
        self._archive = place / "world.wfa"

    def out(self) -> None:
        from worldfork.exchange.departure import export_snapshot

        with open(self._archive, "wb", buffering=0) as file:
            export_snapshot(self._store, self._snapshot_id, file)

    def back(self) -> None:
        from worldfork.exchange.arrival import import_snapshot

        store = self._open(self.fresh("home"))
        with open(self._archive, "rb", buffering=0) as file:
            import_snapshot(store, file, self._form)
        store.close()

    def stored_bytes(self) -> int:
        return self._archive.stat().st_size


class _Tar(_Side):
    def out(self) -> None:
        self._shell('tar -C "$1" -cf - . | zstd -3 -q -f -o "$2"', self._tree, self._place / "world.tar.zst")

    def back(self) -> None:
        target = self.fresh("tree")
        target.mkdir()
        self._shell('zstd -q -dc "$1" | tar -C "$2" -xf -', self._place / "world.tar.zst", target)
        _sync_file_system(target)

    def _shell(self, text: str, *arguments: Path) -> None:
        subprocess.run(["sh", "-c", text, "sh", *map(str, arguments)], check=True)

    def stored_bytes(self) -> int:
        return (self._place / "world.tar.zst").stat().st_size


class _Restic(_Side):
    def out(self) -> None:
        self._repository = self.fresh("repository")
        self._restic("init")
        self._restic("backup", ".", cwd=self._tree)

    def back(self) -> None:
        target = self.fresh("tree")
        self._restic("restore", "latest", "--target", str(target))
        _sync_file_system(target)

    def _restic(self, *words: str, cwd: Path | None = None) -> None:
        environ = {**os.environ, "RESTIC_PASSWORD": "bench", "RESTIC_REPOSITORY": str(self._repository)}
        subprocess.run(
            ["restic", "--no-cache", "--quiet", *words], cwd=cwd, env=environ, check=True, stdout=subprocess.DEVNULL
        )

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._repository.rglob("*") if path.is_file())
