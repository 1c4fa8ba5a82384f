"""Which names the modules under test have: read from the reference's text, never by running it."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from worldfork.core.errors import ConfigError
from worldfork.reward.places import TASK_DIRECTORY

STUB = "import sys\nsys.modules['_worldfork_split'].fill(globals(), {path!r})\n"
"""What stands in the tests' fork in a module's place."""

_DATACLASS_METHODS = ("__eq__", "__repr__")
_ORDER_METHODS = ("__lt__", "__le__", "__gt__", "__ge__")
_COLLECTION_METHODS = ("__eq__", "__len__", "__iter__", "__getitem__", "__contains__", "__repr__", "__lt__", "__hash__")
_COLLECTIONS = frozenset({"list", "dict", "set", "tuple", "frozenset", "str", "NamedTuple"})


def module_plan(sources: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Describe modules.

    Args:
        sources: path of the task, which ends in `.py` -> text.

    Returns:
        path -> `functions`: names; `classes`: name -> `bases` and `methods`; `exceptions`: name -> bases; `values`: the
        other names.

    Raises:
        ConfigError: a text is no Python.
    """
    plan = {}
    for path, text in sources.items():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{path} is no Python: {error}", field="solution") from None
        plan[path] = _describe(tree)
    return plan


def stub_files(plan: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the stub modules: path of the task -> content."""
    return {path: STUB.format(path=path).encode("utf-8") for path in plan}


def plan_text(plan: Mapping[str, Any], shapes: Mapping[str, Iterable[str]] | None) -> dict[str, Any]:
    """Return what the tests' fork is told: the modules, and where objects may stand; anywhere while None."""
    known = {place: sorted(names) for place, names in (shapes or {}).items()}
    return {"directory": TASK_DIRECTORY, "modules": dict(plan), "shapes": known, "learning": shapes is None}


def _describe(tree: ast.Module) -> dict[str, Any]:
    functions: list[str] = []
    classes: dict[str, Any] = {}
    exceptions: dict[str, list[str]] = {}
    values: dict[str, None] = {}
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef):
            functions.append(node.name)
        elif isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            if any(base in exceptions or _is_exception(base) for base in bases):
                exceptions[node.name] = bases
            else:
                classes[node.name] = {"bases": bases, "methods": sorted(set(_methods(node, bases)))}
        else:
            values.update(dict.fromkeys(_assigned(node)))
    taken = {*functions, *classes, *exceptions}
    return {
        "functions": list(dict.fromkeys(functions)),
        "classes": classes,
        "exceptions": exceptions,
        "values": [name for name in values if name not in taken],
    }


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, those under its conditions too."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)
        else:
            yield node


def _assigned(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom | ast.Import):
        for alias in node.names:
            yield (alias.asname or alias.name).partition(".")[0]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        for inner in ast.walk(target) if target is not None else ():
            if isinstance(inner, ast.Name):
                yield inner.id


def _is_exception(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def _methods(node: ast.ClassDef, bases: list[str]) -> Iterator[str]:
    for inner in _statements(node.body):
        if isinstance(inner, ast.FunctionDef) and not inner.decorator_list:
            yield inner.name
        elif isinstance(inner, ast.Assign):
            # `__radd__ = __add__` and the like.
            yield from (name for name in _assigned(inner) if name.startswith("__"))
    decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
    if "dataclass" in decorators:
        yield from _DATACLASS_METHODS
    if "total_ordering" in decorators or "order=True" in decorators:
        yield from _ORDER_METHODS
    if _COLLECTIONS & set(bases):
        yield from _COLLECTION_METHODS
