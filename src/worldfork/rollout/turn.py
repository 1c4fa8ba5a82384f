"""A policy's turn, and how the forms in which people write policies come to take one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

from worldfork.core.errors import ConfigError, PolicyError
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.synchronous import Sandbox
from worldfork.records.edits import Edits
from worldfork.records.task import Task
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.rollout.recording import Recorder

MAX_ACTIONS = 1000
"""Of one turn of a policy with `act`; such a turn ends there."""


@dataclass
class Turn:
    """One policy's turn in one rollout."""

    index: int
    """The place within the group, from 0."""
    seed: int
    """WORLDFORK_SEED inside."""
    recorder: Recorder = field(default_factory=Recorder)
    """Where the steps of the rollout go; those of the sandbox's own calls go there by themselves."""
    solution: Edits | None = None
    """The task's reference; only for the policy that is told it."""

    def note(self, text: str) -> None:
        """Record a line for people."""
        self.recorder.note(text)


class Agent(Protocol):
    """What takes a whole turn by itself."""

    @property
    def policy_id(self) -> str:
        """Names the policy and everything that decides what it does; episodes and resumed runs go by it."""
        ...

    async def agent(self, sandbox: AsyncSandbox, task: Task, turn: Any) -> None:
        """Take the whole turn: what is in the task's directory when this returns is graded.

        Raises:
            PolicyError: the policy itself broke; the rollout has no reward.
        """
        ...


@dataclass(frozen=True)
class Observation:
    """What a policy with `act` is shown before each of its actions."""

    task_id: str
    prompt: str
    index: int
    """The place within the group."""
    seed: int
    step: int
    """How many actions came before."""
    output: str = ""
    """What the last command printed, standard output and then errors."""
    exit_code: int | None = None
    """None before the first command, and where it did not end by itself."""
    reason: str = ""
    """How the last command ended, a reason of commands."""


@dataclass(frozen=True)
class Action:
    """What a policy with `act` does next."""

    command: str | None
    """A line for the world's shell, run in the task's directory; None ends the turn."""
    message: str = ""
    """What it said with it."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    log_probability: float | None = None
    """Sum over the completion tokens, natural logarithm."""


@runtime_checkable
class _HasAgent(Protocol):
    policy_id: str

    def agent(self, sandbox: Any, task: Any, turn: Any) -> Any: ...


def as_policy(policy: object, *, policy_id: str | None = None) -> Agent:
    """Return something that takes turns, whatever form it was written in.

    Args:
        policy: one of: an object with `policy_id` and `agent(sandbox, task, turn)`, a coroutine function; an object
            with `act(observation)` that returns an `Action`, a shell line, or None to end its turn; or a function
            `agent(sandbox, task)`, also with a third parameter for the `Turn`. Synchronous ones run in a thread of
            their own and get a `Sandbox`; such a thread cannot be stopped, but where the turn's time is over its
            sandbox is, and its next call there raises.
        policy_id: a name for it; by default its own, or the function's.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(policy, type):
        raise ConfigError(f"{policy.__name__} is a class", remedy="pass an instance of it", field="policy")
    if isinstance(policy, _HasAgent) and inspect.iscoroutinefunction(policy.agent):
        return cast(Agent, policy) if policy_id is None else _Adapted(policy_id, policy.agent)
    name = policy_id or str(getattr(policy, "policy_id", "") or _name_of(policy))
    whole = getattr(policy, "agent", None)
    if callable(whole):
        return _Adapted(name, whole)
    act = getattr(policy, "act", None)
    if callable(act):
        return _Adapted(name, functools.partial(_take_actions, act))
    if callable(policy):
        return _Adapted(name, policy)
    raise ConfigError(
        f"{type(policy).__name__} is no policy",
        remedy="give it agent(sandbox, task) or act(observation)",
        field="policy",
    )


class _Adapted:
    """A function that takes a turn."""

    def __init__(self, policy_id: str, whole: Callable[..., Any]) -> None:
        self.policy_id = policy_id
        self._whole = whole
        self._takes_turn = _takes_three(whole)

    async def agent(self, sandbox: AsyncSandbox, task: Task, turn: Turn) -> None:
        """Call the function."""
        rest = (task, turn) if self._takes_turn else (task,)
        if _is_coroutine_function(self._whole):
            await self._whole(sandbox, *rest)
            return
        returned = await in_thread(self._whole, Sandbox(sandbox), *rest)
        if inspect.isawaitable(returned):
            await returned


async def _take_actions(act: Callable[[Observation], Any], sandbox: AsyncSandbox, task: Task, turn: Turn) -> None:
    """Show, let act, run, and again, until the policy is done."""
    seen = Observation(task.task_id, task.prompt, turn.index, turn.seed, 0)
    for step in range(MAX_ACTIONS):
        action = _action(await _asked(act, seen))
        if action.message or action.completion_tokens is not None:
            turn.recorder.message(
                action.message,
                prompt_tokens=action.prompt_tokens,
                completion_tokens=action.completion_tokens,
                log_probability=action.log_probability,
            )
        if action.command is None:
            return
        result = await sandbox.sh(action.command, working_dir=TASK_DIRECTORY, timeout=task.limits.command_wall_s)
        seen = Observation(
            task.task_id,
            task.prompt,
            turn.index,
            turn.seed,
            step + 1,
            result.stdout + result.stderr,
            result.exit_code,
            result.reason.value,
        )
    turn.note(f"ended after {MAX_ACTIONS} actions")


async def _asked(act: Callable[[Observation], Any], seen: Observation) -> object:
    if _is_coroutine_function(act):
        return await act(seen)
    answer = await in_thread(act, seen)
    return await answer if inspect.isawaitable(answer) else answer


def _action(answer: object) -> Action:
    if isinstance(answer, Action):
        return answer
    if answer is None or isinstance(answer, str):
        return Action(answer)
    if isinstance(answer, Mapping):
        try:
            return Action(**answer)
        except TypeError as error:
            raise PolicyError(f"a policy gave an action that is none: {error}") from None
    raise PolicyError(
        f"a policy gave {type(answer).__name__} as its action",
        remedy="return a shell line, an Action, or None to end the turn",
    )


def _name_of(policy: object) -> str:
    named = getattr(policy, "__qualname__", None) or type(policy).__qualname__
    return f"{getattr(policy, '__module__', None) or type(policy).__module__}.{named}"


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    call = getattr(inner, "__call__", None)  # noqa: B004 - its own kind is asked, not whether it is there
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(call)


def _takes_three(function: Callable[..., Any]) -> bool:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    places = [each for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(places) >= 3 or any(each.kind is each.VAR_POSITIONAL for each in found)
