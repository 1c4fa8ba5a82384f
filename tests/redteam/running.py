"""Running one attack: its policy acts in a rollout, and every verifier grades what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.redteam.judges import Judge, Panel
from tests.redteam.records import Attack, Verdict, Way
from tests.redteam.tasks import SOLUTION, TASKS, WRONG

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import Episode
from worldfork.records.task import Task
from worldfork.reward.places import inside_task
from worldfork.rollout.attempt import Setting, Which
from worldfork.rollout.rollout import run_rollout
from worldfork.rollout.starts import StartingStates


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
    def broken(self) -> bool:
        """Whether a claim was wrong."""
        return self.attack.claim(self.verifier).verdict is Verdict.RESISTS and not self.held

    def __str__(self) -> str:
        return f"{self.attack.name} before {self.verifier}: {self.reward} against {self.alone} {self.note}"


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


@dataclass
class Arena:
    """The tasks' starting states and the verifiers, for one attack after the other."""

    states: StartingStates
    judges: Mapping[str, Judge]
    _alone: dict[str, dict[str, float]] = field(default_factory=dict)

    async def attack(self, attack: Attack) -> list[Tried]:
        """Run an attack before every verifier to which it applies."""
        names = [name for name in self.judges if attack.claim(name).verdict is not Verdict.NOT]
        alone = await self.alone(attack)
        panel = await self._roll(attack, names)
        return [
            Tried(
                attack,
                name,
                None if name not in panel.grades else panel.grades[name].reward,
                alone[name],
                panel.faults.get(name, ""),
            )
            for name in names
        ]

    async def alone(self, attack: Attack) -> dict[str, float]:
        """Return what an attack's wrong code is worth by itself before each verifier."""
        code = dict(WRONG if attack.wrong is None else attack.wrong)
        key = repr((attack.task, sorted(code.items())))
        if key not in self._alone:
            plain = replace(attack, name="alone", files=code, commands=())
            panel = await self._roll(plain, list(self.judges))
            if panel.faults:
                raise AssertionError(f"the wrong code alone could not be graded: {panel.faults}")
            self._alone[key] = {name: grade.reward for name, grade in panel.grades.items()}
        return self._alone[key]

    async def right(self, task: str) -> dict[str, float | None]:
        """Return what the correct solution is worth before each verifier."""
        correct = Attack("right", 0, "", Way.BESIDE, dict(SOLUTION), task=task)
        panel = await self._roll(correct, list(self.judges))
        return {name: panel.grades[name].reward if name in panel.grades else None for name in self.judges}

    async def _roll(self, attack: Attack, names: list[str]) -> Panel:
        task = TASKS[attack.task]
        panel = Panel({name: self.judges[name] for name in names})
        policy = Acting(attack)
        start = await self.states.get(task)
        episode = (await run_rollout(Which(task, policy.policy_id, 0), policy, Setting(start, panel))).episode
        for name in names:
            if name not in panel.grades and name not in panel.faults:
                panel.faults[name] = _why(episode)
        return panel


def _why(episode: Episode) -> str:
    return f"{episode.failure.kind.value}: {episode.failure.message}" if episode.failure else episode.policy_end
