"""Episodes as conversations, in the messages that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from worldfork.core.errors import ConfigError
from worldfork.records.episode import Episode, ranked
from worldfork.records.task import Task
from worldfork.records.trajectory import HARNESS, Step
from worldfork.rollout.journal import Key
from worldfork.rollout.stored import StoredGroup, StoredRun

Message = dict[str, Any]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"} for argument in arguments},
                "required": list(arguments),
            },
        },
    }
    for name, text, arguments in (
        ("sh", "Run one line in the shell.", ("line",)),
        ("write_file", "Write a file.", ("path", "content")),
        ("delete_file", "Remove a file.", ("path",)),
    )
]
"""What the actions of a trajectory are called in a conversation."""


def conversation(run: StoredRun, episode: Episode) -> list[Message]:
    """Return an episode as messages: the prompt, then what the policy said and did and what it saw of it.

    Each action is a call of one of `TOOLS`, with its arguments as JSON text, and its output the answer to that call.
    What was done to run the policy is none. An episode of which no action is known ends with its diff as the policy's
    words.

    Raises:
        ConfigError: the run does not hold the episode's task, and so not its prompt.
    """
    return [*prompt_messages(run, episode), *_answer(run, episode)]


def prompt_messages(run: StoredRun, episode: Episode) -> list[Message]:
    """Return the messages that the policy was given.

    Raises:
        ConfigError: the run does not hold the episode's task.
    """
    return [{"role": "user", "content": task_of(run, episode).prompt}]


def task_of(run: StoredRun, episode: Episode) -> Task:
    """Return an episode's task.

    Raises:
        ConfigError: it is not among those that are known.
    """
    task = run.tasks.get(episode.task_hash)
    if task is None:
        raise ConfigError(
            f"the prompt of {episode.task_id} is not known",
            remedy="name the file of the run's tasks with --tasks",
            task_id=episode.task_id,
        )
    return task


def preference_pairs(
    run: StoredRun, group: StoredGroup, *, most: int = 1, margin: float = 0.0
) -> Iterator[dict[str, Any]]:
    """Yield pairs of a group's episodes, one better than the other: `prompt`, `chosen`, `rejected` and their rewards.

    The best is set against the worst, the next best against the next worst, and so on. Episodes without a reward, and
    further ones that left the same files as another, take no part.

    Args:
        most: pairs at most.
        margin: how much the rewards must differ; pairs of equal rewards are never made.

    Raises:
        ConfigError: the run does not hold the group's task.
    """
    order = ranked(distinct([each for each in group.episodes if each.reward is not None]))
    for better, worse in list(zip(order, reversed(order), strict=True))[: min(most, len(order) // 2)]:
        gap = (better.reward or 0.0) - (worse.reward or 0.0)
        if gap <= 0 or gap < margin:
            return
        yield {
            "prompt": prompt_messages(run, better),
            "chosen": _answer(run, better),
            "rejected": _answer(run, worse),
            "score_chosen": better.reward,
            "score_rejected": worse.reward,
            "task_id": better.task_id,
            "index_chosen": better.index,
            "index_rejected": worse.index,
        }


def distinct(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes without those that left the same as a better or an earlier one of the same task.

    What an episode left is known by the digest of its edits; one of which none is known counts as different.
    """
    ranked = sorted(episodes, key=lambda each: (-(each.reward if each.reward is not None else -1.0), each.index))
    seen: set[tuple[str, str]] = set()
    kept: set[Key] = set()
    for episode in ranked:
        left = episode.edits or episode.diff
        if left is not None and (episode.task_hash, left) in seen:
            continue
        if left is not None:
            seen.add((episode.task_hash, left))
        kept.add(episode.key)
    return [episode for episode in episodes if episode.key in kept]


def _answer(run: StoredRun, episode: Episode) -> list[Message]:
    trajectory = run.trajectory(episode)
    messages: list[Message] = []
    for number, step in enumerate(trajectory.steps if trajectory else ()):
        messages += _messages_of(step, f"call_{number}")
    if any(message.get("tool_calls") for message in messages):
        return messages
    diff = run.diff(episode)
    if diff:
        return [*messages, {"role": "assistant", "content": f"```diff\n{diff.rstrip()}\n```"}]
    return messages or [{"role": "assistant", "content": ""}]


def _messages_of(step: Step, call_id: str) -> list[Message]:
    if step.actor == HARNESS:
        return []
    if step.kind == "message":
        return [{"role": "assistant", "content": step.action}]
    call = _call_of(step)
    if call is None:
        return []
    name, arguments = call
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    asked = {
        "role": "assistant",
        "content": step.message,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    return [asked, {"role": "tool", "tool_call_id": call_id, "name": name, "content": _seen(step)}]


def _call_of(step: Step) -> tuple[str, dict[str, str]] | None:
    if step.kind == "command":
        return "sh", {"line": step.action}
    if step.kind == "write" and step.reason == "deleted":
        return "delete_file", {"path": step.action}
    if step.kind == "write":
        return "write_file", {"path": step.action, "content": step.output}
    return None


def _seen(step: Step) -> str:
    if step.kind == "write":
        return "" if step.reason in ("", "deleted", "uploaded") else step.reason
    ending = "" if step.exit_code in (0, None) else f"[exit code {step.exit_code}]"
    if step.reason not in ("", "exited"):
        ending = f"[{step.reason}]"
    between = "\n" if step.output and ending and not step.output.endswith("\n") else ""
    return f"{step.output}{between}{ending}"
