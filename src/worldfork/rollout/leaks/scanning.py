"""Whether a world holds the answer: its snapshot is read on the host, and nothing in it is run.

Certain is a leak where the very content of a reference or a test lies, as a file or in a repository's objects.
Everything else is a place where people have found answers, and is for a person to look at.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from worldfork.content.merged import MergedView
from worldfork.content.stack import Node
from worldfork.core.errors import StoreError
from worldfork.keeping.browse import browsing
from worldfork.lineage.place import Place
from worldfork.records.task import Task
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.verifier import Start
from worldfork.rollout.leaks import history, traces
from worldfork.rollout.leaks.secrets import ANSWER, TESTS, Secrets, held_lines, secrets_of

MAX_ENTRIES = 2_000_000
"""Of a world; what lies beyond is not looked at, and the report says so."""
MAX_FILE_BYTES = 4 << 20
"""A larger file is not read for lines."""
MAX_READ_BYTES = 4 << 30
"""Of all files together."""
MAX_LEAKS = 200
_SHARE = 0.5
_FEW_LINES = 3
"""So many lines in common may be chance, unless the whole secret has no more."""

_PACKAGES = ("lib/python3*/*-packages/*-info", "local/lib/python3*/*-packages/*-info", "python3*/*-packages/*-info")
"""Where a machine's own Python keeps them, below a directory that a base shows."""
_SPELLING = re.compile(r"[-_.]+")


@dataclass(frozen=True, order=True)
class Leak:
    """Something in a world that gives the answer away, or may."""

    path: str
    """Absolute, inside."""
    kind: str
    """`answer`, `tests`, `history`, `package` or `trace`."""
    why: str
    certain: bool = False


@dataclass(frozen=True)
class LeakReport:
    """What a look at one task's world found."""

    task_id: str
    snapshot_id: str
    leaks: tuple[Leak, ...] = ()
    entries: int = 0
    """Paths looked at."""
    read_bytes: int = 0
    complete: bool = True
    """Whether everything was looked at within the bounds."""

    @property
    def certain(self) -> tuple[Leak, ...]:
        """The leaks beyond doubt."""
        return tuple(leak for leak in self.leaks if leak.certain)


async def find_leaks(here: Place, task: Task, start: Start) -> LeakReport:
    """Look for a task's reference and hidden tests in its starting state.

    Raises:
        NotFound, ConfigError, StoreError: the snapshot, or what the task names, cannot be read.
    """
    secrets = await asyncio.to_thread(secrets_of, task, start)

    def look() -> LeakReport:
        with browsing(here.store, start.snapshot_id) as snapshot:
            scan = Scan(snapshot.view, secrets)
            scan.run()
            scan.shown(snapshot.record.base.get("binds", ()))
        return LeakReport(
            task.task_id,
            start.snapshot_id,
            tuple(sorted(scan.leaks)),
            scan.entries,
            scan.read_bytes,
            scan.complete,
        )

    return await here.work(look)


