"""Results of tests as other programs write them: JUnit's XML and TAP. Whoever wrote them is not trusted.

Both are read within bounds and never raise: what cannot be read says of no test that it passed.
"""

from __future__ import annotations

import re
from xml.parsers import expat

from worldfork.reward.report import MAX_TEST_ID_CHARACTERS, Report, TestRecord

MAX_TESTS = 200_000
"""More than this in one result, and it says nothing."""

_MAX_DEPTH = 64
_CHUNK_BYTES = 1 << 16
_TAP_LINE = re.compile(r"(not )?ok\b(?:[ \t]+(\d{1,9}))?(?:[ \t]*-)?[ \t]*(.*)")
_TAP_PLAN = re.compile(r"1\.\.(\d{1,9})(?:\s*#.*)?")
_TAP_COMMENT = re.compile(r"(?:^|\s)#(?=\s|$|skip\b|todo\b|time=)", re.IGNORECASE)
_TAP_DIRECTIVE = re.compile(r"(?:^|\s)#\s*(skip|todo)\b", re.IGNORECASE)
_TAP_ESCAPED = re.compile(r"\\([#\\])")


class _Unreadable(Exception):
    """The result is no JUnit file within the bounds."""


def read_junit(data: bytes) -> Report:
    """Read a JUnit file. The id of a test is `CLASSNAME::NAME`, or its name where it has no class.

    A document type with entities of its own is refused, as is anything that is nested more than 64 deep.
    """
    reading = _Junit()
    parser = expat.ParserCreate()
    parser.StartElementHandler = reading.start
    parser.EndElementHandler = reading.end
    parser.EntityDeclHandler = reading.refuse
    parser.ExternalEntityRefHandler = reading.refuse
    try:
        for begin in range(0, len(data), _CHUNK_BYTES):
            parser.Parse(data[begin : begin + _CHUNK_BYTES], False)
        parser.Parse(b"", True)
    except (expat.ExpatError, _Unreadable, ValueError, LookupError):
        return Report(ready=True)
    return Report(ready=True, finished=True, collected=len(reading.tests), tests=reading.tests)


class _Junit:
    def __init__(self) -> None:
        self.tests: dict[str, TestRecord] = {}
        self._depth = 0
        self._case: str | None = None
        self._case_depth = 0
        self._outcome = "passed"
        self._wall_s = 0.0

    def refuse(self, *_: object) -> int:
        raise _Unreadable

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH or len(self.tests) > MAX_TESTS:
            raise _Unreadable
        if name == "testcase" and self._case is None:
            owner, own = attributes.get("classname", ""), attributes.get("name", "")
            self._case, self._case_depth = (f"{owner}::{own}" if owner else own), self._depth
            self._outcome, self._wall_s = "passed", _seconds(attributes.get("time", ""))
            if attributes.get("status", "") in ("notrun", "disabled", "skipped"):
                self._outcome = "skipped"
        elif self._case is not None and name in ("failure", "error"):
            self._outcome = "failed"
        elif self._case is not None and name == "skipped" and self._outcome == "passed":
            self._outcome = "skipped"

    def end(self, name: str) -> None:
        if name == "testcase" and self._case is not None and self._depth == self._case_depth:
            add_test(self.tests, self._case, TestRecord(self._outcome, self._wall_s))
            self._case = None
        self._depth -= 1


def read_tap(data: bytes) -> Report:
    """Read TAP, version 12 to 14: its top level; what is indented belongs to the test that follows.

    The id of a test is its description up to a comment, which may hold a time, or its number where it has none.
    `# SKIP` and `# TODO` have not passed.
    """
    tests: dict[str, TestRecord] = {}
    count, planned, bailed = 0, None, False
    for line in data.decode("utf-8", "replace").splitlines():
        if line.startswith("Bail out!"):
            bailed = True
            break
        plan = _TAP_PLAN.fullmatch(line)
        if plan is not None:
            planned = int(plan[1])
            continue
        found = _TAP_LINE.fullmatch(line)
        if found is None:
            continue
        count += 1
        if count > MAX_TESTS:
            return Report(ready=True)
        comment = _TAP_COMMENT.search(found[3])
        directive = _TAP_DIRECTIVE.search(found[3], comment.start()) if comment else None
        text = _TAP_ESCAPED.sub(r"\1", found[3][: comment.start()] if comment else found[3])
        outcome = "failed" if found[1] else "skipped" if directive else "passed"
        add_test(tests, text.strip() or found[2] or str(count), TestRecord(outcome))
    return Report(ready=True, finished=planned == count and not bailed, collected=planned, tests=tests)


def add_test(tests: dict[str, TestRecord], name: str, record: TestRecord) -> None:
    """Add how a test ended; one that is named more than once has passed only if it did so each time."""
    if not name or len(name) > MAX_TEST_ID_CHARACTERS:
        return
    earlier = tests.get(name)
    if earlier is None or earlier.outcome == "passed":
        tests[name] = record


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 <= number < 1e9 else 0.0
