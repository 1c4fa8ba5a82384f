from __future__ import annotations

from worldfork.reward.reasons import MOST_CHARACTERS, FailedTest, first_told, read_reasons, telling_args, told

PRINTED = b"""EF                                   [100%]
==================================== ERRORS ====================================
_____________________ ERROR collecting tests/test_late.py ______________________
ImportError while importing test module '/workspace/tests/test_late.py'.
E   ModuleNotFoundError: No module named 'nosuch'
=================================== FAILURES ===================================
_________________________________ T.test_deep __________________________________
test_a.py:4: in test_deep
E   assert 9 == 6
E    +  where 9 = double(3)
=========================== short test summary info ============================
E   not one of a test
"""
REASONS = (
    FailedTest("ERROR collecting tests/test_late.py", "ModuleNotFoundError: No module named 'nosuch'"),
    FailedTest("T.test_deep", "assert 9 == 6 + where 9 = double(3)"),
)


def test_failures_are_read_in_their_order() -> None:
    assert read_reasons(PRINTED) == REASONS


def test_each_is_found_by_the_id_of_its_test() -> None:
    assert told(REASONS, ["test_a.py::T::test_deep"]).startswith("test_a.py::T::test_deep: assert 9 == 6")
    assert told(REASONS, ["tests/test_late.py::test_x"]).startswith("tests/test_late.py: ModuleNotFoundError")
    assert told(REASONS, ["test_a.py::test_other"]) == ""
    assert told([FailedTest("ERROR at setup of test_b", "no fixture")], ["b.py::test_b"]) == "b.py::test_b: no fixture"


def test_the_first_is_told_whether_its_id_is_known_or_not() -> None:
    assert first_told(REASONS, []) == "tests/test_late.py: ModuleNotFoundError: No module named 'nosuch'"
    assert first_told(REASONS[1:], []).startswith("T.test_deep: assert")
    assert first_told((), ["a"]) == ""


def test_where_no_failure_is_printed_the_end_is_told_within_bounds() -> None:
    assert first_told(read_reasons(b"not ok 1\n# got 3\n"), []) == "not ok 1 # got 3"
    assert read_reasons(b" \n") == ()
    assert len(first_told(read_reasons(b"___ " + b"n" * 900 + b" ___\nE   " + b"w" * 900), [])) == MOST_CHARACTERS


def test_arguments_that_keep_reasons_back_are_left_out() -> None:
    assert telling_args(["-q", "--tb=no", "--no-summary", "a.py"]) == ["--tb=short", "-q", "a.py"]
