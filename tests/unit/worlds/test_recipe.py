"""What a world is known by."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worldfork.core.errors import ConfigError
from worldfork.records.origin import Origin, WorldSource
from worldfork.worlds import recipe
from worldfork.worlds.recipe import build_world, digest_of_directory


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree/below").mkdir(parents=True)
    (tmp_path / "tree/a.txt").write_text("a")
    (tmp_path / "tree/below/b.txt").write_text("b")
    (tmp_path / "tree/link").symlink_to("a.txt")
    return tmp_path / "tree"


def test_times_do_not_count_for_a_directory(tree: Path) -> None:
    before = digest_of_directory(str(tree))
    os.utime(tree / "a.txt", (1, 1))
    assert digest_of_directory(str(tree)) == before


@pytest.mark.parametrize("change", ["content", "mode", "name", "link", "empty"])
def test_everything_that_a_world_gets_counts_for_a_directory(tree: Path, change: str) -> None:
    before = digest_of_directory(str(tree))
    if change == "content":
        (tree / "below/b.txt").write_text("c")
    elif change == "mode":
        (tree / "a.txt").chmod(0o755)
    elif change == "name":
        (tree / "a.txt").rename(tree / "c.txt")
    elif change == "link":
        (tree / "link").unlink()
        (tree / "link").symlink_to("below")
    else:
        (tree / "nothing").mkdir()
    assert digest_of_directory(str(tree)) != before


def test_a_directory_that_is_not_there_or_too_large_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        digest_of_directory(str(tree / "nowhere"))
    monkeypatch.setattr(recipe, "MAX_FILES", 3)
    with pytest.raises(ConfigError, match="more than 3"):
        digest_of_directory(str(tree))


@pytest.mark.parametrize(
    ("dependencies", "added"),
    [
        ((), True),
        (("pytest-cov==5",), True),
        (("Py.Test==8",), True),
        (("pytest==8.3.5",), False),
        (("PyTest",), False),
    ],
)
def test_pytest_comes_with_a_world_that_names_none(dependencies: tuple[str, ...], added: bool) -> None:
    found = recipe._dependencies(WorldSource(dependencies=dependencies), is_taken_as_it_is=False)
    assert found == (*dependencies, *(recipe.DEFAULT_DEPENDENCIES if added else ()))
    assert recipe._dependencies(WorldSource(dependencies=dependencies), is_taken_as_it_is=True) == dependencies


def test_an_option_is_no_requirement() -> None:
    with pytest.raises(ConfigError, match="option of pip"):
        asyncio.run(build_world(WorldSource(dependencies=("--index-url=http://elsewhere.invalid",))))


@pytest.mark.parametrize(
    ("source", "networks"),
    [
        (WorldSource(Origin(snapshot="given"), without=("stale",)), ["none"]),
        (WorldSource(Origin(snapshot="given"), commands=(("true",),)), ["host"]),
        (WorldSource(Origin(snapshot="given"), dependencies=("box",)), ["host"]),
        (WorldSource(Origin(directory="/replaced"), dependencies=("pytest",)), ["none", "host"]),
        (WorldSource(Origin(package="box", version="1")), ["host", "host"]),
    ],
)
def test_only_what_fetches_or_runs_commands_has_the_network(
    source: WorldSource, networks: list[str], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def built(key: str, build: object, *, network: str, **_: object) -> SimpleNamespace:
        asked.append(network)
        return SimpleNamespace(snapshot_id="there")

    async def there(snapshot_id: str) -> SimpleNamespace:
        return SimpleNamespace(snapshot_id=snapshot_id)

    async def work(_: object) -> str:
        return "there"

    monkeypatch.setattr(recipe, "async_world", built)
    monkeypatch.setattr(recipe, "place", lambda: SimpleNamespace(work=work))
    monkeypatch.setattr(recipe.AsyncSandbox, "get_snapshot", there)
    if source.origin.directory:
        source = dataclasses.replace(source, origin=Origin(directory=str(tree)))
    asyncio.run(build_world(source))
    assert asked == networks


def test_what_is_exported_goes_though_the_building_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, begun, goes_on = tmp_path / "tree", threading.Event(), threading.Event()

    class Exported:
        def __init__(self, git: str) -> None:
            pass

        def __enter__(self) -> Path:
            begun.set()
            assert goes_on.wait(10)
            tree.mkdir()
            return tree

        def __exit__(self, *_: object) -> None:
            tree.rmdir()

    monkeypatch.setattr(recipe, "exported", Exported)

    class Box:
        uploaded = False

        async def make_directory(self, path: str) -> None:
            pass

        async def upload_directory(self, source: Path, path: str) -> None:
            self.uploaded = source.is_dir()

    async def run(cancelled: bool) -> Any:
        box: Any = Box()
        building = asyncio.ensure_future(recipe._exporting("p@c")(box))
        await asyncio.to_thread(begun.wait, 10)
        if cancelled:
            building.cancel()
            await asyncio.sleep(0)
        goes_on.set()
        await asyncio.wait([building])
        assert building.cancelled() is cancelled
        return box

    assert not asyncio.run(run(True)).uploaded
    assert goes_on.is_set()
    assert not tree.exists()
    assert asyncio.run(run(False)).uploaded
    assert not tree.exists()
