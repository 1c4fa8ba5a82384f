from __future__ import annotations

import copy
import pickle

import pytest

from worldfork.core import errors
from worldfork.core.errors import CommandTimeout, ConfigError, Corrupt, NotFound, PathError, WorldforkError


def test_text_holds_the_message_and_the_remedy() -> None:
    assert str(WorldforkError("it broke")) == "it broke"
    assert str(WorldforkError("it broke", remedy="mend it")) == "it broke (mend it)"


def test_fields_are_attributes() -> None:
    error = Corrupt("bytes differ", expected="aa", actual="bb")
    assert (error.expected, error.actual, error.fields) == ("aa", "bb", {"expected": "aa", "actual": "bb"})


@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", [WorldforkError, ConfigError, PathError, CommandTimeout, NotFound])
def test_copies_keep_everything(kind: type[WorldforkError], copied: object) -> None:
    twin = copied(kind("it broke", remedy="mend it", path="/a", errno=2))  # type: ignore[operator]
    assert type(twin) is kind
    assert (twin.message, twin.remedy, twin.path, twin.errno) == ("it broke", "mend it", "/a", 2)


def test_callers_can_catch_what_python_calls_it() -> None:
    with pytest.raises(ValueError):
        raise ConfigError("no")
    with pytest.raises(LookupError):
        raise NotFound("no")
    with pytest.raises(TimeoutError):
        raise CommandTimeout("no", result=None)
    with pytest.raises(OSError) as caught:
        raise PathError("no such file", path="/a", errno=2)
    assert caught.value.errno == 2
    assert str(caught.value) == "no such file"


def test_only_a_lock_is_worth_another_try() -> None:
    assert [code for code in errors.ERROR_TABLE if code == errors.Locked.code] == ["locked"]
    assert errors.Locked.retryable
    assert not errors.LaunchFailed.retryable
