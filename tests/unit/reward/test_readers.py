from __future__ import annotations

import pytest

from worldfork.reward.readers import MAX_TESTS, read_junit, read_tap
from worldfork.reward.report import Report

JUNIT = b"""<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="s" tests="6">
<properties><property name="a" value="b"/></properties>
<testcase classname="pkg.T" name="good" time="0.5"><system-out>text</system-out></testcase>
<testcase classname="pkg.T" name="bad"><failure message="m">trace</failure></testcase>
<testcase classname="pkg.T" name="broken"><error/></testcase>
<testcase classname="pkg.T" name="left out"><skipped/></testcase>
<testcase name="alone"/>
<testcase classname="pkg.T" name="twice"/>
<testcase classname="pkg.T" name="twice"><failure/></testcase>
<testcase classname="pkg.T" name="off" status="notrun"/>
<testcase classname="pkg.T" name=""/>
</testsuite></testsuites>"""


def outcomes(report: Report) -> dict[str, str]:
    return {name: test.outcome for name, test in report.tests.items()}


def test_junit() -> None:
    report = read_junit(JUNIT)
    assert report.finished
    assert outcomes(report) == {
        "pkg.T::good": "passed",
        "pkg.T::bad": "failed",
        "pkg.T::broken": "failed",
        "pkg.T::left out": "skipped",
        "alone": "passed",
        "pkg.T::twice": "failed",
        "pkg.T::off": "skipped",
        "pkg.T::": "passed",
    }
    assert report.tests["pkg.T::good"].wall_s == 0.5


def entities(levels: int) -> bytes:
    lines = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, levels))
    return f'<!DOCTYPE x [<!ENTITY a0 "a">{lines}]><x name="&a{levels - 1};"/>'.encode()


CASE = b'<testcase name="a"/>'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 1000,
        b"not xml",
        b"<testsuite>" + CASE,
        b"<testsuite>" + CASE + b"</testsuites>",
        b"<a>" * 100 + CASE + b"</a>" * 100,
        entities(30),
        b'<!DOCTYPE x SYSTEM "file:///etc/passwd" [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;' + CASE + b"</x>",
        b'<?xml version="1.0" encoding="nonsense"?><x>' + CASE + b"</x>",
        b"<x>" + b'<testcase name="a\xff"/>' + b"</x>",
        b"<x>" + b"".join(b'<testcase name="%d"/>' % n for n in range(MAX_TESTS + 2)) + b"</x>",
    ],
    ids=range(11),
)
def test_what_is_no_junit_says_nothing(data: bytes) -> None:
    report = read_junit(data)
    assert (report.finished, report.tests) == (False, {})


def test_a_failure_within_another_test_is_not_lost() -> None:
    nested = b'<x><testcase name="a"><testcase name="b"><failure/></testcase></testcase></x>'
    assert outcomes(read_junit(nested)) == {"a": "failed"}


TAP = b"""TAP version 14
1..7
ok 1 - adds
not ok 2 - subtracts
  ---
  message: no
  ok 9 - within
  ...
ok 3 multiplies
ok 4
not ok 5 - divides # TODO later
ok 6 - skips # skip no machine
    ok 1 - inner
ok 7 - twice
# a comment
okay then
"""


def test_tap() -> None:
    report = read_tap(TAP)
    assert report.finished
    assert outcomes(report) == {
        "adds": "passed",
        "subtracts": "failed",
        "multiplies": "passed",
        "4": "passed",
        "divides": "failed",
        "skips": "skipped",
        "twice": "passed",
    }


@pytest.mark.parametrize(
    ("line", "name", "outcome"),
    [
        ("ok 1 - adds # time=2.5ms", "adds", "passed"),
        ("ok 1 - adds #time=2.5ms {", "adds", "passed"),
        ("not ok 1 - adds # time=2.5ms", "adds", "failed"),
        ("ok 1 - adds # time=3ms # SKIP no machine", "adds", "skipped"),
        ("ok 1 - adds #skip", "adds", "skipped"),
        ("ok 1 # time=3ms", "1", "passed"),
        ("ok 1 - mends #12", "mends #12", "passed"),
        (r"ok 1 - has \# in it \\ # time=3ms", r"has # in it \ ".strip(), "passed"),
        ("ok 1 - in C# now", "in C# now", "passed"),
    ],
)
def test_no_time_is_part_of_a_name_in_tap(line: str, name: str, outcome: str) -> None:
    assert outcomes(read_tap(f"{line}\n1..1\n".encode())) == {name: outcome}


@pytest.mark.parametrize("more", [b"ok 8 - more\n", b"Bail out! no\n", b"1..9\n"])
def test_tap_that_is_not_whole(more: bytes) -> None:
    report = read_tap(TAP + more)
    assert not report.finished
    assert report.tests["adds"].outcome == "passed"


def test_tap_of_a_test_that_comes_twice() -> None:
    assert outcomes(read_tap(b"not ok 1 - a\nok 2 - a\n1..2\n")) == {"a": "failed"}
    assert outcomes(read_tap(b"ok 1 - a\nnot ok 2 - a\n1..2\n")) == {"a": "failed"}


@pytest.mark.parametrize("data", [b"", b"\xff\xfe\x00", b"ok" * 1000, b"ok 1 - " + b"x" * 10_000 + b"\n"])
def test_what_is_no_tap_passes_nothing(data: bytes) -> None:
    assert read_tap(data).passed == frozenset()


def test_too_much_tap_says_nothing() -> None:
    assert read_tap(b"ok\n" * (MAX_TESTS + 1)).tests == {}
