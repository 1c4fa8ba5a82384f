"""Patches: what is read, what is refused and where, what is applied to the letter, and what is made."""

from __future__ import annotations

import random
import time

import pytest

from worldfork.content.patches import Patch, PatchFile, apply_patch, make_patch, model, parse_patch, parsing
from worldfork.content.patches.lines import differing
from worldfork.content.patches.model import EXECUTABLE, LINK, REGULAR
from worldfork.core.errors import ConfigError

TEXT = b"".join(b"line %d\n" % number for number in range(1, 21))


def applied(patch: bytes | str, tree: dict[str, bytes], **options: bool) -> dict[str, bytes | None]:
    files = {path: PatchFile(content, REGULAR) for path, content in tree.items()}
    changes = apply_patch(parse_patch(patch), files.get, **options)
    return {path: None if file is None else file.content for path, file in changes.items()}


def refused(patch: bytes | str, tree: dict[str, bytes] | None = None, **options: bool) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        applied(patch, tree or {}, **options)
    assert caught.value.fields["field"] == "patch"
    return caught.value


def change(path: str = "f", *hunks: str) -> str:
    return f"--- a/{path}\n+++ b/{path}\n" + "".join(hunks)


HUNK = "@@ -2,3 +2,3 @@ heading\n line 2\n-line 3\n+line three\n line 4\n"


def test_a_plain_diff() -> None:
    assert applied(change("f", HUNK), {"f": TEXT}) == {"f": TEXT.replace(b"line 3\n", b"line three\n")}


def test_nothing_is_an_empty_patch_and_other_text_is_none() -> None:
    assert parse_patch(b"") == parse_patch("\n \n") == Patch()
    assert "no unified diff" in str(refused("I changed the file.\n"))


