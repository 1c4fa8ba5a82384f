"""What is hidden of a task: its tests and its reference, gathered on the host from wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial

from worldfork.content.patches import PatchFile, apply_patch, parse_patch
from worldfork.core.errors import ConfigError
from worldfork.lineage.place import Place
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.globs import is_editable
from worldfork.records.origin import TreeSource
from worldfork.records.task import Task
from worldfork.rollout.reading import read_paths
from worldfork.worlds.recipe import ground_of

Files = dict[str, EditedFile]
Reading = Callable[[Sequence[str]], Mapping[str, EditedFile]]
"""Returns the files at some paths of a tree."""

_LINK = 0o120000


async def gather_tests(here: Place, task: Task, snapshot_id: str) -> dict[str, bytes]:
    """Return every hidden test file of a task: path -> content.

    `tests_from` first, over it `hidden_tests`, and to these and the starting state `test_patch` is applied. What that
    removes is not there; of the starting state's own files it removes none.

    Args:
        here: the home.
        task: whose tests.
        snapshot_id: its starting state.

    Raises:
        ConfigError: a path of `tests_from` is not there, or the patch does not apply; `field` says which.
        NotFound, SandboxError, StoreError: where they lie could not be built or read.
    """
    found = await _taken(here, task.tests_from, "tests_from")
    found |= {path: EditedFile(text.encode()) for path, text in task.hidden_tests.items()}
    if task.test_patch:
        read = partial(read_paths, here.store, snapshot_id)
        changed = await here.work(lambda: patched(task.test_patch, read, found, "test_patch"))
        found = {path: file for path, file in {**found, **changed}.items() if file is not None}
    return {path: file.content for path, file in found.items()}


async def gather_solution(here: Place, task: Task, snapshot_id: str) -> Edits:
    """Return a task's reference as the edits of a policy that knows it; empty where there is none.

    `solution_from` is laid over the starting state (a path that is not there is removed), to that `solution_patch` is
    applied, and over it all lies `solution`.

    Args and errors: as `gather_tests`.
        ConfigError: also where it changes what is not editable.
    """
    read = partial(read_paths, here.store, snapshot_id)
    changed: dict[str, EditedFile | None] = {}
    if task.solution_from is not None:
        taken = await _taken(here, task.solution_from, "solution_from", may_lack=True)
        missing = [path for path in task.solution_from.paths if not any(_lies_at(each, path) for each in taken)]
        changed.update({**taken, **dict.fromkeys(missing)})
    if task.solution_patch:
        changed |= await here.work(lambda: patched(task.solution_patch, read, changed, "solution_patch"))
    original = await here.work(lambda: read([*changed, *task.solution]))
    for path, text in task.solution.items():
        changed[path] = EditedFile(text.encode(), path in original and original[path].executable)
    nowhere = sorted(path for path, file in changed.items() if file is None and path not in original)
    if nowhere and task.solution_from is not None:
        raise ConfigError(
            f"solution_from of {task.task_id} names {nowhere[0]!r}, which is neither there nor in the starting state",
            field="solution_from",
        )
    edits = Edits(
        {path: file for path, file in changed.items() if file is not None and original.get(path) != file},
        tuple(path for path, file in changed.items() if file is None and path in original),
    )
    outside = sorted(path for path in (*edits.files, *edits.removed) if not is_editable(path, task.editable))
    if outside:
        raise ConfigError(
            f"the reference of {task.task_id} changes {outside[0]!r}, which is not editable",
            remedy="add a pattern that means it to editable",
            field="solution",
        )
    return edits


def check_tests(task: Task, editable: Iterable[str], tests: Collection[str]) -> None:
    """Refuse a task whose tests a policy could rewrite: files that pytest would collect, editable and laid by nobody.

    Args:
        task: only one whose hidden tests pytest runs is looked at.
        editable: the editable paths of its starting state.
        tests: paths of the hidden tests.

    Raises:
        ConfigError: there is such a file; `path` names it.
    """
    if not task.has_tests or task.test_command:
        return
    ids = (*task.fail_to_pass, *task.pass_to_pass)
    told = {each.partition("::")[0].removeprefix("./") for each in (*task.test_args, *ids) if each[:1] != "-"}
    there = [*editable, *tests]
    tops = {top for top in told if any(_lies_at(path, top.rstrip("/")) for path in there)}
    for path in sorted(set(editable) - set(tests)):
        is_named = any(_lies_at(path, top.rstrip("/")) for top in tops) or not tops
        is_test = path in tops or any(fnmatchcase(path.rpartition("/")[2], each) for each in _COLLECTED)
        if is_named and is_test and not any(_lies_at(path, root) for root in task.test_roots):
            raise ConfigError(
                f"{path!r} of {task.task_id} is one of the tests and editable, so a policy could rewrite its judge",
                remedy=f"take it out of editable with {'!' + path!r}, or make it one of the hidden tests",
                field="editable",
                path=path,
            )


_COLLECTED = ("test_*.py", "*_test.py")
"""What pytest takes for tests by itself."""


def patched(
    patch: str, read: Reading, over: Mapping[str, EditedFile | None], field: str
) -> dict[str, EditedFile | None]:
    """Return what a unified diff makes of a tree: path -> file, or None where it is removed. Blocking.

    Args:
        patch: the diff.
        read: reads the tree.
        over: what lies over the tree, or is removed from it.
        field: of the task, for errors.

    Raises:
        ConfigError: it is no diff, does not apply, or makes a link.
    """

    def look(path: str) -> PatchFile | None:
        file = over[path] if path in over else read([path]).get(path)
        return None if file is None else PatchFile(file.content, 0o100755 if file.executable else 0o100644)

    try:
        result = apply_patch(parse_patch(patch), look)
    except ConfigError as error:
        raise ConfigError(
            f"{field}: {error.message}", remedy=error.remedy, **{**error.fields, "field": field}
        ) from error
    link = next((path for path, file in result.items() if file is not None and file.mode & 0o170000 == _LINK), None)
    if link is not None:
        raise ConfigError(f"{field} makes {link!r} a link; only regular files are carried", field=field)
    return {
        path: None if file is None else EditedFile(file.content, bool(file.mode & 0o111))
        for path, file in result.items()
    }


async def _taken(here: Place, source: TreeSource | None, field: str, *, may_lack: bool = False) -> Files:
    if source is None:
        return {}
    ground = await ground_of(source.origin)
    assert ground is not None  # a TreeSource has an origin
    found = await here.work(lambda: read_paths(here.store, ground.snapshot_id, source.paths))
    missing = [path for path in source.paths if not any(_lies_at(each, path) for each in found)]
    if missing and not may_lack:
        raise ConfigError(f"{field} names {missing[0]!r}, which is not there", field=field, path=missing[0])
    return found


def _lies_at(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")
