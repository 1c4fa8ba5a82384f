"""Which tests are run: those of the forms that a driver has, and on request only enough to show each behaviour."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.conformance.differences import TESTS

FORMS = {"microvm": ("trusted",)}
"""A guest's root is always the guest's own: the second form would be the first again."""
FORMED = ("cell", "prison")
"""Fixtures whose parameter is a form."""


def choose(items: Iterable[pytest.Item], driver: str, *, each_once: bool) -> list[pytest.Item]:
    """Return the tests to run on a driver, in their order."""
    fit = [item for item in items if _fits(item, driver)]
    if not each_once:
        return fit
    seen: set[str] = set()
    chosen: set[pytest.Item] = set()
    # What some drivers have not got shows nothing there, so that such tests come last.
    for item in sorted(fit, key=lambda each: (_name(each) in TESTS, each.get_closest_marker("slow") is not None)):
        shows = behaviours(item)
        if not shows <= seen:
            chosen.add(item)
            if _name(item) not in TESTS:
                seen |= shows
    return [item for item in fit if item in chosen]


def behaviours(item: pytest.Item) -> set[str]:
    """Return the numbers that a test shows."""
    return {str(number) for mark in item.iter_markers("behaviour") for number in mark.args}


def _fits(item: pytest.Item, driver: str) -> bool:
    forms = FORMS.get(driver)
    if forms is None or not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return True
    params = item.callspec.params
    return all(params[name] in forms for name in FORMED if name in params)


def _name(item: pytest.Item) -> str:
    return getattr(item, "originalname", item.name)