def test_what_stands_round_it_is_skipped() -> None:
    mail = "From: a\nSubject: b\n\n---\n f | 2 +-\n\n" + change("f", HUNK) + "-- \n2.39.5\n\n"
    assert applied(mail, {"f": TEXT})["f"] == TEXT.replace(b"line 3\n", b"line three\n")


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "./x", "a//x", ".git/config", "a/.GIT/hooks/x"])
def test_a_path_out_of_the_tree(path: str) -> None:
    refused(f"--- a/{path}\n+++ b/{path}\n" + HUNK, {path: TEXT})
    refused(f"diff --git a/{path} b/{path}\nold mode 100644\nnew mode 100755\n", {path: TEXT})
    refused(f"diff --git a/f b/{path}\nrename from f\nrename to {path}\n", {"f": TEXT})
    refused(f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n")


def test_a_path_with_a_zero_byte_or_too_long() -> None:
    refused(b'--- "a/x\\000y"\n+++ "b/x\\000y"\n' + HUNK.encode())
    assert "too long" in str(refused(change("x" * 300, HUNK)))


def test_what_lies_below_a_file_or_a_link() -> None:
    patch = parse_patch("--- /dev/null\n+++ b/d/e/x\n@@ -0,0 +1 @@\n+x\n")
    for mode in (REGULAR, LINK):
        with pytest.raises(ConfigError, match="no directory"):
            apply_patch(patch, {"d": PatchFile(b"/etc", mode)}.get)


def test_a_link_made_and_gone_through_in_one_patch() -> None:
    link = "diff --git a/d b/d\nnew file mode 120000\n--- /dev/null\n+++ b/d\n@@ -0,0 +1 @@\n+/etc\n"
    link += "\\ No newline at end of file\n"
    assert "no directory" in str(refused(link + "--- /dev/null\n+++ b/d/passwd\n@@ -0,0 +1 @@\n+x\n"))
    nothing: dict[str, PatchFile] = {}
    files = apply_patch(parse_patch(link), nothing.get)
    assert files == {"d": PatchFile(b"/etc", LINK)}


@pytest.mark.parametrize(
    ("hunk", "why"),
    [
        ("@@ -2,3 +2,3 @@\n line 2\n-line 33\n+x\n line 4\n", "line 3 should be 'line 33"),
        ("@@ -3,3 +3,3 @@\n line 2\n-line 3\n+x\n line 4\n", "line 3 should be 'line 2"),
        ("@@ -20,2 +20,1 @@\n line 20\n-line 21\n", "the file has ended"),
        ("@@ -40,0 +41,1 @@\n+x\n", "the file has 20 lines"),
        ("@@ -2,3 +2,3 @@\n line 2\n-line 3\n+x\n", "before all its lines are there"),
        ("@@ -2,2 +2,2 @@\n line 2\n-line 3\n+x\n line 4\n", "more lines follow"),
        ("@@ -2,1 +2,2 @@\n line 2\n-line 3\n+x\n", "more lines than its head counts"),
        ("@@ -2,3 +2,3 @@\n line 2\n*line 3\n", "begins with"),
        ("@@ -2;3 +2,3 @@\n line 2\n", "its head is not"),
        ("@@ -19,2 +19,2 @@\n line 19\n-line 20\n\\ No newline at end of file\n+x\n", "line 20 should be"),
        ("@@ -2 +2 @@\n-line 2\n+x\n\\ No newline at end of file\n", "takes the end off"),
        ("@@ -2,2 +2,2 @@\n-line 2\n-line 3\n+x\n\\ No newline at end of file\n+y\n", "is not the last"),
    ],
)
def test_a_hunk_that_does_not_fit_names_file_and_hunk(hunk: str, why: str) -> None:
    error = refused(change("f", hunk), {"f": TEXT})
    assert why in error.message
    assert (error.fields["path"], error.fields["hunk"]) == ("f", 1)


def test_hunks_out_of_order() -> None:
    error = refused(change("f", "@@ -9 +9 @@\n-line 9\n+x\n", "@@ -3 +3 @@\n-line 3\n+x\n"), {"f": TEXT})
    assert (error.fields["hunk"], "before the hunk before it ends" in error.message) == (2, True)


def test_a_place_is_guessed_only_where_it_is_asked_for_and_the_only_one() -> None:
    grown = b"new\n" + TEXT
    assert refused(change("f", HUNK), {"f": grown}).fields["hunk"] == 1
    assert applied(change("f", HUNK), {"f": grown}, moved=True) == {"f": grown.replace(b"line 3\n", b"line three\n")}
    refused(change("f", HUNK), {"f": b"new\n" + TEXT + TEXT}, moved=True)


def test_a_file_without_an_end_and_carriage_returns() -> None:
    patch = make_patch({"f": PatchFile(b"a\r\nb\rc")}, {"f": PatchFile(b"a\r\nb\rd")})
    assert patch.count(b"\\ No newline") == 2
    assert applied(patch, {"f": b"a\r\nb\rc"}) == {"f": b"a\r\nb\rd"}


def test_files_that_are_not_there_and_those_that_are() -> None:
    assert "not there" in str(refused(change("f", HUNK)))
    new = "--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n"
    assert applied(new, {}) == {"f": b"x\n"}
    assert "there already" in str(refused(new, {"f": b"y"}))
    gone = "--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    assert applied(gone, {"f": b"x\n"}) == {"f": None}
    assert "more in it" in str(refused(gone, {"f": b"x\ny\n"}))
    assert applied("--- a/f\t1970-01-01\n+++ b/f\t2020-01-01\n@@ -0,0 +1 @@\n+x\n", {}) == {"f": b"x\n"}


def test_two_files_that_take_each_others_name() -> None:
    swap = "diff --git a/a b/b\nrename from a\nrename to b\ndiff --git a/b b/a\nrename from b\nrename to a\n"
    assert applied(swap, {"a": b"1", "b": b"2"}) == {"a": b"2", "b": b"1"}
    assert "there already" in str(refused(swap.split("diff --git a/b")[0], {"a": b"1", "b": b"2"}))


def test_a_series_of_patches_of_one_file() -> None:
    first = change("f", "@@ -1 +1 @@\n-a\n+b\n")
    second = change("f", "@@ -1 +1 @@\n-b\n+c\n")
    assert applied(first + second, {"f": b"a\n"}) == {"f": b"c\n"}
    assert applied(first + change("f", "@@ -1 +1 @@\n-b\n+a\n"), {"f": b"a\n"}) == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("diff --git a/f b/f\nindex 12..34\nBinary files a/f and b/f differ\n", "git diff --binary"),
        ("diff --git a/f b/f\nGIT binary patch\nnonsense\n", "no head"),
        ("diff --git a/f b/f\nGIT binary patch\nliteral 5\nzzz\n\n", "damaged"),
        ("diff --git a/f b/f\nGIT binary patch\nliteral 999999999999\nzzz\n\n", "larger"),
        ("diff --git a/f b/f\nnew file mode 160000\n", "repositories"),
        ("diff --git a/f b/g\nold mode 100644\nnew mode 100755\n", "do not name"),
        ("diff --git a/f b/f\n", "nothing is said"),
        ("diff --git a/f b/f\n--- a/f\n+++ b/g\n" + HUNK, "different files"),
        ("--- f\n+++ f\n" + HUNK, "taken off"),
        ('--- "a/f\n+++ b/f\n' + HUNK, "quoted wrongly"),
        (HUNK, "before the heads"),
    ],
)
def test_what_cannot_be_read(text: str, why: str) -> None:
    assert why in refused(text, {"f": TEXT, "g": TEXT}).message


