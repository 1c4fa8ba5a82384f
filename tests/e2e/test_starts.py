"""Starting states for real: what they stand on, what is hidden of a task, and that each is made once."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from worldfork.core.errors import ConfigError, NotFound, PathError, SandboxError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import EditedFile
from worldfork.records.episode import FailureKind
from worldfork.records.origin import Mount, Origin, TreeSource, WorldSource
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.rollout import reading, starts
from worldfork.rollout.answers import gather_tests
from worldfork.rollout.reading import read_paths
from worldfork.rollout.starts import StartingState, StartingStates
from worldfork.worlds.world import async_world

LIMITS = TaskLimits(memory_mb=256, disk_mb=64, pids=64)

FIX = """\
diff --git a/src/a.py b/src/a.py
--- a/src/a.py
+++ b/src/a.py
@@ -1 +1 @@
-VALUE = 1
+VALUE = 2
diff --git a/src/new.py b/src/new.py
new file mode 100755
--- /dev/null
+++ b/src/new.py
@@ -0,0 +1 @@
+NEW = 1
diff --git a/src/old.py b/src/old.py
deleted file mode 100644
--- a/src/old.py
+++ /dev/null
@@ -1 +0,0 @@
-OLD = 1
"""

TEST_FIX = """\
--- a/tests/test_a.py
+++ b/tests/test_a.py
@@ -1 +1 @@
-visible = 1
+hidden = 1
"""


async def snapshot_of(files: dict[str, str], name: str) -> str:
    async def build(sandbox: AsyncSandbox) -> None:
        for path, text in files.items():
            await sandbox.write_file(f"/workspace/{path}", text)

    return (await async_world(name, build)).snapshot_id


async def ground() -> Origin:
    files = {"src/a.py": "VALUE = 1\n", "src/old.py": "OLD = 1\n", "tests/test_a.py": "visible = 1\n", "run.sh": "x\n"}
    return Origin(snapshot=await snapshot_of(files, "test-starts-base"))


def task(world: Origin, **changes: Any) -> Task:
    values: dict[str, Any] = {
        "task_id": "e2e/starts",
        "prompt": "",
        "world": WorldSource(world),
        "editable": ("src/**",),
        "hidden_tests": {"tests/test_b.py": "b\n"},
        "limits": LIMITS,
    }
    return Task(**{**values, **changes})


def started(make: Callable[[], Awaitable[Task]]) -> StartingState:
    async def act() -> StartingState:
        return await (await StartingStates.open()).get(await make())

    return asyncio.run(act())


async def listed(state: StartingState, line: str, **options: Any) -> str:
    async with state.fork(**options) as sandbox:
        return (await sandbox.sh(line, check=True)).stdout


def test_a_patch_and_files_make_the_start_and_originals_are_read_on_the_host() -> None:
    async def make() -> Task:
        return task(await ground(), files={"src/extra.py": "E = 1\n"}, patch=FIX, env={"COLOUR": "blue"})

    state = started(make)
    assert dict(state.originals) == {
        "src/a.py": b"VALUE = 2\n",
        "src/extra.py": b"E = 1\n",
        "src/new.py": b"NEW = 1\n",
    }
    said = asyncio.run(listed(state, "ls src tests; stat -c %a src/new.py; echo $COLOUR"))
    assert said.split() == ["src:", "a.py", "extra.py", "new.py", "tests:", "test_a.py", "755", "blue"]


def test_all_originals_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def make() -> Task:
        return task(await ground(), files={f"src/{number:02}.py": f"{number}" for number in range(20)})

    originals = started(make).originals
    one_by_one = [originals[path] for path in originals]
    readings = []

    def counted(*about: Any) -> dict[str, EditedFile]:
        readings.append(about)
        return read_paths(*about)

    monkeypatch.setattr(reading, "read_paths", counted)
    assert list(originals.values()) == one_by_one
    assert len(one_by_one) == 22
    assert len(readings) == 1
    monkeypatch.setattr(reading, "MAX_BYTES", 20)
    assert list(originals.values()) == one_by_one


def test_a_solution_patch_is_the_edits_of_a_policy_that_knows_it() -> None:
    async def make() -> Task:
        return task(await ground(), solution_patch=FIX)

    edits = started(make).solution
    assert {path: (file.content, file.executable) for path, file in edits.files.items()} == {
        "src/a.py": (b"VALUE = 2\n", False),
        "src/new.py": (b"NEW = 1\n", True),
    }
    assert edits.removed == ("src/old.py",)


def test_tests_and_reference_come_from_another_snapshot() -> None:
    async def make() -> Task:
        fixed = await snapshot_of(
            {"src/a.py": "VALUE = 3\n", "tests/deep/test_c.py": "c\n", "tests/test_b.py": "theirs\n"}, "test-starts-fix"
        )
        there = Origin(snapshot=fixed)
        return task(
            await ground(),
            tests_from=TreeSource(there, ("tests",)),
            test_patch=TEST_FIX,
            solution_from=TreeSource(there, ("src/a.py", "src/old.py")),
        )

    state = started(make)
    assert dict(state.tests) == {
        "tests/deep/test_c.py": b"c\n",
        "tests/test_b.py": b"b\n",
        "tests/test_a.py": b"hidden = 1\n",
    }
    assert {path: file.content for path, file in state.solution.files.items()} == {"src/a.py": b"VALUE = 3\n"}
    assert state.solution.removed == ("src/old.py",)
    assert asyncio.run(listed(state, "cat tests/*; ls tests")) == "visible = 1\ntest_a.py\n"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"patch": FIX.replace("VALUE = 1", "VALUE = 9")}, "patch"),
        ({"solution_patch": FIX.replace("src/", "run/")}, "solution_patch"),
        ({"test_patch": TEST_FIX.replace("visible", "absent")}, "test_patch"),
        ({"solution_patch": FIX, "editable": ("src/a.py",)}, "solution"),
        ({"solution_patch": FIX.replace("100755", "120000")}, "solution_patch"),
    ],
)
def test_a_patch_that_does_not_fit_says_which(changes: dict[str, Any], field: str) -> None:
    async def make() -> Task:
        return task(await ground(), **changes)

    with pytest.raises(ConfigError) as caught:
        started(make)
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize("field", ["tests_from", "solution_from"])
def test_a_path_that_is_nowhere_says_where_it_was_looked_for(field: str) -> None:
    async def make() -> Task:
        world = await ground()
        return task(world, **{field: TreeSource(world, ("src/nowhere.py",))})

    with pytest.raises(ConfigError, match=r"nowhere\.py") as caught:
        started(make)
    assert caught.value.fields["field"] == field


def test_tasks_with_equal_starts_share_one_and_it_is_built_once() -> None:
    async def act() -> tuple[list[str], str]:
        world = await ground()
        # Each build leaves another mark.
        step = ("sh", "-c", "cat /proc/sys/kernel/random/uuid > mark")
        tasks = [task(world, task_id=f"e2e/{number}", prompt=str(number), rebuild=step) for number in range(4)]
        several = [await StartingStates.open(), await StartingStates.open()]
        states = await asyncio.gather(*(several[number % 2].get(each) for number, each in enumerate(tasks)))
        other = await several[0].get(task(world, rebuild=step, env={"A": "1"}))
        return [state.snapshot_id for state in states], other.snapshot_id

    same, other = asyncio.run(act())
    assert len(set(same)) == 1
    assert other not in same


def test_who_opens_one_rollout_at_a_time_has_tests_and_reference_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    async def counted(*about: Any) -> dict[str, bytes]:
        read.append(about[1].task_id)
        return await gather_tests(*about)

    monkeypatch.setattr(starts, "gather_tests", counted)
    (tmp_path / "test_b.py").write_text("first")

    async def act() -> list[bytes]:
        taken = TreeSource(Origin(directory=str(tmp_path)), ("test_b.py",))
        asked = task(await ground(), task_id="e2e/again", hidden_tests={}, tests_from=taken)
        found = [(await (await StartingStates.open()).get(asked)).tests["test_b.py"] for _ in range(3)]
        (tmp_path / "test_b.py").write_text("second")
        return [*found, (await (await StartingStates.open()).get(asked)).tests["test_b.py"]]

    assert asyncio.run(act()) == [b"first", b"first", b"first", b"second"]
    assert len(read) == 2


def test_a_rebuild_step_that_fails_is_a_broken_build() -> None:
    async def make() -> Task:
        return task(await ground(), rebuild=("sh", "-c", "echo no compiler >&2; exit 3"))

    with pytest.raises(SandboxError, match="no compiler") as caught:
        started(make)
    assert caught.value.fields["kind"] is FailureKind.BUILD


def test_mounts_are_absent_at_grading_unless_declared(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("tool\n")
    shown = Origin(directory=str(tmp_path))

    async def make() -> Task:
        mounts = (Mount("/mnt/agent", shown), Mount("/mnt/data", shown, at_grading=True))
        return task(await ground(), mounts=mounts)

    state = started(make)
    assert asyncio.run(listed(state, "cat /mnt/agent/tool /mnt/data/tool")) == "tool\ntool\n"
    assert asyncio.run(listed(state, "cat /mnt/data/tool; test ! -e /mnt/agent/tool", grading=True)) == "tool\n"


def test_a_fork_is_told_its_seed_and_ends_by_itself() -> None:
    async def act() -> tuple[str, str, int]:
        states = await StartingStates.open()
        state = await states.get(task(await ground()))
        said = "echo $WORLDFORK_FORK_INDEX $WORLDFORK_SEED"
        once, again = [await listed(state, said, index=3) for _ in range(2)]
        assert once == again
        async with await state.open(1, seed=5, ttl_s=60.0) as sandbox:
            facts = await sandbox.info()
            return once, (await sandbox.sh(said)).stdout, int(facts.timeout_secs or 0)

    own, given, ttl_s = asyncio.run(act())
    assert own.split()[0] == "3"
    assert (given, ttl_s) == ("1 5\n", 60)


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_commit_is_a_world_without_its_history(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    words = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    for rest in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*words, *rest], check=True)

    async def act() -> str:
        from worldfork.worlds.recipe import ground_of

        found = await ground_of(Origin(git=f"{tmp_path}@HEAD"))
        assert found is not None
        async with await AsyncSandbox.create(snapshot_id=found.snapshot_id) as sandbox:
            return (await sandbox.sh("ls -A")).stdout

    assert asyncio.run(act()) == "a.py\n"


def test_commands_and_removals_shape_a_world_over_a_directory(tmp_path: Path) -> None:
    (tmp_path / "keep.txt").write_text("k")
    (tmp_path / "stale").mkdir()
    (tmp_path / "stale/test_old.py").write_text("old")

    async def act(source: WorldSource) -> str:
        from worldfork.worlds.recipe import build_world, ground_of

        # As a snapshot it gets no packages, so that the registry is not needed.
        found = await ground_of(source.origin)
        assert found is not None
        built = await build_world(
            WorldSource(Origin(snapshot=found.snapshot_id), commands=source.commands, without=source.without)
        )
        async with await AsyncSandbox.create(snapshot_id=built.snapshot_id) as sandbox:
            return (await sandbox.sh("ls -A")).stdout

    there = Origin(directory=str(tmp_path))
    source = WorldSource(there, commands=(("touch", "made"),), without=("stale",))
    assert asyncio.run(act(source)).split() == ["keep.txt", "made"]
    with pytest.raises(ConfigError, match="not in the world"):
        asyncio.run(act(WorldSource(there, without=("absent",))))
    with pytest.raises(SandboxError, match="no way"):
        asyncio.run(act(WorldSource(there, commands=(("sh", "-c", "echo no way; exit 1"),))))


async def commands_in(sandbox: AsyncSandbox) -> list[bytes]:
    found = []
    for entry in (await sandbox.list_directory("/proc")).entries:
        if entry.name.isdigit():
            with contextlib.suppress(PathError):
                found.append(await sandbox.read_file(f"/proc/{entry.name}/cmdline"))
    return found


def test_what_a_fork_left_on_its_disk_goes_on_without_anything_that_ran_in_it() -> None:
    async def act() -> None:
        state = await (await StartingStates.open()).get(task(await ground()))
        async with state.fork(grading=True) as sandbox:
            # Whatever there is inside that could end processes is in the hands of what runs there.
            await sandbox.sh(
                "rm /bin/sh; (trap '' TERM INT HUP; while :; do sleep 1; done) >/dev/null 2>&1 & echo 1 > left"
            )
            assert any(b"sleep" in line for line in await commands_in(sandbox))
            async with state.stilled(sandbox) as snapshot_id:
                async with state.fork(grading=True, snapshot_id=snapshot_id) as after:
                    assert await after.read_file("/workspace/left") == b"1\n"
                    assert not any(b"sleep" in line for line in await commands_in(after))
                    assert after.seed == sandbox.seed
        with pytest.raises(NotFound):
            await AsyncSandbox.get_snapshot(snapshot_id)

    asyncio.run(act())


def test_a_fork_that_died_leaves_nothing_to_go_on_with() -> None:
    async def act() -> None:
        state = await (await StartingStates.open()).get(task(await ground()))
        async with state.fork(grading=True) as sandbox:
            await sandbox.terminate()
            with pytest.raises(SandboxError):
                async with state.stilled(sandbox):
                    raise AssertionError

    asyncio.run(act())
