from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.reward.played import PlayedSandbox, a_task

from worldfork.core.errors import ConfigError
from worldfork.rollout.demo_task import DEMO_REWARDS, demo_candidates, demo_task
from worldfork.rollout.policies import CandidatesPolicy, NopPolicy, Policy, ReferencePolicy, policy_named
from worldfork.rollout.turn import Turn


def act(policy: Policy, index: int = 0) -> dict[str, bytes]:
    sandbox = PlayedSandbox()
    asyncio.run(policy.agent(sandbox, a_task(), Turn(index, index)))  # type: ignore[arg-type]  # a played sandbox
    return sandbox.files


def test_nop_and_reference() -> None:
    assert act(NopPolicy()) == {}
    assert act(ReferencePolicy()) == {"/workspace/a.py": b"right"}


def test_candidates_go_by_index_and_begin_again() -> None:
    policy = CandidatesPolicy({"one": {"a.py": "1"}, "two": {"b/c.py": b"2"}})
    assert [act(policy, index) for index in range(3)] == [
        {"/workspace/a.py": b"1"},
        {"/workspace/b/c.py": b"2"},
        {"/workspace/a.py": b"1"},
    ]
    assert [policy.name(index) for index in range(3)] == ["one", "two", "one"]
    assert len(policy) == 2


def test_the_id_of_candidates_follows_their_content() -> None:
    one = CandidatesPolicy({"one": {"a.py": "1"}})
    assert one.policy_id == CandidatesPolicy({"one": {"a.py": b"1"}}).policy_id
    for other in ({"one": {"a.py": "2"}}, {"two": {"a.py": "1"}}, {"one": {"b.py": "1"}}, {"one": {}, "a.py": {}}):
        assert CandidatesPolicy(other).policy_id != one.policy_id


@pytest.mark.parametrize("path", ["/etc/passwd", "../a.py", ""])
def test_candidates_stay_in_the_tasks_directory(path: str) -> None:
    with pytest.raises(ConfigError):
        CandidatesPolicy({"one": {path: ""}})


def test_candidates_from_a_directory(tmp_path: Path) -> None:
    for path, text in {"b/a.py": "2", "a/a.py": "1", "a/sub/x.py": "x", ".git/a.py": "", "a/.cache/y": ""}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "a" / "link.py").symlink_to("/etc/passwd")
    (tmp_path / "notes.txt").write_text("")
    policy = policy_named(f"candidates:{tmp_path}")
    assert isinstance(policy, CandidatesPolicy)
    assert [policy.name(index) for index in range(len(policy))] == ["a", "b"]
    assert act(policy, 0) == {"/workspace/a.py": b"1", "/workspace/sub/x.py": b"x"}


def test_candidates_that_are_not_there(tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError):
            policy_named(f"candidates:{wrong}")
    with pytest.raises(ConfigError):
        CandidatesPolicy({})


def test_policies_by_name() -> None:
    assert policy_named("nop").policy_id == "nop"
    assert policy_named("reference").policy_id == "reference"
    assert policy_named("mutate").policy_id == policy_named("mutate:0").policy_id != policy_named("mutate:7").policy_id
    agent, other = policy_named("command:agent --fast"), policy_named("host:agent --fast")
    assert agent.policy_id != other.policy_id
    for wrong in ("", "gpt", "candidates", "candidates:", "nop:x", "mutate:", "mutate:x", "command:", "host:'"):
        with pytest.raises(ConfigError):
            policy_named(wrong)


def test_the_demos_rewards_are_what_its_tests_say() -> None:
    """Run the hidden tests by hand against each candidate: what the demo prints is known beforehand."""
    task = demo_task()
    candidates = list(demo_candidates().values())
    assert len(candidates) == len(DEMO_REWARDS) == 8
    tests = task.hidden_tests["test_buggy.py"].replace("from buggy import median", "")
    for files, reward in zip(candidates, DEMO_REWARDS, strict=True):
        space: dict[str, object] = {}
        try:
            exec(files["buggy.py"] + tests, space)
        except SyntaxError:
            assert reward == 0.0
            continue
        functions = [each for name, each in space.items() if name.startswith("test_") and callable(each)]
        assert sum(_passes(each) for each in functions) / len(functions) == pytest.approx(reward)


def _passes(function: object) -> bool:
    try:
        function()  # type: ignore[operator]
    except BaseException:
        return False
    return True
