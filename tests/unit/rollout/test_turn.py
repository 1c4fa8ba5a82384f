from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from tests.unit.reward.played import a_result, a_task

from worldfork.core.errors import ConfigError, PolicyError
from worldfork.lineage.synchronous import Sandbox
from worldfork.rollout import turn as module
from worldfork.rollout.policies import NopPolicy
from worldfork.rollout.turn import Action, Observation, Turn, as_policy


class Box:
    """A shell that answers each line with itself."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    async def sh(self, line: str, **options: Any) -> Any:
        self.lines.append((line, options))
        return a_result(f"ran {line}\n".encode(), exit_code=len(self.lines))


def take(policy: object) -> tuple[Any, Box, Turn]:
    agent, box, turn = as_policy(policy), Box(), Turn(2, 9)
    asyncio.run(agent.agent(box, a_task(), turn))  # type: ignore[arg-type]
    return agent, box, turn


def test_what_takes_turns_is_left_as_it_is() -> None:
    policy = NopPolicy()
    assert as_policy(policy) is policy
    assert as_policy(policy, policy_id="mine").policy_id == "mine"


def test_functions_with_and_without_a_turn() -> None:
    seen: list[Any] = []

    async def two(sandbox: Any, task: Any) -> None:
        seen.append((sandbox, task.task_id))

    async def three(sandbox: Any, task: Any, turn: Any) -> None:
        seen.append(turn.index)

    class Called:
        async def __call__(self, sandbox: Any, task: Any) -> None:
            seen.append("called")

    agent, box, _ = take(two)
    take(three)
    take(Called())
    assert seen == [(box, "played/one"), 2, "called"]
    assert agent.policy_id.endswith("two")


def test_synchronous_functions_run_in_a_thread_with_a_synchronous_sandbox() -> None:
    seen: list[Any] = []

    def plain(sandbox: Any, task: Any) -> None:
        seen.append((type(sandbox), threading.current_thread() is threading.main_thread()))

    class Object:
        policy_id = "plain object"

        def agent(self, sandbox: Any, task: Any, turn: Any) -> None:
            seen.append(turn.seed)

    take(plain)
    assert take(Object())[0].policy_id == "plain object"
    assert seen == [(Sandbox, False), 9]


def test_actions_and_observations_alternate() -> None:
    seen: list[Observation] = []

    class Model:
        policy_id = "model"

        def act(self, observation: Observation) -> Any:
            seen.append(observation)
            answers = ["one", {"command": "two"}, Action("three", message="thinking", completion_tokens=5), None]
            return answers[observation.step]

    _, box, turn = take(Model())
    assert [line for line, _ in box.lines] == ["one", "two", "three"]
    assert box.lines[0][1] == {"working_dir": "/workspace", "timeout": 600.0}
    assert [(each.step, each.output, each.exit_code) for each in seen] == [
        (0, "", None), (1, "ran one\n", 1), (2, "ran two\n", 2), (3, "ran three\n", 3),
    ]  # fmt: skip
    assert (seen[0].prompt, seen[0].index, seen[0].seed) == (a_task().prompt, 2, 9)
    assert turn.recorder.trajectory().steps[0].action == "thinking"


def test_asynchronous_actions() -> None:
    class Model:
        async def act(self, observation: Observation) -> str | None:
            return "go" if observation.step == 0 else None

    assert [line for line, _ in take(Model())[1].lines] == ["go"]


def test_actions_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ACTIONS", 3)

    class Model:
        def act(self, observation: Observation) -> str:
            return "again"

    _, box, turn = take(Model())
    assert len(box.lines) == 3
    assert turn.recorder.trajectory().steps[-1].action == "ended after 3 actions"


@pytest.mark.parametrize("answer", [5, {"comand": "x"}, ["ls"]])
def test_an_action_that_is_none(answer: Any) -> None:
    class Model:
        def act(self, observation: Observation) -> Any:
            return answer

    with pytest.raises(PolicyError):
        take(Model())


@pytest.mark.parametrize("policy", [None, 3, object(), NopPolicy])
def test_no_policy(policy: Any) -> None:
    with pytest.raises(ConfigError):
        as_policy(policy)


def test_what_a_thread_raises_passes() -> None:
    for error in (RuntimeError("broke"), StopIteration("odd")):

        def plain(sandbox: Any, task: Any, error: Exception = error) -> None:
            raise error

        with pytest.raises(RuntimeError):
            take(lambda sandbox, task: plain(sandbox, task))


def test_threads_of_turns_that_were_over_do_not_pile_up() -> None:
    let_go = threading.Event()

    def stall(sandbox: Any, task: Any) -> None:
        let_go.wait(30)

    async def many() -> None:
        for _ in range(50):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.002):
                    await as_policy(stall).agent(Box(), a_task(), Turn(0, 0))  # type: ignore[arg-type]
        # Others still get a thread at once.
        await asyncio.wait_for(asyncio.to_thread(time.monotonic), 5)

    before = threading.active_count()
    asyncio.run(many())
    let_go.set()
    for thread in threading.enumerate():
        if thread.name == "worldfork-call":
            thread.join(10)
    assert threading.active_count() <= before
