"""The names of modules, read from their texts."""

from __future__ import annotations

import pytest

from worldfork.core.errors import ConfigError
from worldfork.reward.split.plan import module_plan, plan_text, stub_files

TEXT = """
import os
from functools import total_ordering

LIMIT, (LOW, *REST) = 3, (1, 2, 3)
size: int = 4

if os.name == "posix":
    def here(): ...
else:
    def there(): ...

try:
    from other import helper
except ImportError:
    helper = None


class OwnError(ValueError):
    pass


class Deeper(OwnError):
    pass


@total_ordering
class Box(Base):
    def __init__(self): ...
    def put(self): ...
    @property
    def first(self): ...
    @staticmethod
    def make(): ...
    def __eq__(self, other): ...
    __radd__ = __eq__


class Pair(tuple):
    pass


async def later(): ...
"""


def test_functions_classes_exceptions_and_values_are_told_apart() -> None:
    (told,) = module_plan({"a.py": TEXT}).values()
    assert told["functions"] == ["here", "there"]
    assert told["exceptions"] == {"OwnError": ["ValueError"], "Deeper": ["OwnError"]}
    assert told["classes"]["Box"]["bases"] == ["Base"]
    assert set(told["classes"]["Box"]["methods"]) == {
        "__init__", "put", "__eq__", "__radd__", "__lt__", "__le__", "__gt__", "__ge__",
    }  # fmt: skip
    assert "__eq__" in told["classes"]["Pair"]["methods"]
    assert set(told["values"]) == {"os", "total_ordering", "LIMIT", "LOW", "REST", "size", "helper"}


@pytest.mark.parametrize("text", ["def value(x)\n", "x = (" * 500, "\0"])
def test_what_is_no_python_is_told_as_that(text: str) -> None:
    with pytest.raises(ConfigError, match="is no Python"):
        module_plan({"a.py": text})


def test_a_text_is_read_and_never_run() -> None:
    module_plan({"a.py": "raise SystemExit\n"})


def test_stubs_say_nothing_but_which_module_they_are() -> None:
    plan = module_plan({"pkg/a.py": "SECRET = 12345\n"})
    (content,) = stub_files(plan).values()
    assert b"12345" not in content
    assert b"pkg/a.py" in content


def test_shapes_that_are_not_known_yet_are_learned() -> None:
    assert plan_text({}, None)["learning"]
    assert plan_text({}, {"f()": {"B", "A"}})["shapes"] == {"f()": ["A", "B"]}
    assert not plan_text({}, {})["learning"]
