"""Keeping and letting go of real snapshots, as a person does it in a shell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.roots import make_small_root

PROGRAM = str(Path(sys.executable).with_name("worldfork"))
LIMIT_S = 120


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"dir:{make_small_root(tmp_path_factory.mktemp('root') / 'small')}"


def worldfork(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == code, done.stderr
    return done


def facts(*arguments: str, code: int = 0) -> Any:
    return json.loads(worldfork(*arguments, "--json", code=code).stdout)


def line(*arguments: str) -> str:
    return worldfork(*arguments).stdout.strip()


CHAIN = """
import json, sys
from worldfork import Sandbox
chain = []
for text in ("one", "two", "three"):
    source = Sandbox.fork_snapshot(chain[-1].snapshot_id, 1).unwrap()[0] if chain else Sandbox.create(base=sys.argv[1])
    with source as sandbox:
        sandbox.write_file("said", text.encode())
        sandbox.write_file(f"data.{text}", bytes(300_000))
        chain.append(sandbox.checkpoint(label=f"step {text}", wait_until="completed"))
print(json.dumps([each.snapshot_id for each in chain]))
"""
SAID = """
import json, sys
from worldfork import Sandbox
with Sandbox.fork_snapshot(sys.argv[1], 1).unwrap()[0] as sandbox:
    print(json.dumps(sandbox.read_file("said").decode()))
"""


def program(text: str, argument: str) -> Any:
    line = [sys.executable, "-c", text, argument]
    return json.loads(subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout)


@pytest.mark.timeout(300)
def test_a_lineage_from_tag_to_prune(fresh_home: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What it reads just then it holds, so that a prune would have to leave it for the next.
    monkeypatch.setenv("WORLDFORK_UPKEEP", "off")
    one, two, three = chain = program(CHAIN, base)
    worldfork("tag", one, "start")
    fork = line("fork", two)
    try:
        listed = {each["snapshot_id"]: each for each in facts("snapshots")}
        assert listed[one]["names"] == ["start"]
        assert [listed[each]["state"] for each in chain] == ["durable"] * 3
        tree = {each["snapshot_id"]: each for each in facts("tree")}
        assert [tree[each]["parent_id"] for each in (two, three)] == [one, two]
        assert tree[two]["live_forks"] == 1
        assert [tree[each]["names"] for each in chain] == [["start"], [], []]
        shown = facts("show", "start")
        assert (shown["snapshot_id"], shown["made_by"], shown["label"]) == (one, "checkpoint", "step one")

        used = facts("df", "--measure")
        stored = {each["snapshot_id"]: each["stored_bytes"] for each in used["snapshots"]}
        assert stored[three] > stored[two] + 300_000 > stored[one] + 600_000
        assert used["logical_bytes"] > used["stored_bytes"] > 900_000

        assert worldfork("prune").stdout == ""
        dry = facts("prune", "--keep-last", "0", "--dry-run", "--measure")
        assert dry["deleted"] == [three]
        assert dry["freed_bytes"] > 300_000
        assert dry["in_use"] == [{"snapshot_id": two, "sandboxes": [fork]}]
        assert facts("prune", "--keep-last", "0") == {**dry, "dry_run": False}
        assert worldfork("exec", "-n", fork, "--", "cat", "said").stdout == "two"
        assert program(SAID, two) == "two"
    finally:
        worldfork("rm", fork)
    assert facts("prune", "--keep-last", "0")["deleted"] == [two]
    left = [each["snapshot_id"] for each in facts("snapshots")]
    assert one in left
    assert not {two, three} & set(left)
    assert program(SAID, one) == "one"
    worldfork("tag", "--remove", "start")
    assert one in facts("prune", "--keep-name", "nothing")["deleted"]
    assert facts("df")["reclaimable"]["total_bytes"] == 0
