"""Why tests failed, from what pytest printed. For the author of a task: only of runs in which no policy has a say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from worldfork.reward.scoring import file_of

MOST_CHARACTERS = 500
"""Of what is told of one failure."""

_MOST_NAME_CHARACTERS = 200
_MOST_REASONS = 1000
_TITLE = re.compile(r"_{2,} (.+) _{2,}")
_COLLECTING = "ERROR collecting "
_PHASE = re.compile(r"ERROR at (?:setup|teardown) of ")


@dataclass(frozen=True)
class FailedTest:
    """One failure."""

    title: str
    """What pytest writes above it: the test without its file, or the file that could not be loaded."""
    words: str


def telling_args(args: Iterable[str]) -> list[str]:
    """Return arguments for pytest with which it prints why tests fail."""
    return ["--tb=short", *(each for each in args if each != "--no-summary" and not each.startswith("--tb="))]


def read_reasons(output: bytes) -> tuple[FailedTest, ...]:
    """Read the failures in the order in which they were printed; where there are none, the end of all that was printed.

    Never raises: what tests print may look like anything.
    """
    found: list[FailedTest] = []
    title, lines = "", list[str]()
    text = output.decode("utf-8", "replace")
    for line in text.splitlines():
        match = _TITLE.fullmatch(line)
        if match or (line.startswith("=====") and title):
            _add(found, title, lines)
            title, lines = match[1] if match else "", []
        elif title:
            lines.append(line)
        if len(found) == _MOST_REASONS:
            return tuple(found)
    _add(found, title, lines)
    words = _one_line(text.strip()[-MOST_CHARACTERS:].splitlines())
    return tuple(found) or ((FailedTest("", words),) if words else ())


def told(reasons: Iterable[FailedTest], ids: Iterable[str]) -> str:
    """Return the first reason that is one of these tests or of their files, with its name; empty where none is."""
    wanted = list(ids)
    for reason in reasons:
        name = _name(reason.title, wanted)
        if name is not None:
            return f"{name[:_MOST_NAME_CHARACTERS]}: {reason.words}"[:MOST_CHARACTERS]
    return ""


def first_told(reasons: tuple[FailedTest, ...], ids: Iterable[str]) -> str:
    """Return the first reason with the id of its test, if it is among these; empty where there is none."""
    if not reasons:
        return ""
    title = reasons[0].title.removeprefix(_COLLECTING)
    named = f"{title[:_MOST_NAME_CHARACTERS]}: " if title else ""
    return told(reasons[:1], ids) or f"{named}{reasons[0].words}"[:MOST_CHARACTERS]


def _name(title: str, ids: list[str]) -> str | None:
    if title.startswith(_COLLECTING):
        path = title.removeprefix(_COLLECTING)
        return path if any(file_of(each) == path for each in ids) else None
    test = _PHASE.sub("", title)
    return next((each for each in ids if each.partition("::")[2].replace("::", ".") == test), None)


def _add(found: list[FailedTest], title: str, lines: list[str]) -> None:
    if title:
        said = [line[1:] for line in lines if line.startswith("E  ")]
        found.append(FailedTest(title, _one_line(said or lines[-3:])))


def _one_line(lines: list[str]) -> str:
    return " ".join(" ".join(line.split()) for line in lines).strip()[:MOST_CHARACTERS]
