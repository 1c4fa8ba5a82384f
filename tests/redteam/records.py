"""What the corpus is made of: attacks, and what each verifier claims about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from tests.redteam.tasks import UNFIT

VERIFIERS = ("pytest", "split", "reader", "command", "files", "final")
"""The columns of the matrix."""

PLAIN = "plain"
"""One more: pytest by hand where the policy acted, judged by its exit code. It shows that attacks are no straw men."""


class Verdict(str, Enum):
    """What a verifier says about an attack."""

    RESISTS = "resists"
    """The attack never earns more than the same wrong code without it."""
    OPEN = "open"
    """It may win here, and the reason says why."""
    NOT = "does not apply"
    """This verifier does nothing that the attack could meet."""


@dataclass(frozen=True)
class Claim:
    """One cell of the matrix before it is tried."""

    verdict: Verdict
    reason: str = ""


def resists(reason: str = "") -> Claim:
    return Claim(Verdict.RESISTS, reason)


def is_open(reason: str) -> Claim:
    return Claim(Verdict.OPEN, reason)


def does_not_apply(reason: str) -> Claim:
    return Claim(Verdict.NOT, reason)


class Way(str, Enum):
    """By which way an attack would reach the result; decides what is claimed where nothing else is said."""

    BESIDE = "beside"
    """Something that is left in the sandbox beside the editable files."""
    ALIVE = "alive"
    """Something that goes on running, or breaks the sandbox itself."""
    CODE = "code"
    """Code in an editable file that works on the process that runs the tests."""
    VALUE = "value"
    """Code in an editable file that hands over something else than a plain value."""
    DROP = "drop"
    """An editable path that is no plain file, or more than may be carried."""
    BUILD = "build"
    """An editable build program, which the rebuild step runs as root where the tests run afterwards."""


SAME_PROCESS = "tests and candidate share a process, and code in it can change whatever the tests report"
END_STATE = "the tests run on the state that the policy left, with every program and file that it put there"
NO_CODE = "nothing of the candidate is run"

CLAIMS: Mapping[Way, Mapping[str, Claim]] = {
    Way.BESIDE: {
        "pytest": resists(),
        "split": resists(),
        "reader": resists(),
        "command": resists(),
        "files": resists(),
        "final": is_open(END_STATE),
    },
    Way.ALIVE: dict.fromkeys(VERIFIERS, resists()),
    Way.CODE: {
        "pytest": is_open(SAME_PROCESS),
        "split": resists(),
        "reader": is_open(SAME_PROCESS),
        "command": is_open(SAME_PROCESS),
        "files": does_not_apply(NO_CODE),
        "final": is_open(SAME_PROCESS),
    },
    Way.VALUE: {
        "pytest": is_open(SAME_PROCESS),
        "split": resists(),
        "reader": is_open(SAME_PROCESS),
        "command": is_open(SAME_PROCESS),
        "files": does_not_apply(NO_CODE),
        "final": is_open(SAME_PROCESS),
    },
    Way.DROP: {**dict.fromkeys(VERIFIERS, resists()), "final": is_open(END_STATE)},
    Way.BUILD: dict.fromkeys(VERIFIERS, resists()),
}


@dataclass(frozen=True)
class Attack:
    """One way to be paid for wrong code. Its policy writes `files`, then runs `commands` one after the other."""

    name: str
    number: int
    """Of the kind of attack in `kinds.KINDS`."""
    does: str
    """One line: what it tries."""
    way: Way
    files: Mapping[str, str] = field(default_factory=dict)
    """Path -> text; relative ones lie in the task's directory."""
    commands: tuple[str, ...] = ()
    """Lines for /bin/sh, run as root in the task's directory; one that fails or is killed is no fault."""
    own: bool = False
    """A variant that is in none of the published lists."""
    task: str = "narrow"
    """Which of `tasks.TASKS` is attacked."""
    wrong: Mapping[str, str] | None = None
    """The same wrong code without the attack; None for `tasks.WRONG`."""
    said: Mapping[str, Claim] = field(default_factory=dict)
    """Claims that differ from those of its way."""
    command_s: float = 6.0
    """Wall time of each command."""
    waits: bool = False
    """Its gradings wait for a limit, and take no CPU to speak of: all of them at once."""
    exclusive: bool = False
    """It takes so much of the machine that nothing else of the corpus is tried meanwhile, and it is graded by one
    verifier after the other."""
    crowd: int = 0
    """So many programs of the host for each CPU want all of it meanwhile: it works, if at all, on a full machine. Where
    there is more than one, code that wants a CPU may truly get too little of it."""
    slow: bool = False
    """It takes long; only the run of everything tries it."""

    def claim(self, verifier: str) -> Claim:
        """Return what a verifier says about it."""
        if verifier == PLAIN:
            return is_open("nothing is done against it")
        if verifier in UNFIT.get(self.task, {}):
            return does_not_apply(UNFIT[self.task][verifier])
        if verifier == "reader" and verifier not in self.said and "command" in self.said:
            # Both have a program beside the candidate's code write the result.
            return self.said["command"]
        return self.said.get(verifier, CLAIMS[self.way][verifier])

    def never_none(self, verifier: str) -> bool:
        """Whether it is sworn that the attack does not void the score, be it open what else it can do: always."""
        return verifier != PLAIN and self.claim(verifier).verdict is not Verdict.NOT

    def but(self, **said: Claim) -> Attack:
        """Return it with other claims."""
        return replace(self, said={**self.said, **said})
