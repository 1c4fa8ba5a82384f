"""Changes of whole statements: moved, left out, repeated elsewhere, made to return something else."""

from __future__ import annotations

import ast
import itertools
import textwrap
from collections.abc import Iterator

from worldfork.rollout.mutation.module import Change
from worldfork.rollout.mutation.scope import Scope

MAX_DONORS = 16
"""Statements of one function that may be repeated elsewhere in it."""


def returns(scope: Scope) -> Iterator[Change]:
    """Another value returned."""
    for statement in scope.statements:
        if not isinstance(statement, ast.Return | ast.Expr) or statement.value is None:
            continue
        value = statement.value
        if isinstance(statement, ast.Expr):
            if not isinstance(value, ast.Yield) or value.value is None:
                continue
            value = value.value
        mine = ast.unparse(value)
        for name in scope.names:
            if name != mine and "function" not in scope.kinds.get(name, ()):
                yield scope.module.replaced("return", value, name, 1.0)
                if isinstance(value, ast.List) and not value.elts:
                    yield scope.module.replaced("return", value, f"[{name}]", 1.0)
        if isinstance(value, ast.Constant) and isinstance(value.value, bool):
            for test in _comparisons(scope):
                yield scope.module.replaced("return", value, test, 1.0)


def moves(scope: Scope) -> Iterator[Change]:
    """Two neighbours exchanged; the last statement of a block moved out of it, the next one into it."""
    for block in _blocks(scope):
        for first, second in itertools.pairwise(block):
            spans = scope.module.line_span(first), scope.module.line_span(second)
            if spans[0] is None or spans[1] is None or spans[0][1] != spans[1][0]:
                continue
            texts = [scope.module.text[slice(*span)] for span in spans if span]
            texts = [text if text.endswith("\n") else text + "\n" for text in texts]
            if not isinstance(first, _LEAVING) and not isinstance(second, _LEAVING):
                yield Change("move", 1.0, spans[0][0], spans[1][1], texts[1] + texts[0])
            yield from _in_and_out(scope, first, second, spans[0], spans[1])


def removals(scope: Scope) -> Iterator[Change]:
    """A statement left out."""
    for block in _blocks(scope):
        for statement in block:
            span = scope.module.line_span(statement)
            if span is None or isinstance(statement, ast.Return | ast.FunctionDef | ast.ClassDef | ast.Pass):
                continue
            text = "" if len(block) > 1 else f"{_indentation(scope, statement)}pass\n"
            yield Change("removal", 0.5 if isinstance(statement, _COMPOUND) else 1.0, *span, text)


def insertions(scope: Scope) -> Iterator[Change]:
    """A short statement put in once more elsewhere, some of them with another name in it."""
    donors = _donors(scope)
    for block in _blocks(scope):
        for position, statement in enumerate(block):
            span = scope.module.line_span(statement)
            if span is None:
                continue
            mine, indentation = ast.unparse(statement), _indentation(scope, statement)
            places = [(span[0], 1.0)]
            if position == len(block) - 1 and not isinstance(statement, _LEAVING):
                places.append((span[1], 1.5))
            for offset, weight in places:
                lead = "" if offset == 0 or scope.module.text[offset - 1] == "\n" else "\n"
                for text, liking in donors:
                    if text != mine:
                        yield Change("insertion", weight * liking, offset, offset, f"{lead}{indentation}{text}\n")


def targets(scope: Scope) -> Iterator[Change]:
    """A value assigned to another name."""
    for statement in scope.statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            for name in scope.names:
                if name != statement.targets[0].id and scope.may_stand_for(statement.targets[0].id, name):
                    yield Change("target", 1.0, *scope.module.span(statement.targets[0]), name)


def _in_and_out(
    scope: Scope, first: ast.stmt, second: ast.stmt, span: tuple[int, int], next_span: tuple[int, int]
) -> Iterator[Change]:
    body = _inner(first)
    if body and len(body) > 1:
        last = scope.module.line_span(body[-1])
        if last is not None and last[1] == span[1]:
            text = textwrap.dedent(scope.module.text[slice(*last)])
            moved = textwrap.indent(text, _indentation(scope, first))
            yield Change("move", 1.0, *last, moved)
    if body and not isinstance(second, _COMPOUND):
        text = textwrap.dedent(scope.module.text[slice(*next_span)])
        yield Change("move", 0.7, *next_span, textwrap.indent(text, _indentation(scope, body[-1])))


def _donors(scope: Scope) -> list[tuple[str, float]]:
    """Return short statements with how likely each is missed elsewhere."""
    found: dict[str, float] = {}
    for statement in scope.statements:
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr) and len(ast.unparse(statement)) <= 60:
            found.setdefault(ast.unparse(statement), 1.0)
    sequences = [name for name in scope.names if "sequence" in scope.kinds[name]]
    methods = {
        node.attr
        for node in scope.expressions
        if isinstance(node, ast.Attribute) and scope.is_called(node) and node.attr in ("append", "add", "push")
    }
    others = [name for name in scope.names if "function" not in scope.kinds[name]]
    # What is looked into and never filled is where something is missed.
    filled = {
        node.value.id
        for node in scope.expressions
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and scope.is_called(node)
    }
    for name in sequences:
        for method in sorted(methods) or ["append", "add"]:
            for other in others:
                if other != name:
                    found.setdefault(f"{name}.{method}({other})", 1.0 if name not in filled else 0.3)
    for name in scope.names:
        for other in others:
            if name != other and scope.loads[name] and name in scope.assigned and scope.may_stand_for(name, other):
                found.setdefault(f"{name} = {other}", 0.5)
    return sorted(found.items(), key=lambda each: -each[1])[:MAX_DONORS]


def _comparisons(scope: Scope) -> list[str]:
    """Return simple truths about the function's values."""
    texts = []
    for name in scope.names:
        kinds = scope.kinds.get(name, frozenset())
        if "function" not in kinds:
            texts += [f"not {name}", f"{name} == 0"] if "sequence" not in kinds else [f"not {name}"]
    return texts


def _blocks(scope: Scope) -> Iterator[list[ast.stmt]]:
    known = frozenset(scope.statements)
    for node in [scope.function, *scope.nodes]:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                kept = [each for each in block if each in known]
                if kept:
                    yield kept


def _inner(statement: ast.stmt) -> list[ast.stmt]:
    if isinstance(statement, ast.For | ast.While | ast.If | ast.With):
        return getattr(statement, "orelse", []) or statement.body
    return []


def _indentation(scope: Scope, statement: ast.stmt) -> str:
    start = scope.module.span(statement)[0]
    return scope.module.text[scope.module.text.rfind("\n", 0, start) + 1 : start]


_COMPOUND = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)
