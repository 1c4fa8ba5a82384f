"""Changes of one expression: operators, numbers, names, arguments, conditions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from worldfork.rollout.mutation.module import Change, altered
from worldfork.rollout.mutation.scope import Scope

_COMPARED: dict[type[ast.cmpop], tuple[tuple[type[ast.cmpop], float], ...]] = {
    ast.Lt: ((ast.LtE, 4), (ast.Gt, 3), (ast.GtE, 1), (ast.NotEq, 0.5)),
    ast.LtE: ((ast.Lt, 4), (ast.GtE, 3), (ast.Gt, 1), (ast.NotEq, 0.5)),
    ast.Gt: ((ast.GtE, 4), (ast.Lt, 3), (ast.LtE, 1), (ast.NotEq, 0.5)),
    ast.GtE: ((ast.Gt, 4), (ast.LtE, 3), (ast.Lt, 1), (ast.NotEq, 0.5)),
    ast.Eq: ((ast.NotEq, 3), (ast.LtE, 1.5), (ast.GtE, 1.5)),
    ast.NotEq: ((ast.Eq, 3), (ast.Lt, 1.5), (ast.Gt, 1.5)),
    ast.In: ((ast.NotIn, 3),),
    ast.NotIn: ((ast.In, 3),),
    ast.Is: ((ast.IsNot, 3), (ast.Eq, 1)),
    ast.IsNot: ((ast.Is, 3), (ast.NotEq, 1)),
}
_OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add, ast.Pow, ast.FloorDiv),
    ast.Div: (ast.FloorDiv, ast.Mult),
    ast.FloorDiv: (ast.Div, ast.Mod, ast.Mult),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr, ast.BitXor),
    ast.BitOr: (ast.BitAnd, ast.BitXor),
    ast.BitXor: (ast.BitAnd, ast.BitOr),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
}
_SIBLINGS = (
    ("min", "max"), ("any", "all"), ("append", "extend"), ("append", "add"), ("sorted", "reversed"), ("pop", "popleft"),
    ("append", "appendleft"), ("lower", "upper"), ("startswith", "endswith"), ("lstrip", "rstrip"), ("find", "rfind"),
    ("update", "add"), ("floor", "ceil"), ("int", "round"), ("keys", "values"), ("values", "items"), ("first", "last"),
    ("split", "rsplit"), ("index", "rindex"), ("remove", "discard"), ("head", "tail"), ("left", "right"),
)  # fmt: skip


def comparisons(scope: Scope) -> Iterator[Change]:
    """Another comparison operator."""
    for node in scope.expressions:
        if isinstance(node, ast.Compare):
            for place, operator in enumerate(node.ops):
                for other, weight in _COMPARED[type(operator)]:
                    ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                    yield scope.module.replaced("comparison", node, altered(node, ops=ops), weight)


def operators(scope: Scope) -> Iterator[Change]:
    """Another arithmetic operator, also of `x += y`; an operand where both were."""
    for node in scope.expressions:
        if isinstance(node, ast.BinOp):
            for other in _OPERATORS.get(type(node.op), ()):
                yield scope.module.replaced("operator", node, altered(node, op=other()))
            if not isinstance(node.op, ast.Add | ast.Mult) or not _is_constant(node.right):
                yield scope.module.replaced("operator", node, altered(node, left=node.right, right=node.left), 0.7)
            for side in (node.left, node.right):
                if not isinstance(side, ast.Constant):
                    yield scope.module.replaced("operand", node, side)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield scope.module.replaced("operator", node, node.operand, 0.5)
    for statement in scope.statements:
        if isinstance(statement, ast.AugAssign):
            target, value = ast.unparse(statement.target), ast.unparse(statement.value)
            start, end = scope.module.span(statement)
            for other in _OPERATORS.get(type(statement.op), ()):
                new = ast.AugAssign(ast.Name(target), other(), ast.Name(value))
                yield Change("operator", 1.5, start, end, ast.unparse(new))
            yield Change("operator", 0.5, start, end, f"{target} = {value}")


def off_by_one(scope: Scope) -> Iterator[Change]:
    """One added, taken away or left out where something is counted."""
    for node in scope.expressions:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            one, rest = (node.right, node.left) if _is_one(node.right) else (node.left, node.right)
            if _is_one(one):
                yield scope.module.replaced("off_by_one", node, rest, 3)
                other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
                yield scope.module.replaced("off_by_one", node, altered(node, op=other), 1.5)
                continue
        weight = _counting(scope, node)
        if weight:
            for sign, one_more in ((ast.Add(), 1.2), (ast.Sub(), 1.0)):
                new = ast.BinOp(node, sign, ast.Constant(1))
                yield scope.module.replaced("off_by_one", node, new, weight * one_more)


def constants(scope: Scope) -> Iterator[Change]:
    """Another number, truth value or empty thing."""
    for node in scope.expressions:
        if isinstance(node, ast.Constant):
            for value, weight in _other_constants(node.value):
                yield scope.module.replaced("constant", node, ast.Constant(value), weight)
            if node.value is None:
                yield scope.module.replaced("constant", node, "[]", 0.5)
            if not isinstance(node.value, str | bytes | bool | None):
                for name in scope.names:
                    if "number" in scope.kinds.get(name, ()):
                        yield scope.module.replaced("constant", node, name, 0.5)
        elif isinstance(node, ast.List | ast.Tuple):
            if not node.elts:
                yield scope.module.replaced("constant", node, "[[]]", 1.5)
                for name in scope.names:
                    if "number" not in scope.kinds.get(name, ()):
                        yield scope.module.replaced("constant", node, f"[{name}]", 1)
            elif len(node.elts) > 1:
                for place in range(len(node.elts) - 1):
                    elts = list(node.elts)
                    elts[place : place + 2] = reversed(elts[place : place + 2])
                    yield scope.module.replaced("swap", node, altered(node, elts=elts), 0.7)


def names(scope: Scope) -> Iterator[Change]:
    """Another name of the function where a name is read."""
    read_least = min((scope.loads[name] for name in scope.names), default=0)
    for node in scope.expressions:
        if isinstance(node, ast.Name) and not scope.is_called(node) and node.id in scope.names:
            for other in scope.names:
                if other != node.id and scope.may_stand_for(node.id, other):
                    # What is hardly read where it is made is often what was meant.
                    weight = 2.0 if scope.loads[other] == read_least else 1.0
                    told = scope.kinds[node.id] & scope.kinds.get(other, frozenset())
                    yield scope.module.replaced("name", node, other, weight * (1.5 if told else 1.0))


def arguments(scope: Scope) -> Iterator[Change]:
    """Two arguments exchanged, one left out, one more."""
    for node in scope.expressions:
        if not isinstance(node, ast.Call):
            continue
        own = isinstance(node.func, ast.Name) and node.func.id in (scope.function.name, *scope.names)
        for place in range(len(node.args) - 1):
            args = list(node.args)
            args[place : place + 2] = reversed(args[place : place + 2])
            weight = 3.0 if own or not isinstance(node.func, ast.Name) else 1.0
            yield scope.module.replaced("swap", node, altered(node, args=args), weight)
        for other in range(2, len(node.args)):
            args = list(node.args)
            args[0], args[other] = args[other], args[0]
            yield scope.module.replaced("swap", node, altered(node, args=args), 0.7)
        if not own and len(node.args) + len(node.keywords) > 1 and node.args:
            yield scope.module.replaced("arguments", node, altered(node, args=node.args[:-1]))


def callees(scope: Scope) -> Iterator[Change]:
    """Another function or method with a meaning next to it."""
    for node in scope.expressions:
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            word = node.func.id
            for other in _siblings(word):
                if scope.knows(other):
                    yield scope.module.replaced("callee", node.func, other, 2)
            if len(node.args) == 1 and not node.keywords and word != scope.function.name:
                yield scope.module.replaced("callee", node, node.args[0], 0.7)
        elif isinstance(node.func, ast.Attribute):
            for other in _siblings(node.func.attr):
                yield scope.module.replaced("callee", node.func, altered(node.func, attr=other))


def attributes(scope: Scope) -> Iterator[Change]:
    """Another attribute, one left out, one more."""
    for node in scope.expressions:
        if isinstance(node, ast.Attribute) and not scope.is_called(node):
            for other in scope.attributes:
                if other != node.attr:
                    yield scope.module.replaced("attribute", node, altered(node, attr=other))
            yield scope.module.replaced("attribute", node, node.value, 0.5)
        elif (
            isinstance(node, ast.Name)
            and "object" in scope.kinds.get(node.id, ())
            and not isinstance(scope.module.parents.get(node), ast.Attribute)
        ):
            for other in scope.attributes:
                yield scope.module.replaced("attribute", node, ast.Attribute(node, other))


def slices(scope: Scope) -> Iterator[Change]:
    """A part of a sequence where all of it was, all of it where a part was, another part."""
    for node in scope.expressions:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            yield scope.module.replaced("slice", node, node.value)
            if node.slice.lower is not None and node.slice.upper is None:
                swapped = ast.Slice(None, node.slice.lower, node.slice.step)
                yield scope.module.replaced("slice", node, altered(node, slice=swapped))
            elif node.slice.upper is not None and node.slice.lower is None:
                swapped = ast.Slice(node.slice.upper, None, node.slice.step)
                yield scope.module.replaced("slice", node, altered(node, slice=swapped))
        elif isinstance(node, ast.Name) and scope.kinds.get(node.id, frozenset()) == {"sequence"}:
            parent = scope.module.parents.get(node)
            if isinstance(parent, ast.For | ast.comprehension | ast.Call):
                weight = 1.0 if isinstance(parent, ast.For | ast.comprehension) else 0.3
                for part in ("1:", ":-1", *(f"{name}:" for name in scope.names if _counts(scope, name))):
                    yield scope.module.replaced("slice", node, f"{node.id}[{part}]", weight)


def _counting(scope: Scope, node: ast.expr) -> float:
    """Return how likely it is that an expression is a number that is one off; 0 where it is none."""
    if isinstance(node, ast.Constant | ast.Compare | ast.BoolOp | ast.Lambda | ast.List | ast.Tuple | ast.Dict):
        return 0.0
    parent = scope.module.parents.get(node)
    number = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Mult | ast.FloorDiv | ast.Add)
    if isinstance(node, ast.Name):
        if scope.is_called(node):
            return 0.0
        number = "number" in scope.kinds.get(node.id, ())
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        number = node.func.id in ("len", "max", "min", "sum", "abs", "int", scope.function.name)
    if isinstance(node, ast.BinOp) and any(isinstance(side, ast.List | ast.Tuple) for side in (node.left, node.right)):
        return 0.0
    if isinstance(parent, ast.Slice):
        return 1.5
    if isinstance(parent, ast.Subscript):
        return 1.0 if parent.slice is node and number else 0.0
    if not number:
        return 0.0
    if isinstance(parent, ast.Call):
        return 2.0 if isinstance(parent.func, ast.Name) and parent.func.id == "range" else 1.2
    return 0.8 if isinstance(parent, ast.Return | ast.Assign | ast.Compare | ast.AugAssign) else 0.2


def _counts(scope: Scope, name: str) -> bool:
    return scope.is_number(name) and name in [one.arg for one in scope.function.args.args]


def _other_constants(value: object) -> list[tuple[int | float | str, float]]:
    if isinstance(value, bool):
        return [(not value, 2.0)]
    if isinstance(value, int):
        near = (value + 1, value - 1)
        far = [other for other in (0, 1, -value) if other not in (value, *near)]
        return [*((other, 2.0) for other in near), *((other, 1.0) for other in far)]
    if isinstance(value, float):
        return [(-value, 0.5), (value + 1, 0.5), (value - 1, 0.5)]
    if value == "":
        return [(" ", 0.5)]
    return []


def _siblings(word: str) -> list[str]:
    return [other for pair in _SIBLINGS if word in pair for other in pair if other != word]


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1 and not isinstance(node.value, bool)


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)