def test_a_bomb_is_not_unpacked() -> None:
    bomb = make_patch({}, {"f": PatchFile(b"\0" * (8 << 20))})
    assert len(bomb) < 1 << 16
    lying = bomb.replace(b"literal 8388608", b"literal 64")
    began = time.process_time()
    assert "not of the 64 bytes" in refused(lying).message
    assert time.process_time() - began < 1


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    one = "--- /dev/null\n+++ b/f{}\n@@ -0,0 +1 @@\n+x\n"
    monkeypatch.setattr(parsing, "MAX_FILES", 3)
    assert "more than 3 files" in refused("".join(one.format(number) for number in range(4))).message
    monkeypatch.setattr(parsing, "MAX_HUNKS", 1)
    assert "more than 1 hunks" in refused(change("f", HUNK, "@@ -9 +9 @@\n-line 9\n+x\n"), {"f": TEXT}).message
    monkeypatch.setattr(parsing, "MAX_PATCH_BYTES", 10)
    assert "more than 10" in refused(change("f", HUNK)).message
    assert model.MAX_PATCH_BYTES > 10


def test_made_patches_apply() -> None:
    old = {
        "same": PatchFile(b"s\n", REGULAR),
        "edited": PatchFile(TEXT, REGULAR),
        "moved from": PatchFile(TEXT + b"m\n", EXECUTABLE),
        "tool": PatchFile(b"#!\n", REGULAR),
        "blob": PatchFile(bytes(range(256)) * 40, REGULAR),
        "gone": PatchFile(b"g", REGULAR),
        "turned": PatchFile(b"file", REGULAR),
        "empty": PatchFile(b"", REGULAR),
    }
    new = {
        "same": PatchFile(b"s\n", REGULAR),
        "edited": PatchFile(TEXT.replace(b"line 5\n", b"").replace(b"line 17\n", b"17\n18\n"), REGULAR),
        'moved/"to"\n\xe9\t\\': PatchFile(TEXT + b"m\n", EXECUTABLE),
        "tool": PatchFile(b"#!\n", EXECUTABLE),
        "blob": PatchFile(bytes(range(256)) * 41, REGULAR),
        "turned": PatchFile(b"same", LINK),
        "fresh/empty": PatchFile(b"", EXECUTABLE),
    }
    patch = parse_patch(make_patch(old, new))
    changes = apply_patch(patch, old.get)
    tree = {path: file for path, file in (old | changes).items() if file is not None}
    assert tree == new
    assert sorted(each.kind for each in patch.files) == sorted(
        ["change", "change", "change", "delete", "delete", "delete", "create", "create", "rename"]
    )
    assert make_patch(old, old) == b""


def test_correspondence_of_lines_is_sound_and_short() -> None:
    dice = random.Random(4)
    for _ in range(300):
        old = [b"%d" % dice.randrange(6) for _ in range(dice.randrange(30))]
        new = list(old)
        for _ in range(edits := dice.randrange(6)):
            at = dice.randrange(len(new) + 1)
            new[at : at + dice.randrange(2)] = [b"%d" % dice.randrange(6)] * dice.randrange(2)
        stretches = differing(old, new)
        a = c = 0
        for start, stop, begin, end in stretches:
            assert old[a:start] == new[c:begin]
            a, c = stop, end
        assert old[a:] == new[c:]
        assert sum(b - a + d - c for a, b, c, d in stretches) <= 2 * edits


@pytest.mark.parametrize("kinds", [2, 150, 10**9])
def test_texts_that_differ_everywhere_take_bounded_time(kinds: int) -> None:
    dice = random.Random(kinds)
    old, new = ([b"%d\n" % dice.randrange(kinds) for _ in range(20_000)] for _ in range(2))
    began = time.process_time()
    patch = make_patch({"f": PatchFile(b"".join(old))}, {"f": PatchFile(b"".join(new))})
    assert time.process_time() - began < 10
    assert applied(patch, {"f": b"".join(old)}) == {"f": b"".join(new)}


def test_many_texts_that_differ_everywhere_take_bounded_time() -> None:
    dice = random.Random(1)
    sides = [
        {f"f{n}": PatchFile(b"".join(b"%d\n" % dice.randrange(150) for _ in range(4000))) for n in range(60)}
        for _ in range(2)
    ]
    began = time.process_time()
    patch = make_patch(*sides)
    assert time.process_time() - began < 15
    assert apply_patch(parse_patch(patch), sides[0].get) == sides[1]


def test_far_apart_texts_are_cut_at_lines_that_each_has_once() -> None:
    old = [b"%d" % number for number in range(9000)]
    new = [b"x" if number % 3 == 0 else line for number, line in enumerate(old)]
    assert sum(b - a for a, b, _, _ in differing(old, new)) == 3000
