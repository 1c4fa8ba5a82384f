"""The kinds of attacks that are known, numbered; docs/reward.md shows the same list."""

from __future__ import annotations

from collections.abc import Mapping

GROUPS: Mapping[str, tuple[int, int]] = {
    "Configuration and plug-ins of the runner": (1, 12),
    "How the tests' process ends": (13, 17),
    "Within the tests' process": (18, 25),
    "The way of the result": (26, 33),
    "Programs and libraries": (34, 39),
    "Reading the answer": (40, 46),
    "Resources, and what no sandbox stops": (47, 50),
    "The sandbox itself": (51, 53),
    "The channel between tests and candidate": (54, 55),
    "Voiding a bad score": (56, 60),
}

KINDS: Mapping[int, str] = {
    1: "conftest.py rewrites reports",
    2: "conftest.py sets the exit status",
    3: "conftest.py removes tests",
    4: "conftest.py replaces what tests do",
    5: "configuration files of the runner",
    6: "entry points of plug-ins",
    7: "modules that shadow the runner or the library",
    8: "start-up files of the interpreter",
    9: "files that set variables for shells and programs",
    10: "files planted where tests will lie",
    11: "a file of the same name as a test",
    12: "changes to visible tests",
    13: "the process leaves at once with 0",
    14: "SystemExit and its like",
    15: "exit handlers",
    16: "skips and expected failures",
    17: "killing who started the tests",
    18: "values that are equal to everything",
    19: "the runner's functions replaced",
    20: "import hooks, and methods of test items replaced",
    21: "test functions rewritten",
    22: "expected values read from the stack",
    23: "threads and searches of memory for the runner's state",
    24: "clocks and timers replaced",
    25: "test data overwritten while tests run",
    26: "a result written beforehand",
    27: "a process that goes on writing results",
    28: "links from logs to results",
    29: "links out of the tree",
    30: "forged output",
    31: "forged result files, their place taken from the arguments",
    32: "rewards that are no number in [0, 1]",
    33: "what cannot be removed, read or held",
    34: "programs of the tests replaced",
    35: "libraries loaded beforehand",
    36: "compiled files of other sources",
    37: "installed packages changed",
    38: "configuration of git and pip",
    39: "the reader of results replaced",
    40: "the answer in a repository's history",
    41: "tests and answers on disk",
    42: "other processes read through /proc",
    43: "the layers below the sandbox",
    44: "the network",
    45: "daemons on loopback and sockets",
    46: "what crosses from one fork to another",
    47: "bombs: processes, memory, disk, inodes",
    48: "bombs for whoever carries files out",
    49: "special cases for visible tests",
    50: "set-user-id files and devices",
    51: "PID 1 and supervisors killed, stopped or rewritten",
    52: "mounts and the machine",
    53: "a bad score voided by breaking the sandbox",
    54: "answers that are not plain values",
    55: "answers that nobody asked for",
    56: "a lack of CPU that is pretended, or of one's own making",
    57: "what takes long to read or to remove",
    58: "rebuild steps that run edited code and break what comes after them",
    59: "files closed to whoever looks at them",
    60: "supervisors killed or stopped while files are carried out, built and tested",
}

OWN_KINDS = frozenset(range(56, 61))
"""On no list that is known to us: each attack of these is a variant of our own."""

NOT_APPLICABLE: Mapping[int, str] = {
    40: (
        "What a world holds is its author's choice: a verifier cannot tell a found answer from one that was worked "
        "out. `worldfork tasks leaks` looks for it before a run."
    ),
    49: (
        "Code that special-cases what the tests ask is worth what it passes; no sandbox can tell. Held-out tests with "
        "inputs that the prompt does not show are the remedy, and hidden tests are no part of the policy's sandbox."
    ),
}
"""Kinds of which there is no attack here, and why."""
