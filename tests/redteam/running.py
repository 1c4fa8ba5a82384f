"""Running attacks: the policy of each acts in a rollout, and every verifier grades what is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.redteam.judges import Judge, Panel
from tests.redteam.records import PLAIN, Attack, Verdict, Way
from tests.redteam.tasks import SOLUTION, TASKS, UNFIT, WRONG

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import Episode, FailureKind
from worldfork.records.task import Task
from worldfork.reward.places import inside_task
from worldfork.rollout.attempt import Setting, Which
from worldfork.rollout.rollout import run_rollout
from worldfork.rollout.starts import StartingStates

CPUS = len(os.sched_getaffinity(0))
GRADINGS = max(2, CPUS)
"""How many gradings run at a time."""
ACTING = GRADINGS + 1
"""How many attacks are under way at a time: one more acts while the others are graded."""
CALM_SHARE = 0.3
"""Of the CPUs may be used by others for a claim that is about them to be put to the test."""
CALM_S = 120.0
"""How long a campaign waits for that, all in all."""
WAITING = 12
"""The same of gradings that only wait."""
OVERLOAD = f"{FailureKind.OVERLOAD.value}: "

Rewards = dict[str, dict[str, float]]
"""What wrong code alone is worth: the code -> verifier -> reward. Found out once for a whole run."""


@dataclass(frozen=True)
class Tried:
    """What came of one attack before one verifier."""

    attack: Attack
    verifier: str
    reward: float | None
    """None where the score was void."""
    alone: float
    """What the same wrong code is worth without the attack."""
    note: str = ""

    @property
    def held(self) -> bool:
        """Whether the attack earned nothing, and voided nothing."""
        return self.reward is not None and self.reward <= self.alone

    @property
    def void(self) -> bool:
        """Whether there is no score, although it is sworn that there always is."""
        return self.reward is None and self.attack.never_none(self.verifier)

    @property
    def overpaid(self) -> bool:
        """Whether it earned more than the same wrong code, although the verifier swears that it does not."""
        sworn = self.attack.claim(self.verifier).verdict is Verdict.RESISTS
        return sworn and self.reward is not None and self.reward > self.alone

    @property
    def broken(self) -> bool:
        """Whether a claim was wrong."""
        return self.void or self.overpaid

    def __str__(self) -> str:
        return f"{self.attack.name} before {self.verifier}: {self.reward} against {self.alone} {self.note}"


@dataclass(frozen=True)
class Honest:
    """What the correct solution was worth beside an attack."""

    beside: Attack
    rewards: Mapping[str, float | None]
    notes: Mapping[str, str]

    @property
    def suffers(self) -> bool:
        """Whether it was not worth everything."""
        return set(self.rewards.values()) != {1.0}

    def __str__(self) -> str:
        return f"the correct solution beside {self.beside.name}: {dict(self.rewards)} {dict(self.notes)}"


class Acting:
    """The policy of an attack."""

    def __init__(self, attack: Attack) -> None:
        self.attack = attack
        self.policy_id = f"redteam-{attack.name}"

    async def agent(self, sandbox: AsyncSandbox, task: Task, turn: object) -> None:
        """Write the files, then run the commands."""
        for path, text in self.attack.files.items():
            await sandbox.write_file(path if path.startswith("/") else inside_task(path), text)
        for line in self.attack.commands:
            await sandbox.run("/bin/sh", ["-c", line], timeout=self.attack.command_s, max_output_bytes=1 << 20)


class Arena:
    """The tasks' starting states and the verifiers, for many attacks at once. For one event loop."""

    def __init__(self, states: StartingStates, judges: Mapping[str, Judge], alone: Rewards | None = None) -> None:
        self.states = states
        self.judges = judges
        self.seconds: dict[str, float] = {}
        """Attack -> how long it took."""
        self._alone: Rewards = {} if alone is None else alone
        self._learning: dict[str, asyncio.Lock] = {}
        self._gradings = asyncio.Semaphore(GRADINGS)
        self._waiting = asyncio.Semaphore(WAITING)

    def fit(self, task: str) -> list[str]:
        """Return the verifiers that a task can have."""
        return [name for name in self.judges if name not in UNFIT.get(task, {})]

    async def attack(self, attack: Attack, names: Iterable[str] | None = None) -> list[Tried]:
        """Run an attack before every verifier to which it applies, or those of them that are named."""
        wanted = self.judges if names is None else set(names)
        names = [name for name in self.judges if name in wanted and attack.claim(name).verdict is not Verdict.NOT]
        alone = await self.alone(attack)
        began_s = time.monotonic()
        with crowd(attack.crowd * CPUS):
            panel = await self._roll(attack, names)
        self.seconds[attack.name] = time.monotonic() - began_s
        return [
            Tried(
                attack,
                name,
                None if name in panel.faults else panel.grades[name].reward,
                alone.get(name, 0.0),
                panel.faults.get(name, " ".join(panel.again.get(name, ()))),
            )
            for name in names
        ]

    async def alone(self, attack: Attack) -> dict[str, float]:
        """Return what an attack's wrong code is worth by itself before each verifier."""
        code = dict(WRONG if attack.wrong is None else attack.wrong)
        key = repr((attack.task, sorted(code.items())))
        async with self._learning.setdefault(key, asyncio.Lock()):
            if key not in self._alone:
                plain = Attack("alone", 0, "", Way.BESIDE, code, task=attack.task)
                panel = await self._roll(plain, self.fit(attack.task))
                if panel.faults:
                    raise AssertionError(f"the wrong code alone could not be graded: {panel.faults}")
                self._alone[key] = {name: grade.reward for name, grade in panel.grades.items()}
            return self._alone[key]

    async def right(self, attack: Attack, names: Iterable[str] | None = None) -> Honest:
        """Return what the correct solution of an attack's task is worth before each verifier."""
        wanted = set(self.judges) if names is None else set(names)
        correct = Attack("right", 0, "", Way.BESIDE, dict(SOLUTION), task=attack.task)
        fit = [name for name in self.fit(attack.task) if name in wanted and name != PLAIN]
        panel = await self._roll(correct, fit)
        rewards = {name: None if name in panel.faults else panel.grades[name].reward for name in fit}
        return Honest(attack, rewards, panel.faults)

    async def _roll(self, attack: Attack, names: list[str]) -> Panel:
        task = TASKS[attack.task]
        turns = self._waiting if attack.waits else asyncio.Semaphore(1) if attack.exclusive else self._gradings
        panel = Panel({name: self.judges[name] for name in names}, turns)
        policy = Acting(attack)
        start = await self.states.get(task)
        episode = (await run_rollout(Which(task, policy.policy_id, 0), policy, Setting(start, panel))).episode
        for name in names:
            if name not in panel.grades and name not in panel.faults:
                panel.faults[name] = _why(episode)
        return panel


