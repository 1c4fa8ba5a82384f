"""The files verifier: what must be true of the files when the policy is done.

The state at the end of the policy's turn is read on the host, out of stored layers, with everything in it stopped.
Nothing of it is run, and no link in it leads out of it.

What it resists: whatever would need to run. What it does not: a file says what the policy wrote into it, so it proves a
result only where that cannot be written down without having done the work. Its episodes carry `trust: final`.
"""

from __future__ import annotations

from functools import partial

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.ids import content_id
from worldfork.core.recent import Recent
from worldfork.keeping.browse import browsing
from worldfork.keeping.with_ids import with_ids
from worldfork.lineage.place import place
from worldfork.records.task import Task
from worldfork.reward.assertions import FileCheck, FilesSpec, check_files, text_of
from worldfork.reward.calibration import Calibration
from worldfork.reward.matching import matches
from worldfork.reward.scoring import check_teaches, score_tests
from worldfork.reward.verifier import FINAL, Case, Grade
from worldfork.store.store import Store

FILES_FORMAT = 1

KEPT_BYTES = 1 << 20
"""Of names of checks that starting states pass; what was used longest ago is looked at again."""


class FilesVerifier:
    """Grades final states by looking at their files. Safe for many cases at once."""

    def __init__(self, spec: FilesSpec, clock: Clock | None = None) -> None:
        self._spec = spec
        self._clock = clock or SystemClock()
        self._untouched: Recent[frozenset[str]] = Recent(KEPT_BYTES)

    @property
    def verifier_id(self) -> str:
        """`files`, with a digest of everything that is asked."""
        return f"files:{content_id(str(FILES_FORMAT).encode(), repr(self._spec).encode())[:16]}"

    @property
    def trust(self) -> str:
        """`final`."""
        return FINAL

    @property
    def needs_end(self) -> bool:
        """Always."""
        return True

    async def grade(self, case: Case) -> Grade:
        """Say what a final state is worth: the weight of what is true of it.

        Raises:
            VerifierError: the starting state passes every check. StoreError, OutOfSpace: a layer cannot be read.
            NotFound: the state is gone.
        """
        if case.end_snapshot_id is None:
            return await self.grade_nothing(case)
        began_s = self._clock.monotonic_s()
        why = await self._failures(case.end_snapshot_id)
        names = frozenset(check.name for check in self._spec.checks)
        passed = names - why.keys()
        calibration = await self._calibration(case.task, case.start.snapshot_id)
        whole = sum(check.weight for check in self._spec.checks)
        reached = sum(check.weight for check in self._spec.checks if check.name in passed)
        reward, parts = score_tests(case.task, calibration, passed)
        if case.task.score == "fraction":
            reward = reached / whole if passed != names else 1.0
        return Grade(
            reward=reward,
            parts={**parts, "fraction": reached / whole if passed != names else 1.0, "all": float(passed == names)},
            expected=calibration.expected,
            passed=tuple(sorted(passed)),
            failed=tuple(sorted(why)),
            untouched=calibration.untouched,
            end="looked",
            trust=FINAL,
            grade_s=self._clock.monotonic_s() - began_s,
            notes=tuple(f"{name}: {reason}"[:300] for name, reason in sorted(why.items())[:5]),
        )

    async def grade_nothing(self, case: Case) -> Grade:
        """Give 0 to the end of a policy that left nothing to be looked at."""
        calibration = await self._calibration(case.task, case.start.snapshot_id)
        return Grade(reward=0.0, expected=calibration.expected, untouched=calibration.untouched, trust=FINAL)

    async def _calibration(self, task: Task, snapshot_id: str) -> Calibration:
        names = frozenset(check.name for check in self._spec.checks)
        known = self._untouched.get(snapshot_id)
        if known is None:
            known = names - (await self._failures(snapshot_id)).keys()
            self._untouched.put(snapshot_id, known, sum(map(len, known)) + len(snapshot_id))
        untouched = tuple(sorted(known))
        return check_teaches(task, Calibration(task.task_hash, snapshot_id, tuple(sorted(names)), untouched, (), 0.0))

    async def _failures(self, snapshot_id: str) -> dict[str, str]:
        """Return what is not true of a state: name of a check -> why."""
        store, ids = place().store, [snapshot_id]
        why, pending = await place().work(partial(with_ids, store, ids, _look, snapshot_id, self._spec))
        for check in pending:
            # One after the other, read anew: the texts of all of them may be more than there is memory.
            text = await place().work(partial(with_ids, store, ids, _read, snapshot_id, check))
            if not await matches(check.matches, text):
                why[check.name] = "does not match"
        return why


def _look(store: Store, snapshot_id: str, spec: FilesSpec) -> tuple[dict[str, str], list[FileCheck]]:
    with browsing(store, snapshot_id) as browsed:
        return check_files(browsed, spec)


def _read(store: Store, snapshot_id: str, check: FileCheck) -> str:
    with browsing(store, snapshot_id) as browsed:
        return text_of(browsed, check)
