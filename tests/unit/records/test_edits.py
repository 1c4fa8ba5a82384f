from __future__ import annotations

import pickle

import pytest

from worldfork.core.errors import ConfigError, FormatUnsupported
from worldfork.records.edits import EditedFile, Edits

EDITS = Edits({"b": EditedFile(b"\0\xff"), "a": EditedFile(b"", executable=True)}, ("z", "y"), (("l", "link"),))


def test_edits_survive_bytes_and_pickle() -> None:
    assert Edits.from_bytes(EDITS.to_bytes()) == EDITS
    assert pickle.loads(pickle.dumps(EDITS)) == EDITS
    assert list(EDITS.files) == ["a", "b"]


def test_the_digest_is_over_what_is_carried_over() -> None:
    assert Edits(EDITS.files, EDITS.removed).digest == EDITS.digest
    assert Edits(EDITS.files).digest != EDITS.digest
    assert Edits({"a": EditedFile(b"")}).digest != Edits({"a": EditedFile(b"", executable=True)}).digest


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format":1,"files":{"a":{}},"removed":[],"dropped":[]}'])
def test_what_is_no_edits(data: bytes) -> None:
    with pytest.raises(ConfigError):
        Edits.from_bytes(data)


def test_what_is_not_carried_is_told_by_reason() -> None:
    assert EDITS.notes == ("not carried: l: a link",)
    assert Edits().notes == ()
    many = Edits(dropped=(("x", "bytes"), *((f"d/{number:03}", "files") for number in range(99))))
    told = many.notes
    assert told[0] == "not carried: x: more bytes than may be carried (limit carry_bytes)"
    assert told[1] == "not carried: d/000 and at least 98 more: more files than may be carried (limit carry_files)"


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(FormatUnsupported):
        Edits.from_bytes(b'{"format":2}')