def _why(episode: Episode) -> str:
    return f"{episode.failure.kind.value}: {episode.failure.message}" if episode.failure else episode.policy_end


@dataclass
class Campaign:
    """Many attacks, several at a time, and the correct solution beside them."""

    arena: Arena
    before: Callable[[Attack], Iterable[str]]
    """The verifiers before which an attack is tried."""
    beside: Callable[[Attack], Iterable[str]]
    """Those before which the correct solution is tried while it goes on; asked once for each kind of attack."""
    told: Callable[[Attack, list[Tried]], None] = lambda attack, tried: None
    tried: dict[str, list[Tried]] = field(default_factory=dict)
    """Name of an attack -> what came of it."""
    honest: list[Honest] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    """Attacks that met a lack of CPU while others used this machine: whose doing that was nobody can tell."""

    async def run(self, attacks: Sequence[Attack]) -> None:
        """Try them all: first those that share the machine, then each of the others by itself."""
        firsts = {attack.number: attack for attack in reversed(attacks)}
        acting = asyncio.Semaphore(ACTING)
        waiting = asyncio.Semaphore(WAITING)

        async def one(attack: Attack) -> None:
            async with waiting if attack.waits else acting:
                await self._one(attack, attack is firsts[attack.number])

        async with asyncio.TaskGroup() as group:
            for attack in attacks:
                if not attack.exclusive:
                    group.create_task(one(attack))
        left_s = CALM_S
        # What met a full machine among the others, which they had filled, has another turn by itself.
        for attack in [each for each in attacks if each.exclusive or self._starved(each)]:
            for _ in range(2):
                left_s -= await calm(left_s)
                await self._one(attack, attack is firsts[attack.number])
                if left_s <= 0 or not self._starved(attack):
                    break
            if left_s <= 0 and self._starved(attack):
                self.untold.append(attack.name)

    def _starved(self, attack: Attack) -> bool:
        """Whether there is no score for a lack of CPU, of the attack or of the correct solution beside it."""
        beside = [each for each in self.honest if each.beside is attack]
        lacks = [note for each in beside for note in each.notes.values()]
        lacks += [each.note for each in self.tried[attack.name] if each.void]
        return any(OVERLOAD in note for note in lacks)

    async def _one(self, attack: Attack, first: bool) -> None:
        names = list(self.beside(attack)) if first else []
        async with asyncio.TaskGroup() as group:
            trying = group.create_task(self.arena.attack(attack, self.before(attack)))
            honest = group.create_task(self.arena.right(attack, names)) if names else None
        self.tried[attack.name] = trying.result()
        if honest is not None and honest.result().rewards:
            self.honest = [each for each in self.honest if each.beside is not attack] + [honest.result()]
        self.told(attack, trying.result())

    @property
    def broken(self) -> list[str]:
        """What was sworn and is not so, in words."""
        told = [tried for name, tried in self.tried.items() if name not in self.untold]
        wrong = [str(each) for tried in told for each in tried if each.broken]
        return [*wrong, *(str(each) for each in self.honest if each.suffers and each.beside.name not in self.untold)]


async def calm(longest_s: float) -> float:
    """Wait until others leave this machine's CPUs alone, or for so long; return how long it took.

    Where others take more than their share, code that wants a CPU may truly have too little, and no score is right.
    """
    began_s = time.monotonic()
    while time.monotonic() - began_s < longest_s:
        before_s, at_s = _used_s(), time.monotonic()
        await asyncio.sleep(0.5)
        if _used_s() - before_s < CALM_SHARE * CPUS * (time.monotonic() - at_s):
            break
    return time.monotonic() - began_s


def _used_s() -> float:
    """Return the CPU seconds that this machine has used, but for what it waited for disks."""
    user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def crowd(count: int) -> Iterator[None]:
    """Keep CPUs busy by programs of the host, each in a session of its own."""
    began: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            began.append(subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True))
        yield
    finally:
        for process in began:
            process.kill()
        for process in began:
            process.wait()


def sworn(attack: Attack, names: Iterable[str]) -> list[str]:
    """Return the verifiers that claim to resist an attack."""
    return [name for name in names if attack.claim(name).verdict is Verdict.RESISTS]


def others(attack: Attack, names: Iterable[str]) -> list[str]:
    """Return those that it can meet and that claim no more than never to be without a score."""
    return [name for name in names if attack.claim(name).verdict is Verdict.OPEN and attack.never_none(name)]