@dataclass
class Scan:
    """One walk through a world."""

    view: MergedView
    secrets: Secrets
    directory: str = TASK_DIRECTORY
    leaks: list[Leak] = field(default_factory=list)
    entries: int = 0
    read_bytes: int = 0
    complete: bool = True

    def run(self) -> None:
        """Look at every path.

        Raises:
            StoreError: a layer cannot be read.
        """
        for node in self.view.nodes():
            self.entries += 1
            if self.entries > MAX_ENTRIES or len(self.leaks) >= MAX_LEAKS:
                self.complete = False
                return
            if node.seen.kind == "d":
                self._directory(node)
            elif node.seen.kind == "f":
                self._file(node)

    def shown(self, binds: Iterable[tuple[str, str]]) -> None:
        """Look for the package in what the base shows of the machine, which is in no layer.

        Args:
            binds: (path on the machine, path inside).
        """
        if not self.secrets.package:
            return
        for source, target in binds:
            for pattern in _PACKAGES:
                for path in sorted(Path(source).glob(pattern)):
                    if self._is_package(path.name):
                        inside = PurePosixPath(target, path.relative_to(source))
                        why = f"the machine has {self.secrets.package} installed, and every sandbox sees it"
                        self.leaks.append(Leak(str(inside), "package", why))

    def _directory(self, node: Node) -> None:
        names = frozenset(PurePosixPath(child.path).name for child in self.view.children(node))
        if history.is_repository(names):
            self._repository(node)
        why = traces.of_directory(node.path, names)
        if why:
            self._found(node, "trace", why)
        if self.secrets.package and self._is_package(PurePosixPath(node.path).name):
            self._found(node, "package", f"{self.secrets.package} is installed here, perhaps in a later version")

    def _repository(self, node: Node) -> None:
        held = dict(self._below(node))
        files = frozenset(held)

        def read(path: str, most_bytes: int) -> bytes:
            return self._content(held[path], most_bytes)

        for name in sorted(set(history.secret_objects(files, read, self.secrets.blobs))):
            kind, path = self.secrets.blobs[name]
            self._found(node, kind, f"object {name[:12]} of the repository is {path}", certain=True)
        for why in history.other_states(files, read):
            self._found(node, "history", why)

    def _below(self, node: Node) -> Iterator[tuple[str, Node]]:
        """Yield the files of a repository, each with its path there; one that lies in it is looked at by itself."""
        waiting = [node]
        while waiting:
            above = waiting.pop()
            children = list(self.view.children(above))
            self.entries += len(children)
            if self.entries > MAX_ENTRIES:
                self.complete = False
                return
            names = frozenset(PurePosixPath(child.path).name for child in children)
            if above is not node and history.is_repository(names):
                continue
            for child in children:
                if child.seen.kind == "d":
                    waiting.append(child)
                elif child.seen.kind == "f":
                    yield child.path[len(node.path) + 1 :], child

    def _file(self, node: Node) -> None:
        path = PurePosixPath(node.path)
        size_bytes = node.seen.info.st_size if node.seen.info is not None else 0
        why = traces.of_file(path, self._task_path(node), self.secrets)
        if why:
            self._found(node, "trace", why)
        if self.secrets.package and path.name.endswith(traces.ARCHIVES) and self._is_package(path.name):
            self._found(node, "package", f"a distribution of {self.secrets.package}")
        if path.suffix == ".pyc":
            why = traces.of_compiled(path, self._content(node, traces.HEADER_BYTES), self.secrets)
            if why:
                self._found(node, "trace", why)
            return
        if size_bytes not in self.secrets.sizes and size_bytes > MAX_FILE_BYTES:
            return
        self._text(node, self._content(node, max(MAX_FILE_BYTES, size_bytes)))

    def _text(self, node: Node, content: bytes) -> None:
        about = self.secrets.contents.get(content)
        if about is not None:
            kind, path = about
            self._found(node, kind, f"it is {path}", certain=True)
            return
        for kind, count in sorted(held_lines(self.secrets, content).items()):
            whole = self.secrets.counts[kind]
            if count == whole or (count > _FEW_LINES and count >= _SHARE * whole):
                self._found(node, kind, f"{count} of {whole} lines that only {_OF[kind]} have are in it")

    def _content(self, node: Node, most_bytes: int) -> bytes:
        parts, left = [], most_bytes
        if self.read_bytes >= MAX_READ_BYTES:
            self.complete = False
            return b""
        try:
            for part in self.view.read(node):
                parts.append(part[:left])
                left -= len(parts[-1])
                if left <= 0:
                    break
        except (OSError, StoreError) as error:
            # A file that only its owner inside may read is read by the sandbox's root too, so it is no safe place.
            self.complete = False
            self._found(node, "trace", f"it could not be read ({error})")
        self.read_bytes += most_bytes - left
        return b"".join(parts)

    def _is_package(self, name: str) -> bool:
        stem = _SPELLING.sub("-", name.lower())
        wanted = _SPELLING.sub("-", self.secrets.package.lower())
        version = stem.removeprefix(f"{wanted}-")
        return (
            version != stem and version[:1].isdigit() and name.endswith((".dist-info", ".egg-info", *traces.ARCHIVES))
        )

    def _task_path(self, node: Node) -> str | None:
        inside = f"/{node.path}"
        top = f"{self.directory}/"
        return inside.removeprefix(top) if inside.startswith(top) else None

    def _found(self, node: Node, kind: str, why: str, *, certain: bool = False) -> None:
        self.leaks.append(Leak(f"/{node.path}", kind, why, certain))


_OF = {ANSWER: "the reference", TESTS: "hidden tests"}


def to_json(report: LeakReport) -> dict[str, object]:
    """Return plain JSON values."""
    return dataclasses.asdict(report)
