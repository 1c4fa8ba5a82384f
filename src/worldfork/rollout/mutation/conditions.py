"""Changes of what decides: conditions turned round, made wider or narrower; and of what an expression stands on."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from worldfork.rollout.mutation.module import Change, altered
from worldfork.rollout.mutation.scope import Scope

MAX_EXTRA_CONDITIONS = 40


def conditions(scope: Scope) -> Iterator[Change]:
    """A condition negated, one of its parts left out, its parts joined the other way."""
    for node in scope.expressions:
        if isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield scope.module.replaced("condition", node, altered(node, op=other), 2)
            for place in range(len(node.values)):
                rest = [*node.values[:place], *node.values[place + 1 :]]
                new = rest[0] if len(rest) == 1 else altered(node, values=rest)
                yield scope.module.replaced("condition", node, new, 1.5)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield scope.module.replaced("condition", node, node.operand, 2)
    for test in _tests(scope):
        if isinstance(test, ast.Constant):
            for name in scope.names:
                if "number" not in scope.kinds.get(name, ()):
                    yield scope.module.replaced("condition", test, name, 2)
        elif not isinstance(test, ast.UnaryOp):
            yield scope.module.replaced("condition", test, ast.UnaryOp(ast.Not(), test), 1)


def wider_and_narrower(scope: Scope) -> Iterator[Change]:
    """A second condition joined to one that is there."""
    extra = _extra_conditions(scope)
    for test in _tests(scope):
        if isinstance(test, ast.Constant):
            continue
        said = ast.unparse(test)
        reads = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        for text, weight in extra:
            if text == said:
                continue
            new = ast.parse(text, mode="eval").body
            near = {node.id for node in ast.walk(new) if isinstance(node, ast.Name)} & reads
            for operator in (ast.And(), ast.Or()):
                # The new condition first: it is mostly there to keep the old one from being asked.
                order = [new, test] if near else [test, new]
                yield scope.module.replaced("wider", test, ast.BoolOp(operator, order), weight * (2.0 if near else 1.0))


def ingredients(scope: Scope) -> Iterator[Change]:
    """An expression of the function put in the place of another that stands in the same kind of place."""
    texts = [(other, ast.unparse(other)) for other in scope.ingredients]
    for node in scope.expressions:
        place = _place(scope, node)
        if not place or (isinstance(node, ast.Name | ast.Constant) and place == "operand"):
            continue
        mine = ast.unparse(node)
        for other, text in texts:
            if text == mine or (isinstance(node, ast.Name) and isinstance(other, ast.Name)):
                continue
            alike = type(other) is type(node) or _place(scope, other) == place
            if alike and not _holds(other, node):
                yield scope.module.replaced("ingredient", node, other, 2.0 if type(other) is type(node) else 1.0)


def wrappings(scope: Scope) -> Iterator[Change]:
    """A call of a function of the module round a value, or a value joined with another of its kind."""
    singles = [name for name in scope.callables if name not in ("range", "print", "isinstance")]
    for node in scope.expressions:
        parent = scope.module.parents.get(node)
        if isinstance(node, ast.Constant) or scope.is_called(node) or not isinstance(parent, _HOLDERS):
            continue
        text = ast.unparse(node)
        for name in singles:
            yield scope.module.replaced("wrapping", node, f"{name}({text})", 0.5)
        if isinstance(parent, ast.Assign | ast.Return | ast.AugAssign):
            for name in scope.names:
                if scope.may_stand_for(text, name) and name != text:
                    for function in ("max", "min"):
                        if "number" in scope.kinds.get(name, ()):
                            yield scope.module.replaced("wrapping", node, f"{function}({name}, {text})", 0.7)
            if isinstance(node, ast.BinOp | ast.Call):
                yield scope.module.replaced("wrapping", node, f"max(0, {text})", 0.7)
                for target in getattr(parent, "targets", []):
                    if isinstance(target, ast.Subscript | ast.Name):
                        yield scope.module.replaced("wrapping", node, f"max({ast.unparse(target)}, {text})", 0.7)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            yield scope.module.replaced("wrapping", node, f"abs({text})", 1.5)
        if isinstance(parent, ast.Compare | ast.BinOp) and isinstance(node, ast.Name):
            for name in scope.names:
                if name != node.id and scope.is_number(name) and scope.is_number(node.id):
                    yield scope.module.replaced("wrapping", node, f"{node.id} - {name}", 0.4)
                    yield scope.module.replaced("wrapping", node, f"{node.id} + {name}", 0.4)
        if isinstance(node, ast.List | ast.Subscript) and isinstance(parent, ast.Return | ast.BinOp | ast.Call):
            for name in scope.names:
                if scope.kinds.get(name, frozenset()) in ({"sequence"}, frozenset()):
                    yield scope.module.replaced("wrapping", node, f"{text} + {name}", 0.3)


def _tests(scope: Scope) -> list[ast.expr]:
    found = [node.test for node in scope.nodes if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert)]
    return found + [test for node in scope.nodes if isinstance(node, ast.comprehension) for test in node.ifs]


def _extra_conditions(scope: Scope) -> list[tuple[str, float]]:
    found: dict[str, float] = {}
    for test in _tests(scope):
        for part in test.values if isinstance(test, ast.BoolOp) else [test]:
            if not isinstance(part, ast.Constant):
                found.setdefault(ast.unparse(part), 1.0)
    for name in scope.names:
        kinds = scope.kinds.get(name, frozenset())
        if "function" in kinds:
            continue
        if kinds & {"object"} or not kinds:
            found.setdefault(f"{name} is None", 1.0)
            found.setdefault(f"{name} is not None", 1.0)
        if "number" not in kinds:
            found.setdefault(f"not {name}", 1.0)
            found.setdefault(name, 1.0)
        else:
            found.setdefault(f"{name} == 0", 0.4)
            found.setdefault(f"{name} > 0", 0.4)
    return list(found.items())[:MAX_EXTRA_CONDITIONS]


def _place(scope: Scope, node: ast.expr) -> str:
    """Return what kind of place an expression stands in; empty where none would be put there."""
    parent = scope.module.parents.get(node)
    if scope.is_called(node):
        return ""
    if isinstance(parent, ast.Subscript):
        return "index" if parent.slice is node else ""
    if isinstance(parent, ast.Slice):
        return "index"
    if isinstance(parent, ast.For | ast.comprehension):
        return "iterated" if parent.iter is node else ""
    if isinstance(parent, ast.Call):
        return "argument"
    if isinstance(parent, ast.Return | ast.Yield):
        return "returned"
    if isinstance(parent, ast.Assign | ast.AugAssign):
        return "assigned"
    if isinstance(parent, ast.Compare):
        return "compared"
    return "operand" if isinstance(parent, ast.BinOp) else ""


def _holds(whole: ast.AST, part: ast.AST) -> bool:
    return any(node is part for node in ast.walk(whole))


_HOLDERS = (ast.Assign, ast.Return, ast.AugAssign, ast.Compare, ast.BinOp, ast.Call, ast.For)
