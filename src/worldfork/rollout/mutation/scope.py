"""What a function knows: its names, how they are used, and the expressions and calls that are in it."""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from functools import cached_property

from worldfork.rollout.mutation.module import Module

Function = ast.FunctionDef | ast.AsyncFunctionDef

MAX_NAMES = 100
"""Names of one function that may stand for each other."""

MAX_EXPRESSION_CHARACTERS = 1000
"""A longer expression is not changed as a whole: its text would be made anew for each of its parts."""

MAX_INGREDIENTS = 60
"""Expressions of one function that may be put elsewhere in it."""


class Scope:
    """One function of a module, with those that are inside it."""

    def __init__(self, module: Module, function: Function) -> None:
        self.module = module
        self.function = function
        self.nodes = [node for each in function.body for node in ast.walk(each)]
        self._outside = {
            inner
            for node in ast.walk(function)
            for outside in (*_annotations(node), *_documentation(node))
            for inner in ast.walk(outside)
        }

    @cached_property
    def expressions(self) -> list[ast.expr]:
        """Every expression that is evaluated and of a common length, in the order of the text, each once."""
        found = [
            node
            for node in self.nodes
            if isinstance(node, ast.expr)
            and node not in self._outside
            and not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
            and not any(isinstance(one, ast.JoinedStr) for one in self.module.above(node))
        ]
        spans = {node: self.module.span(node) for node in found}
        short = [node for node, (start, end) in spans.items() if end - start <= MAX_EXPRESSION_CHARACTERS]
        return sorted(short, key=lambda node: (*spans[node], type(node).__name__))

    @cached_property
    def statements(self) -> list[ast.stmt]:
        """Every statement but documentation."""
        return [node for node in self.nodes if isinstance(node, ast.stmt) and node not in self._outside]

    @cached_property
    def names(self) -> list[str]:
        """Names of the function's own values, in the order of their first use; the first of very many."""
        found: dict[str, None] = {}
        for node in ast.walk(self.function):
            if isinstance(node, ast.arg):
                found.setdefault(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.setdefault(node.id)
            elif isinstance(node, Function) and node is not self.function:
                found.setdefault(node.name)
        return list(found)[:MAX_NAMES]

    @cached_property
    def assigned(self) -> frozenset[str]:
        """Names that are given a value in the function."""
        return frozenset(n.id for n in self.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))

    @cached_property
    def loads(self) -> Counter[str]:
        """How often each name is read."""
        return Counter(n.id for n in self.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))

    @cached_property
    def attributes(self) -> list[str]:
        """Names of attributes that are read, not called."""
        return list(
            dict.fromkeys(
                node.attr for node in self.expressions if isinstance(node, ast.Attribute) and not self.is_called(node)
            )
        )

    @cached_property
    def callables(self) -> list[str]:
        """Names of the functions that it calls, itself among them where it is recursive."""
        return list(
            dict.fromkeys(
                node.func.id
                for node in self.expressions
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            )
        )

    @cached_property
    def ingredients(self) -> list[ast.expr]:
        """Expressions worth putting elsewhere, each text once."""
        found: dict[str, ast.expr] = {}
        for node in self.expressions:
            small = sum(1 for _ in ast.walk(node)) <= 14
            if small and isinstance(node, _INGREDIENTS) and not self.is_called(node):
                found.setdefault(ast.unparse(node), node)
        return list(found.values())[:MAX_INGREDIENTS]

    @cached_property
    def kinds(self) -> dict[str, frozenset[str]]:
        """Name -> what it seems to hold: `number`, `sequence`, `function`, `object`; nothing where nothing tells."""
        found: dict[str, set[str]] = {name: set() for name in self.names}
        for node in ast.walk(self.function):
            for part, kind in _told(node):
                if isinstance(part, ast.Name):
                    found.setdefault(part.id, set()).add(kind)
            if isinstance(node, Function):
                found.setdefault(node.name, set()).add("function")
        return {name: frozenset(kinds) for name, kinds in found.items()}

    def is_called(self, node: ast.AST) -> bool:
        """Tell whether an expression is what a call calls."""
        parent = self.module.parents.get(node)
        return isinstance(parent, ast.Call) and parent.func is node

    def is_number(self, name: str) -> bool:
        """Tell whether a name seems to hold numbers and nothing else."""
        return self.kinds.get(name, frozenset()) == frozenset({"number"})

    def may_stand_for(self, name: str, other: str) -> bool:
        """Tell whether `other` may be of the same kind as `name`, as far as the function tells."""
        mine, theirs = self.kinds.get(name, frozenset()), self.kinds.get(other, frozenset())
        return not mine or not theirs or bool(mine & theirs)

    def knows(self, name: str) -> bool:
        """Tell whether a name means something in the function."""
        return name in self.names or name in self._globals or hasattr(builtins, name)

    @cached_property
    def _globals(self) -> set[str]:
        found = set()
        for node in self.module.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, Function | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        return found


def _annotations(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, Function):
        return [*node.decorator_list, *([node.returns] if node.returns else [])]
    annotation = getattr(node, "annotation", None)
    return [annotation] if isinstance(annotation, ast.expr) else []


def _documentation(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return [node]
    return []


def _told(node: ast.AST) -> list[tuple[ast.AST | None, str]]:
    """Return parts of a node and what their place in it tells of them."""
    if isinstance(node, ast.Subscript):
        index = node.slice
        bounds = [index.lower, index.upper, index.step] if isinstance(index, ast.Slice) else [index]
        return [(node.value, "sequence"), *((bound, "number") for bound in bounds)]
    if isinstance(node, ast.For | ast.comprehension):
        told: list[tuple[ast.AST | None, str]] = [(node.iter, "sequence")]
        if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range":
            told.append((node.target, "number"))
        return told
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kind = {"len": "sequence", "range": "number", "abs": "number", "sorted": "sequence"}.get(node.func.id)
        return [(node.func, "function"), *((each, kind) for each in node.args if kind)]
    if isinstance(node, ast.BinOp | ast.AugAssign):
        sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.target, node.value]
        if any(_is_number(side) for side in sides):
            return [(side, "number") for side in sides]
    if isinstance(node, ast.Compare) and any(map(_is_number, [node.left, *node.comparators])):
        return [(side, "number") for side in [node.left, *node.comparators]]
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        if _is_number(node.value):
            return [(node.targets[0], "number")]
        if isinstance(node.value, ast.List | ast.Tuple | ast.ListComp | ast.Dict | ast.Set):
            return [(node.targets[0], "sequence")]
    if isinstance(node, ast.Attribute):
        return [(node.value, "sequence" if node.attr in _OF_SEQUENCES else "object")]
    return []


def _is_number(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


_INGREDIENTS = (ast.BinOp, ast.Subscript, ast.Attribute, ast.Call, ast.Name)
_OF_SEQUENCES = frozenset(dir(list)) | frozenset(dir(dict)) | frozenset(dir(set)) | frozenset(dir(str))
