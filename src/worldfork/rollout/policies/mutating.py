"""A policy that searches: it changes the program a little, each rollout in another way, and knows no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from worldfork.core.errors import PathError
from worldfork.core.ids import content_id
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.globs import is_editable, is_literal
from worldfork.records.task import Task
from worldfork.reward.places import TASK_DIRECTORY, inside_task
from worldfork.rollout.mutation.choosing import MUTATION_VERSION, mutate
from worldfork.rollout.mutation.module import MAX_MODULE_CHARACTERS
from worldfork.rollout.turn import Turn

MAX_FILES = 32
"""Files among which one is chosen."""
_LISTING_S = 60.0


class MutatePolicy:
    """Makes one small change, or two, of one of the task's Python files.

    Rollout `index` gets the `index`-th program of the policy's seed, whatever the rollout's own seed is: no program
    comes twice in a group, and the same seed gives the same group again. Nothing is run.

    Args:
        seed: decides which changes are made and in which order.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = int(seed)
        self.policy_id = f"mutate-{MUTATION_VERSION}-{self.seed}"

    async def agent(self, sandbox: AsyncSandbox, task: Task, turn: Turn) -> None:
        """Write the changed file."""
        sources = await _sources(sandbox, task)
        # Looking for the changes of a large file takes a while.
        changed = await asyncio.to_thread(propose, sources, self.seed, turn.index)
        if changed is None:
            turn.note("there is no Python file that could be changed so often")
            return
        path, text = changed
        await sandbox.write_file(inside_task(path), text)


def propose(sources: Mapping[str, str], seed: int, index: int) -> tuple[str, str] | None:
    """Return the path and the text of the `index`-th changed program; None where there is none.

    Args:
        sources: path -> Python module. They take turns, in an order that the seed decides.
        seed: decides the order.
        index: from 0.
    """
    order = sorted(sources, key=lambda path: content_id(str(seed).encode(), path.encode("utf-8", "surrogatepass")))
    count, depth = 0, 0
    while order:
        for path in tuple(order):
            text = mutate(sources[path], seed, depth)
            if text == sources[path]:
                order.remove(path)
            elif count == index:
                return path, text
            else:
                count += 1
        depth += 1
    return None


async def _sources(sandbox: AsyncSandbox, task: Task) -> dict[str, str]:
    """Read the files that may be changed: of those that the prompt names, else of all."""
    paths = [path for path in task.files if _is_wanted(path, task)]
    paths += [path for path in task.editable if is_literal(path) and path.endswith(".py") and path not in paths]
    if any(not is_literal(pattern) for pattern in task.editable):
        paths += [path for path in await _listed(sandbox) if _is_wanted(path, task) and path not in paths]
    named = [path for path in paths if path in task.prompt]
    found: dict[str, str] = {}
    for path in sorted(named or paths)[:MAX_FILES]:
        try:
            found[path] = (await sandbox.read_file(inside_task(path), max_bytes=MAX_MODULE_CHARACTERS)).decode("utf-8")
        except (PathError, UnicodeDecodeError):
            continue
    return found


def _is_wanted(path: str, task: Task) -> bool:
    return path.endswith(".py") and is_editable(path, task.editable)


async def _listed(sandbox: AsyncSandbox) -> Sequence[str]:
    result = await sandbox.run(
        "find", [".", "-name", "*.py", "-type", "f", "-print0"], working_dir=TASK_DIRECTORY, timeout=_LISTING_S
    )
    names = (name.removeprefix(b"./") for name in result.stdout_bytes.split(b"\0") if name)
    return sorted(name.decode("utf-8") for name in names if _is_text(name))


def _is_text(name: bytes) -> bool:
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
