"""The choice for tasks that name no verifier: split where that is proven, else pytest."""

from __future__ import annotations

from dataclasses import replace

from worldfork.reward.pytest_verifier import PytestVerifier
from worldfork.reward.split.verifier import SplitVerifier
from worldfork.reward.verifier import FRESH, Case, Grade


class AutomaticVerifier:
    """Grades each task by the stronger of two verifiers that gives its reference the same ids. One for a whole run."""

    def __init__(self, by_pytest: PytestVerifier, by_split: SplitVerifier) -> None:
        self._pytest = by_pytest
        self._split = by_split

    @property
    def verifier_id(self) -> str:
        """`auto`, with the ids of both."""
        return f"auto:{self._split.verifier_id}:{self._pytest.verifier_id}"

    @property
    def trust(self) -> str:
        """`fresh`."""
        return FRESH

    @property
    def needs_end(self) -> bool:
        """Never."""
        return False

    async def choose(self, case: Case) -> SplitVerifier | PytestVerifier:
        """Return the one that grades this task.

        Raises:
            As `grade`.
        """
        proof = await self._split.prove(case.task, case.start)
        return self._split if proof.capable else self._pytest

    async def grade(self, case: Case) -> Grade:
        """Say what a final state is worth; `judged_by` tells which of the two says it.

        Raises:
            VerifierError: it could not be judged. SandboxError, StoreError, ForkError: a fork could not be made or
                written to.
        """
        chosen = await self.choose(case)
        return replace(await chosen.grade(case), judged_by=chosen.verifier_id)

    async def grade_nothing(self, case: Case) -> Grade:
        """Give 0 to a policy that left nothing to be looked at.

        Raises:
            As `grade`.
        """
        return await self._pytest.grade_nothing(case)
