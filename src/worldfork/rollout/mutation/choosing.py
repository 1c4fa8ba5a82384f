"""Which change comes first: a seeded order in which no program comes twice."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import itertools
import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache

from worldfork.rollout.mutation import conditions, expressions, statements
from worldfork.rollout.mutation.module import MAX_MODULE_CHARACTERS, Change, Module
from worldfork.rollout.mutation.scope import Scope

MUTATION_VERSION = 2
"""Part of a policy's id: another version may make other programs of the same seed."""

MAX_CHANGES = 10_000
"""About so many single changes of one program are looked at; in a larger one the seed decides in which functions."""

MAX_OF_A_KIND = 3000
"""So many of one kind in one function, the first ones."""

_TWO_AT_ONCE_EVERY = 16
"""One program in so many has two changes."""

_BOLDNESS = 2.0
"""Above 1 the likely changes come earlier than their shares say, below 1 later."""

_MAX_TRIES = 200
"""Pairs of changes that are tried for one program before there is taken to be no other."""

FAMILIES: Mapping[str, float] = {
    "name": 14,
    "comparison": 13,
    "off_by_one": 14,
    "operator": 8,
    "swap": 8,
    "condition": 7,
    "wider": 7,
    "ingredient": 6,
    "constant": 6,
    "operand": 5,
    "return": 5,
    "callee": 5,
    "insertion": 6,
    "slice": 4,
    "move": 4,
    "attribute": 3,
    "wrapping": 5,
    "removal": 3,
    "target": 2,
    "arguments": 1,
}
"""How large a share of one-line defects each kind of change repairs, against the others."""

_SOURCES: tuple[Callable[[Scope], Iterator[Change]], ...] = (
    expressions.comparisons,
    expressions.operators,
    expressions.off_by_one,
    expressions.constants,
    expressions.names,
    expressions.arguments,
    expressions.callees,
    expressions.attributes,
    expressions.slices,
    conditions.conditions,
    conditions.wider_and_narrower,
    conditions.ingredients,
    conditions.wrappings,
    statements.returns,
    statements.moves,
    statements.removals,
    statements.insertions,
    statements.targets,
)


class Mutations:
    """The changed programs of one source, in an order that the seed decides.

    Args:
        source: a Python module. One that does not parse, is too large or has no function has no mutations.
        seed: any integer.
    """

    def __init__(self, source: str, seed: int) -> None:
        self.source = source
        self.seed = seed
        self._made: list[str] = []
        self._seen: set[str] = set()
        self._singles = 0
        self._pairs = 0
        self._dry = False

    def program(self, index: int) -> str:
        """Return the `index`-th changed program; the source itself where there are not so many."""
        while len(self._made) <= index and not self._dry:
            self._make_next()
        return self._made[index] if index < len(self._made) else self.source

    @cached_property
    def changes(self) -> list[Change]:
        """Every single change, in the order of the seed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = Module(self.source) if len(self.source) <= MAX_MODULE_CHARACTERS else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []
        if module is None:
            return []
        self._seen.add(_shape(self.source) or "")
        found: dict[tuple[int, int, str], Change] = {}
        for function in sorted(module.functions, key=lambda each: _chance(self.seed, "function", each.lineno)):
            scope = Scope(module, function)
            for source in _SOURCES:
                # What is nested so deeply that its text cannot be made is left alone.
                with contextlib.suppress(RecursionError):
                    for change in itertools.islice(source(scope), MAX_OF_A_KIND):
                        found.setdefault((change.start, change.end, change.text), change)
            if len(found) > MAX_CHANGES:
                break
        return _ordered(list(found.values()), self.seed)

    def _make_next(self) -> None:
        place = len(self._made)
        two = place % _TWO_AT_ONCE_EVERY == _TWO_AT_ONCE_EVERY - 1
        if self._add(self._next_pair() if two else self._next_single()):
            return
        self._dry = not self._add(self._next_single() if two else self._next_pair())

    def _add(self, program: str | None) -> bool:
        if program is None:
            return False
        self._made.append(program)
        return True

    def _next_single(self) -> str | None:
        while self._singles < len(self.changes):
            change = self.changes[self._singles]
            self._singles += 1
            program = self._new(change.apply(self.source))
            if program is not None:
                return program
        return None

    def _next_pair(self) -> str | None:
        count = len(self.changes)
        for _ in range(_MAX_TRIES if count > 1 else 0):
            self._pairs += 1
            # The order of the changes is that of their likelihood: the squares prefer what is early in it.
            places = [int(_chance(self.seed, "pair", self._pairs, side) ** 2 * count) for side in range(2)]
            first, second = sorted((self.changes[place] for place in places), key=lambda each: (each.start, each.end))
            if first.end > second.start or first == second:
                continue
            program = self._new(first.apply(second.apply(self.source)))
            if program is not None:
                return program
        return None

    def _new(self, program: str) -> str | None:
        """Return a program if it compiles and none like it came before."""
        shape = _shape(program)
        if shape is None or shape in self._seen:
            return None
        self._seen.add(shape)
        return program


def mutate(source: str, seed: int, index: int = 0) -> str:
    """Return a Python module with one small change, or two, such as repair one-line defects.

    Args:
        source: the module.
        seed: decides the order of the changes.
        index: place in that order, from 0. No two of one seed are the same program.

    Returns:
        The changed text; `source` itself where nothing in it can be changed, or not so often.
    """
    with _LOCK:
        return _mutations(source, seed).program(index)


_LOCK = threading.Lock()
"""The programs of one source are made one after the other."""


@lru_cache(maxsize=32)
def _mutations(source: str, seed: int) -> Mutations:
    return Mutations(source, seed)


def _ordered(changes: list[Change], seed: int) -> list[Change]:
    """Draw all changes without putting back, each as likely as its family's share and its own part in that say."""
    totals: dict[str, float] = defaultdict(float)
    for change in changes:
        totals[change.family] += change.weight
    keyed = []
    for change in changes:
        share = FAMILIES[change.family] * change.weight / totals[change.family]
        luck = _chance(seed, change.start, change.end, change.text)
        keyed.append((-math.log(1.0 - luck) / share**_BOLDNESS, change.start, change.end, change.text, change))
    return [each[-1] for each in sorted(keyed, key=lambda each: each[:-1])]


def _chance(*parts: object) -> float:
    """Return a number in [0, 1) that depends on the parts alone, on every machine and in every process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)


def _shape(program: str) -> str | None:
    """Return what tells two programs apart, whatever their layout; None for text that is no program."""
    try:
        with warnings.catch_warnings():
            # Whether warnings are errors here says nothing of the program, and nobody here is to read them.
            warnings.simplefilter("ignore")
            tree = ast.parse(program)
            compile(tree, "<mutation>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return hashlib.sha256(ast.dump(tree).encode("utf-8", "surrogatepass")).hexdigest()
