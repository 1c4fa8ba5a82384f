"""What must not be found in a world, in the forms in which it can be recognised."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath

from worldfork.records.task import Task
from worldfork.reward.verifier import Start
from worldfork.rollout.reading import Originals

ANSWER = "answer"
TESTS = "tests"

MIN_LINE_CHARACTERS = 20
"""A shorter line is found everywhere."""
MAX_LINES = 4000
"""Of one task; more tell no more."""


@dataclass(frozen=True)
class Secrets:
    """The reference and the hidden tests of one task."""

    answer: Mapping[str, bytes]
    """Path of the task -> content, of what the reference changes."""
    tests: Mapping[str, bytes]
    shown: tuple[bytes, ...] = ()
    """What the policy may see: the starting state's own files of the same kinds, and the prompt."""
    package: str = ""
    """The package that the task is about, as the registry spells it."""
    test_ids: tuple[str, ...] = field(default=())

    @cached_property
    def contents(self) -> Mapping[bytes, tuple[str, str]]:
        """Content -> (kind, path of the task), without what is shown, and without files of hardly a line."""
        shown = frozenset(self.shown)
        return {
            content: (kind, path)
            for kind, files in ((TESTS, self.tests), (ANSWER, self.answer))
            for path, content in files.items()
            if content not in shown and len(content.strip()) >= MIN_LINE_CHARACTERS
        }

    @cached_property
    def sizes(self) -> frozenset[int]:
        """The sizes of these contents, so that few files of a world need be read for them."""
        return frozenset(map(len, self.contents))

    @cached_property
    def blobs(self) -> Mapping[str, tuple[str, str]]:
        """Name of a git object -> (kind, path of the task), in both of git's hashes."""
        return {
            digest: about
            for content, about in self.contents.items()
            for digest in (_blob(content, "sha1"), _blob(content, "sha256"))
        }

    @cached_property
    def lines(self) -> Mapping[bytes, str]:
        """Line -> kind, of those that stand in an answer or a test and in nothing that is shown."""
        shown = {line for content in self.shown for line in _lines(content)}
        found: dict[bytes, str] = {}
        for kind, files in ((TESTS, self.tests), (ANSWER, self.answer)):
            for content in files.values():
                for line in _lines(content):
                    if line not in shown and len(found) < MAX_LINES:
                        found[line] = kind
        return found

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Kind -> how many such lines it has."""
        kinds = list(self.lines.values())
        return {kind: kinds.count(kind) for kind in (ANSWER, TESTS)}


def secrets_of(task: Task, start: Start) -> Secrets:
    """Return what a policy on this task must not find."""
    return Secrets(
        answer={path: file.content for path, file in start.solution.files.items()},
        tests=dict(start.tests),
        shown=(
            *_alike(start),
            *(text.encode("utf-8") for text in task.files.values()),
            task.prompt.encode("utf-8"),
        ),
        package=task.world.origin.package,
        test_ids=(*task.fail_to_pass, *task.pass_to_pass),
    )


def _alike(start: Start) -> Iterable[bytes]:
    """Return the editable files of the kinds that secrets are of: what is alike among them gives nothing away.

    All of a repository may be editable; a log or a patch in it that holds the answer is a leak all the same.
    """
    kinds = {PurePosixPath(path).suffix for path in (*start.solution.files, *start.tests)}
    paths = [path for path in start.originals if PurePosixPath(path).suffix in kinds]
    if isinstance(start.originals, Originals):
        return start.originals.only(paths).values()
    return [start.originals[path] for path in paths]


def held_lines(secrets: Secrets, content: bytes) -> dict[str, int]:
    """Return how many of the secret lines of each kind a content holds."""
    found: dict[str, int] = {}
    for line in set(_lines(content)):
        kind = secrets.lines.get(line)
        if kind is not None:
            found[kind] = found.get(kind, 0) + 1
    return found


def _lines(content: bytes) -> Iterable[bytes]:
    # What a diff puts before a line must not hide it.
    for line in content.splitlines():
        yield from (
            each
            for each in {line.strip(), line.lstrip(b"+- \t").strip()}
            if len(each) >= MIN_LINE_CHARACTERS and not each.startswith((b"import ", b"from ", b"#"))
        )


def _blob(content: bytes, hash_name: str) -> str:
    return hashlib.new(hash_name, b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
