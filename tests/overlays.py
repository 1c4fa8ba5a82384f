"""Real overlays without sandboxes: one live upper, whose copies are taken from outside as of a frozen sandbox."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.trees import FIRST, Manifest, Operation, Program, program

from worldfork.content.layer import walk
from worldfork.content.reached import Reached
from worldfork.content.writing import Writer
from worldfork.core.remove import remove_tree
from worldfork.lineage.capture import Capture, copy_upper, is_untouched
from worldfork.lineage.exported import difference_of, whole_copy
from worldfork.lineage.starting import make_upper
from worldfork.lineage.upper import Copied
from worldfork.sandbox.driver import Ground


@contextmanager
def mounting() -> Iterator[Program]:
    """A program that may mount, in namespaces of its own; mounts are gone with it."""
    own = ["unshare", "--mount", "--propagation", "private"]
    with program(own if os.geteuid() == 0 else [*own, "--user", "--map-root-user"]) as running:
        yield running


class Stack:
    """A live overlay over `layers`, and the copies of its upper.

    Args:
        mounts: who mounts.
        directory: an empty directory for everything.
        form: "trusted" or "user".
        first: what is done in the lowest layer.
    """

    def __init__(self, mounts: Program, directory: Path, form: str, first: Sequence[Operation] = FIRST) -> None:
        self.mounts = mounts
        self.directory = directory
        self.form = form
        self.layers = [directory / "base"]
        self.copies: list[Path] = []
        self.last = Copied()
        self._made = 0
        self.point = directory / "live"
        self.point.mkdir()
        self.layers[0].mkdir()
        outcomes = mounts.ask(self.layers[0], operations=first)["outcomes"]
        assert all(outcome[0] == "done" for outcome in outcomes), outcomes
        self._stand()

    @property
    def upper(self) -> Path:
        return Path(self._ground().upper)

    def _ground(self) -> Ground:
        number = len(self.layers)
        layers = tuple(str(path) for path in self.layers)
        return Ground(layers, str(self.directory / f"upper.{number}"), str(self.directory / f"work.{number}"))

    def _stand(self) -> None:
        ground = self._ground()
        make_upper(ground, self.form)
        options = f"{self._options(self.layers)},upperdir={ground.upper},workdir={ground.work},volatile"
        self.mounts.ask(self.point, mount=options, describe=False)

    def _options(self, layers: Sequence[Path]) -> str:
        form = "redirect_dir=on" if self.form == "trusted" else "userxattr"
        return f"lowerdir={':'.join(str(path) for path in layers)},index=off,metacopy=off,{form}"

    def apply(self, *operations: Operation, holder: str | None = None) -> Any:
        """Do operations in the live overlay; returns (outcomes, manifest)."""
        answer = self.mounts.ask(self.point, operations=operations, holder=holder)
        return answer["outcomes"], answer["manifest"]

    def do(self, *operations: Operation) -> Manifest:
        """Do operations that must all succeed."""
        outcomes, manifest = self.apply(*operations)
        failed = [pair for pair in zip(operations, outcomes, strict=True) if pair[1][0] != "done"]
        assert not failed, failed
        found: Manifest = manifest
        return found

    def manifest(self) -> Manifest:
        """What is in the live overlay."""
        return self.do()

    def copy(self, writable: Sequence[tuple[int, int]] | None = ()) -> Capture:
        """Copy the upper as a checkpoint does."""
        self._made += 1
        target = self.directory / f"copy.{self._made}"
        capture = self._captured(target, writable)
        if capture.changed:
            self.copies = [target] if capture.whole else [target, *self.copies]
        capture.copied.layers = tuple(path.name for path in self.copies)
        notes = self.directory / "notes"
        capture.copied.save(notes)
        self.last = Copied.load(notes)
        assert self.last == capture.copied
        return capture

    def _captured(self, target: Path, writable: Sequence[tuple[int, int]] | None) -> Capture:
        return copy_upper(self.upper, target, self.last, writable, self.form, self.copies)

    def copied(self) -> Manifest:
        """What a sandbox would see that is restored from the last copy."""
        restored = self.directory / "restored"
        restored.mkdir(exist_ok=True)
        options = self._options([*self.copies, *self.layers])
        found: Manifest = self.mounts.ask(restored, mount=options, unmount=True)["manifest"]
        return found

    def take(self) -> None:
        """Make the upper a layer, as the fast way does, and go on over it."""
        self.mounts.ask(self.point, unmount=True)
        taken = self.directory / f"taken.{len(self.layers)}"
        self.upper.rename(taken)
        self.layers.insert(0, taken)
        self.copies, self.last = [], Copied()
        self._stand()

    def is_untouched(self) -> bool:
        """Whether the product takes the upper for unchanged."""
        return is_untouched(str(self.upper), str(self.layers[0]), self.form)

    def end(self) -> None:
        """Unmount the live overlay."""
        self.mounts.ask(self.point, unmount=True, describe=False)


class ExportingStack(Stack):
    """One whose copies are made of a tree that is written anew each time, as that of a machine."""

    def _captured(self, target: Path, writable: Sequence[tuple[int, int]] | None) -> Capture:
        based = bool(self.last.entries)
        tree = self.directory / "exported" if based else target
        with Writer(tree, self.form, made_here=True) as writer, Reached(self.upper) as files:
            for found in walk(self.upper, self.form):
                content = None
                if found.entry.kind == "f" and not found.entry.link:
                    content = files.open(found.entry.path)
                try:
                    writer.add(found.entry, content)
                finally:
                    if content is not None:
                        os.close(content)
            writer.finish()
        if not based:
            return whole_copy(tree, self.form, 0)
        try:
            return difference_of(tree, target, self.last, self.form, self.copies)
        finally:
            remove_tree(tree)
