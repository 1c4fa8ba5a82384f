from __future__ import annotations

from worldfork.core.recent import Recent


def test_what_was_used_longest_ago_goes() -> None:
    recent: Recent[str] = Recent(10)
    for key in "abc":
        recent.put(key, key, 3)
    assert recent.get("a") == "a"
    recent.put("d", "d", 3)
    assert {key: recent.get(key) for key in "abcd"} == {"a": "a", "b": None, "c": "c", "d": "d"}


def test_the_newest_is_kept_however_large() -> None:
    recent: Recent[str] = Recent(10)
    recent.put("a", "a", 1)
    recent.put("b", "b", 100)
    assert (recent.get("a"), recent.get("b")) == (None, "b")
    recent.put("b", "again", 1)
    recent.put("c", "c", 9)
    assert (recent.get("b"), recent.get("c")) == ("again", "c")
