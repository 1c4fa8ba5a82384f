"""What is carried out of a sandbox that ends: declared files as plain bytes, whatever else was made of their paths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from worldfork import AsyncSandbox
from worldfork.content import mapped, merged
from worldfork.content.stack import LayerStack, Node
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward import carry, changes
from worldfork.reward.laying import lay_edits, lay_tests

FILES = {"a.py": "a\n", "b.py": "b\n", "pkg/__init__.py": "", "pkg/deep/c.py": "c\n", "kept.txt": "k\n"}


def a_task(editable: tuple[str, ...], **limits: int) -> Task:
    return Task("t", "", editable=editable, hidden_tests={"test_x.py": ""}, limits=TaskLimits(**limits))


def carried(task: Task, line: str, *, then: Callable[[AsyncSandbox, Edits], Any] | None = None) -> Edits:
    """Run a line in a sandbox with `FILES`, and carry out; `then` sees a fresh fork of the start with it laid over."""

    async def run() -> Edits:
        async with await AsyncSandbox.create(network="none") as box:
            for path, text in FILES.items():
                await box.write_file(f"/workspace/{path}", text)
            await box.sh("chmod 755 b.py; ln -s a.py linked.py", check=True)
            start = await box.checkpoint(stop=True, level="volatile")
        try:
            async with await AsyncSandbox.create(snapshot_id=start.snapshot_id) as box:
                await box.sh(line, timeout=60)
                found = await carry.carry_out(box, task, start_snapshot_id=start.snapshot_id)
            await found.drop()
            await found.drop()
            if then is not None:
                async with await AsyncSandbox.create(snapshot_id=start.snapshot_id) as fresh:
                    await lay_edits(fresh, found.edits)
                    await then(fresh, found.edits)
        finally:
            await AsyncSandbox.delete_snapshot(start.snapshot_id)
        return found.edits

    return asyncio.run(run())


@pytest.mark.behaviour("carry-1")
def test_nothing_changed() -> None:
    assert carried(a_task(("**",)), "true") == Edits()
    assert carried(a_task(("**",)), "echo 1 >/tmp/elsewhere; touch a.py; chown 0:0 a.py; chmod 600 a.py").empty


@pytest.mark.behaviour("carry-1")
def test_what_a_pattern_takes_out_is_not_carried() -> None:
    task = a_task(("**", "!pkg/**", "pkg/deep/*.py", "!b.py"))
    edits = carried(task, "echo n >pkg/__init__.py; echo n >pkg/deep/c.py; echo n >a.py; rm b.py; echo n >pkg/deep/x")
    assert set(edits.files) == {"a.py", "pkg/deep/c.py"}
    assert edits.removed == ()


@pytest.mark.behaviour("carry-1", "carry-5")
def test_what_changed_is_carried_and_laid_again() -> None:
    async def look(fresh: AsyncSandbox, edits: Edits) -> None:
        seen = await fresh.sh("cat a.py pkg/new/n.py pkg/deep/c.py; echo; stat -c %a a.py b.py; ls; cat kept.txt")
        assert seen.stdout.split() == ["ANC", "755", "644", *["a.py", "b.py", "kept.txt", "linked.py", "pkg"], "k"]

    line = """
        printf A >a.py; chmod 700 a.py; chmod 600 b.py; mkdir -p pkg/new; printf N >pkg/new/n.py
        printf C >pkg/deep/c.py; echo no >kept.txt; rm pkg/__init__.py; sleep 1000 & setsid sleep 1000 &
    """
    edits = carried(a_task(("a.py", "b.py", "pkg/**/*.py")), line, then=look)
    assert edits.removed == ("pkg/__init__.py",)
    assert dict(edits.files) == {
        "a.py": EditedFile(b"A", executable=True),
        "b.py": EditedFile(b"b\n"),
        "pkg/deep/c.py": EditedFile(b"C"),
        "pkg/new/n.py": EditedFile(b"N"),
    }


@pytest.mark.behaviour("carry-2")
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("ln -sf /etc/passwd a.py", "link"),
        ("rm a.py; mkfifo a.py", "special"),
        ("rm a.py; mkdir -p a.py/x.py", None),
        ("rm a.py", None),
        ("mkdir /tmp/w; mv * /tmp/w; cd /; rmdir /workspace || mv /workspace /gone; ln -s /tmp/w /workspace", None),
        ("cd /; mv /workspace /gone; touch /workspace", None),
    ],
)
def test_what_is_no_plain_file_is_removed(line: str, why: str | None) -> None:
    edits = carried(a_task(("a.py",)), line)
    assert (edits.files, edits.removed) == ({}, ("a.py",))
    assert edits.dropped == (() if why is None else (("a.py", why),))


@pytest.mark.behaviour("carry-2")
def test_a_directory_that_becomes_a_link_has_none_of_its_files() -> None:
    edits = carried(a_task(("pkg/**",)), "mv pkg /tmp/pkg; ln -s /tmp/pkg pkg")
    assert not edits.files
    assert edits.removed == ("pkg/__init__.py", "pkg/deep/c.py")


@pytest.mark.behaviour("carry-1")
def test_a_directory_that_is_moved_there_comes_whole() -> None:
    edits = carried(a_task(("new/**",)), "mv pkg new || { cp -a pkg new; rm -r pkg; }")
    assert list(edits.files) == ["new/__init__.py", "new/deep/c.py"]


@pytest.mark.behaviour("carry-3")
@pytest.mark.parametrize("closed", ["pkg/deep", "pkg", ".", "pkg/deep/c.py a.py"])
def test_what_the_policy_has_closed_is_read_all_the_same(closed: str) -> None:
    line = f"printf A >a.py; printf C >pkg/deep/c.py; rm pkg/__init__.py; chmod 000 {closed}"
    edits = carried(a_task(("a.py", "pkg/**")), line)
    assert dict(edits.files) == {"a.py": EditedFile(b"A"), "pkg/deep/c.py": EditedFile(b"C")}
    assert edits.removed == ("pkg/__init__.py",)


@pytest.mark.behaviour("carry-4")
def test_a_path_that_no_call_can_name_is_not_carried() -> None:
    deep = "cd pkg; i=0; while [ $i -lt 30 ]; do n=$(printf %0200d $i); mkdir $n && cd $n || exit; i=$((i+1)); done"
    edits = carried(a_task(("a.py", "pkg/**")), f"printf A >a.py; {deep}; touch end")
    assert dict(edits.files) == {"a.py": EditedFile(b"A")}
    assert [(path[:5], why) for path, why in edits.dropped] == [("pkg/0", "files")]


@pytest.mark.behaviour("carry-4")
def test_caps_on_count_and_bytes() -> None:
    line = "for i in 1 2 3 4 5 6; do printf 12345 >n$i.py; done"
    edits = carried(a_task(("n*.py",), carry_files=4), line)
    assert (list(edits.files), len(edits.dropped)) == (["n1.py", "n2.py", "n3.py", "n4.py"], 2)
    edits = carried(a_task(("n*.py",), carry_bytes=12), line)
    assert (list(edits.files), {why for _, why in edits.dropped}) == (["n1.py", "n2.py"], {"bytes"})


@pytest.mark.behaviour("carry-4")
def test_what_has_grown_too_large_stays_as_the_start_has_it() -> None:
    edits = carried(a_task(("a.py",)), "truncate -s 1T a.py || truncate -s 10G a.py || truncate -s 900M a.py")
    assert (edits.files, edits.removed, edits.dropped) == ({}, (), (("a.py", "bytes"),))


@pytest.mark.behaviour("carry-4")
def test_a_directory_of_very_many_entries_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST_CHANGES", 200)
    many = "mkdir pkg/many; cd pkg/many; seq 300 | xargs touch; cd ../..; printf A >a.py"
    edits = carried(a_task(("a.py", "pkg/**/*.py")), many)
    assert dict(edits.files) == {"a.py": EditedFile(b"A")}
    assert edits.dropped == (("pkg/many/**", "files"),)


@pytest.mark.behaviour("carry-4")
def test_a_directory_that_was_filled_elsewhere_and_moved_there_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST_CHANGES", 200)
    listed: list[str] = []
    children = LayerStack.children

    def counted(self: LayerStack, parent: Node) -> Iterator[Node]:
        listed.append(parent.path)
        return children(self, parent)

    async def run() -> Edits:
        async with await AsyncSandbox.create(network="none") as box:
            await box.sh("mkdir pkg; echo a >a.py", check=True)
            start = await box.checkpoint(level="volatile")
            await box.sh("mkdir /tmp/many; cd /tmp/many; seq 300 | xargs touch", check=True)
            middle = await box.checkpoint(level="volatile")
            await box.sh("mv /tmp/many pkg/many; echo b >a.py", check=True)
            monkeypatch.setattr(LayerStack, "children", counted)
            task = a_task(("a.py", "pkg/**"))
            found = await carry.carry_out(box, task, start_snapshot_id=start.snapshot_id)
        await found.drop()
        for each in (middle, start):
            await AsyncSandbox.delete_snapshot(each.snapshot_id)
        return found.edits

    edits = asyncio.run(run())
    assert dict(edits.files) == {"a.py": EditedFile(b"b\n")}
    assert edits.dropped == (("pkg/many/**", "files"),)
    assert "workspace/pkg/many" not in listed


@pytest.mark.behaviour("carry-3", "carry-4")
def test_many_closed_files_are_read_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    lines_of = mapped.lines_of

    def counted(module: str, function: str, *arguments: str, **options: Any) -> Iterator[bytes]:
        started.append(function)
        return lines_of(module, function, *arguments, **options)

    for module in (changes, merged):
        monkeypatch.setattr(module, "lines_of", counted)
    edits = carried(a_task(("pkg/**",)), "for i in 1 2 3 4 5 6; do printf $i >pkg/n$i; chmod 000 pkg/n$i; done")
    assert {path: file.content for path, file in edits.files.items()} == {f"pkg/n{i}": b"%d" % i for i in range(1, 7)}
    assert len(started) <= 1


@pytest.mark.behaviour("carry-2")
def test_names_that_are_no_text() -> None:
    edits = carried(a_task(("*.py",)), r"printf x >$(printf '\377.py')")
    assert (edits.files, edits.dropped) == ({}, (("\\udcff.py", "name"),))


@pytest.mark.behaviour("carry-5")
def test_a_link_of_the_start_is_replaced_and_not_written_through() -> None:
    async def look(fresh: AsyncSandbox, edits: Edits) -> None:
        assert (await fresh.sh("test -h linked.py || cat a.py linked.py", check=True)).stdout == "a\nnew"

    carried(a_task(("linked.py",)), "rm linked.py; printf new >linked.py", then=look)


@pytest.mark.behaviour("carry-6")
def test_tests_replace_what_was_planted() -> None:
    async def look(fresh: AsyncSandbox, edits: Edits) -> None:
        task = Task("t", "", hidden_tests={"tests/test_x.py": ""}, test_roots=("tests", "conftest.py"))
        await lay_tests(fresh, task, {"tests/test_x.py": b"hidden", "a.py": b"mine"})
        seen = await fresh.sh("ls; find tests; cat tests/test_x.py a.py")
        assert sorted(seen.stdout.split()) == sorted(
            [*["a.py", "b.py", "kept.txt", "linked.py", "pkg", "tests", "tests", "tests/test_x.py"], "hiddenmine"]
        )

    line = "mkdir -p tests/deep; touch tests/deep/conftest.py tests/test_x.py conftest.py"
    carried(a_task(("**",)), line, then=look)


@pytest.mark.behaviour("carry-5")
def test_what_stands_in_the_way_gives_way_and_no_link_is_followed() -> None:
    edits = Edits({
        "here.py/x.py": EditedFile(b"1"),
        "link/x.py": EditedFile(b"2"),
        "dir": EditedFile(b"3"),
        "dir.d/deep/er/x.py": EditedFile(b"4"),
        "dir.d/deep/er/y.py": EditedFile(b"4"),
    }, ("link/gone", "a.py/gone"))  # fmt: skip
    task = Task("t", "", hidden_tests={"test_x.py": ""}, test_roots=("link2/roots",))
    made = "mkdir -p other dir/in; touch other/gone other/roots here.py; ln -s other link; ln -s other link2"

    async def run() -> None:
        async with await AsyncSandbox.create(network="none") as box:
            await box.sh(made + "; ln -s other tests; touch a.py", check=True)
            await lay_edits(box, edits)
            await lay_tests(box, task, {"tests/test_x.py": b"5", "a.py/test_y.py": b"6"})
            seen = await box.sh("find . -type f | sort | xargs grep -H . ; find . -type l; ls other", check=True)
        assert seen.stdout.split() == [
            "./a.py/test_y.py:6", "./dir:3", "./dir.d/deep/er/x.py:4", "./dir.d/deep/er/y.py:4", "./here.py/x.py:1",
            "./link/x.py:2", "./tests/test_x.py:5", "./link2", "gone", "roots",
        ]  # fmt: skip

    asyncio.run(run())
