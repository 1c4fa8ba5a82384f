"""The text of a Python module with its syntax tree, and changes of it that leave the rest of the text alone."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

MAX_MODULE_CHARACTERS = 400_000
"""A larger module is not changed: its syntax tree would take too long to walk."""


@dataclass(frozen=True)
class Change:
    """One replacement in a text."""

    family: str
    """What kind of defect it would repair; see `families`."""
    weight: float
    """How likely it is against others of its family."""
    start: int
    """Offset in characters."""
    end: int
    text: str

    def apply(self, source: str) -> str:
        """Return the text with the replacement made."""
        return source[: self.start] + self.text + source[self.end :]


class Module:
    """A module that parses.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it does not, or has lines that end in the old way of Macs.
    """

    def __init__(self, text: str) -> None:
        if _LONE_RETURN.search(text):
            # The parser takes it for the end of a line, and nobody else does.
            raise ValueError("a carriage return by itself")
        self.text = text
        self.tree = ast.parse(text)
        self._starts = [0]
        # Not by `splitlines`: the parser knows fewer ends of a line.
        for line in text.split("\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        self.parents: dict[ast.AST, ast.AST] = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function that is in no other function."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        return [node for node in found if not any(isinstance(one, _FUNCTIONS) for one in self.above(node))]

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node is in, from the nearest outwards."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where a node's text begins and ends, in characters."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def line_span(self, node: ast.stmt) -> tuple[int, int] | None:
        """Return the offsets of the whole lines of a statement without its decorators; None where it shares them."""
        start, end = self.span(node)
        begin = self.text.rfind("\n", 0, start) + 1
        after = self.text.find("\n", end)
        finish = len(self.text) if after < 0 else after + 1
        rest = self.text[end:finish].strip()
        if self.text[begin:start].strip() or (rest and not rest.startswith("#")):
            return None
        return begin, finish

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """Return a node's text."""
        start, end = self.span(node)
        return self.text[start:end]

    def replaced(self, family: str, node: ast.expr, new: ast.expr | str, weight: float = 1.0) -> Change:
        """Return the change that puts one expression in the place of another."""
        if isinstance(new, str):
            new = ast.parse(new, mode="eval").body
        text = ast.unparse(new)
        if (not isinstance(new, _CLOSED) and self._is_bound(node)) or self._holds_the_call(node):
            text = f"({text})"
        return Change(family, weight, *self.span(node), text)

    def _is_bound(self, node: ast.expr) -> bool:
        """Tell whether a node's neighbours could bind a part of it more tightly than the rest of it does."""
        parent = self.parents.get(node)
        if isinstance(parent, ast.Subscript | ast.Attribute):
            return parent.value is node
        if isinstance(parent, ast.Call):
            return parent.func is node
        return isinstance(parent, _BINDING)

    def _holds_the_call(self, node: ast.expr) -> bool:
        """Tell whether a node's text has the parentheses of the call that it is the argument of."""
        call = self.parents.get(node)
        return (
            isinstance(node, ast.GeneratorExp)
            and isinstance(call, ast.Call)
            and self.span(node)[1] == self.span(call)[1]
        )

    def _offset(self, line: int, column_bytes: int) -> int:
        start = self._starts[line - 1]
        text = self.text[start : self._starts[line]]
        if text.isascii():
            return start + column_bytes
        return start + len(text.encode("utf-8")[:column_bytes].decode("utf-8", "ignore"))


def altered(node: ast.expr, **fields: object) -> ast.expr:
    """Return a copy of an expression with some of its fields replaced."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


_LONE_RETURN = re.compile("\r(?!\n)")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CLOSED = (
    ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.List, ast.Dict, ast.Set, ast.ListComp,
    ast.SetComp, ast.DictComp,
)  # fmt: skip
"""What needs no parentheses anywhere."""
_BINDING = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Starred, ast.Await, ast.IfExp, ast.FormattedValue)
