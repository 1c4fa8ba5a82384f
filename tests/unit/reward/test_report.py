from __future__ import annotations

import json
import time

from worldfork.reward.report import Report, read_report


def lines(*facts: object) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in facts)


def test_a_whole_report() -> None:
    report = read_report(
        lines(
            {"ready": 1},
            {"collected": 3},
            {"id": "t.py::a", "outcome": "passed", "wall_s": 0.5, "cpu_s": 0.25, "waited_s": 0.125},
            {"id": "t.py::b", "outcome": "failed"},
            {"id": "t.py::c", "outcome": "skipped"},
            {"finished": 1},
        )
    )
    assert (report.ready, report.finished, report.collected) == (True, True, 3)
    assert report.passed == {"t.py::a"}
    assert report.tests["t.py::a"].waited_s == 0.125
    assert set(report.tests) == {"t.py::a", "t.py::b", "t.py::c"}


def test_a_report_that_was_cut_off_counts_as_far_as_it_came() -> None:
    whole = lines({"ready": 1}, {"id": "a", "outcome": "passed"}, {"id": "b", "outcome": "passed"})
    report = read_report(whole[:-3])
    assert report.ready
    assert not report.finished
    assert report.passed == {"a"}


def test_nothing_at_all() -> None:
    report = read_report(b"")
    assert not report.ready
    assert report.tests == {}


def test_an_id_passes_only_if_it_passed_each_time() -> None:
    twice = lines({"id": "a", "outcome": "passed"}, {"id": "a", "outcome": "failed"})
    assert read_report(twice).passed == frozenset()
    other = lines({"id": "a", "outcome": "failed"}, {"id": "a", "outcome": "passed"})
    assert read_report(other).passed == frozenset()


def test_what_is_no_line_of_the_reporter_is_left_out() -> None:
    noise = (
        b"\xff\xfe\x00\n"
        + b"[" * 100_000
        + b"\n"
        + b'"text"\n[]\n'
        + lines(
            {"id": 7, "outcome": "passed"},
            {"id": "x" * 5000, "outcome": "passed"},
            {"id": "b", "outcome": "great"},
            {"id": "c", "outcome": ["passed"]},
            {"collected": "many"},
        )
        + b'{"id": "d", "outcome": "passed", "wall_s": NaN, "cpu_s": true, "waited_s": '
        + b"9" * 400
        + b"}\n"
    )
    report = read_report(noise)
    assert set(report.tests) == {"d"}
    assert report.tests["d"].wall_s == report.tests["d"].cpu_s == report.tests["d"].waited_s == 0.0
    assert report.collected is None


def test_a_flood_of_lines_keeps_nobody_busy() -> None:
    line = b'{"id": "a", "outcome": "passed"}\n'
    began_s = time.process_time()
    found = read_report(b'{"ready": 1}\n' + line + b"\n" * (16 << 20))
    assert found.passed == {"a"}
    assert time.process_time() - began_s < 3
    # A line that no test has is none.
    assert read_report(b'{"ready": 1, "x": [' + b"[]," * (1 << 16) + b"0]}\n") == Report()
