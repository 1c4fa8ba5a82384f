"""Finding out which of a task's tests count: runs with its reference, and without any change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from worldfork.core.errors import VerifierError
from worldfork.records.edits import Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.blame import overload
from worldfork.reward.calibration import Calibration
from worldfork.reward.preparing import BUILD_FAILED
from worldfork.reward.reasons import first_told, told
from worldfork.reward.scoring import file_of
from worldfork.reward.trial import Trial
from worldfork.reward.verifier import Start
from worldfork.sandbox.command import Reason

Run = Callable[[Edits], Awaitable[Trial]]
"""Runs the tests against some edits, where no policy has a say; measures what that takes."""


async def find_calibration(task: Task, start: Start, run: Run, tell: Run) -> Calibration:
    """Run the tests with the reference, without any change, and with the reference again.

    Args:
        task: whose tests.
        start: its starting state.
        run: runs them.
        tell: runs them so that its trial has the reasons of failures; asked only where the task is found unfit.

    Raises:
        VerifierError: the reference passes nothing or did not come to its end, the declared ids are not as declared,
            or the machine was overloaded.
        As `run`.
    """
    if not task.has_reference:
        raise unfit(task, "has no reference, so nobody knows which tests to expect", "give it a solution")
    solved = await _with_reference(task, start, run, tell)
    without = await run(Edits())
    # Once more: what is kept decides about every rollout, and one run does not show what is left to chance.
    again = await _with_reference(task, start, run, tell)
    expected = solved.report.passed & again.report.passed
    flaky = solved.report.passed ^ again.report.passed
    if not expected:
        raise unfit(task, "has a reference that passes no test twice", "its tests must have the same ids each time")
    untouched = expected & without.report.passed
    if without.is_starved(expected - untouched):
        raise overload(task)
    odd = (expected & frozenset(task.pass_to_pass)) - untouched
    if odd and without.end == Reason.EXITED.value:
        once_more = await run(Edits())
        if once_more.is_starved(odd):
            raise overload(task)
        late = odd & once_more.report.passed
        expected, flaky = expected - late, flaky | late
    loaded = {file_of(name) for name in without.report.tests}
    # Where the services that tests need were not up, nothing is known of their files.
    asked = without.report.ready
    unloaded = frozenset(name for name in expected - untouched if asked and file_of(name) not in loaded)
    lost = sorted(frozenset(task.fail_to_pass) - expected)
    if lost:
        raise _lost(task, lost, await tell(start.solution))
    _check_early(task, untouched, unloaded)
    return Calibration(
        task_hash=task.task_hash,
        snapshot_id=start.snapshot_id,
        expected=tuple(sorted(expected)),
        untouched=tuple(sorted(untouched)),
        reference_failed=tuple(sorted(solved.report.tests.keys() - expected - flaky)),
        # Of two the one that others got less into the way of.
        cpu_s=min(solved.cpu_s, again.cpu_s),
        unmet=tuple(sorted(frozenset(task.pass_to_pass) - expected - flaky)),
        flaky=tuple(sorted(flaky)),
        unloaded=tuple(sorted(unloaded)),
        wall_s=min(each.wall_s - each.missed_s for each in (solved, again)),
        rebuild_s=min(solved.rebuild_s, again.rebuild_s),
        rebuild_cpu_s=min(solved.rebuild_cpu_s, again.rebuild_cpu_s),
    )


async def _with_reference(task: Task, start: Start, run: Run, tell: Run) -> Trial:
    trial = await run(start.solution)
    _check_whole(task, trial)
    if not trial.report.passed:
        raise _passes_nothing(task, trial, await tell(start.solution))
    return trial


def _check_whole(task: Task, trial: Trial) -> None:
    """Accept only a whole run: an id that is missing here would count for nobody."""
    report = trial.report
    if trial.is_starved(frozenset(report.tests)):
        raise overload(task)
    if trial.end == BUILD_FAILED:
        raise VerifierError(
            f"the rebuild step of {task.task_id} fails with the reference: {trial.last_words[-300:] or 'no output'}",
            remedy="the world needs what its rebuild step uses, and rebuild_wall_s must be enough",
            kind=FailureKind.BUILD,
            output=trial.last_words,
        )
    if trial.end != Reason.EXITED.value or not report.finished:
        raise unfit(
            task,
            f"has tests that did not come to their end with the reference ({trial.end})",
            "raise the task's limits, or repair its tests",
            trial.last_words,
        )


def _passes_nothing(task: Task, trial: Trial, telling: Trial) -> VerifierError:
    ids = [name for name, test in telling.report.tests.items() if test.outcome != "passed"]
    skipped = sum(test.outcome == "skipped" for test in trial.report.tests.values())
    if skipped and skipped == len(trial.report.tests):
        why = f"all {skipped} are skipped"
    else:
        why = first_told(telling.reasons, ids) or trial.last_words[-300:] or "no output"
    return unfit(
        task,
        f"has a reference that passes no test: {why}",
        "the task needs a solution that passes its hidden tests in this world",
        trial.last_words,
    )


def _lost(task: Task, lost: list[str], telling: Trial) -> VerifierError:
    why = told(telling.reasons, lost)
    return unfit(
        task,
        f"declares {len(lost)} of {len(task.fail_to_pass)} fail_to_pass tests that the reference does not pass, "
        f"such as {lost[0][:300]}" + (f" ({why})" if why else ""),
        "the ids, the reference and the world must be of one version",
    )


def _check_early(task: Task, untouched: frozenset[str], unloaded: frozenset[str]) -> None:
    """Go on only if what a task declares as `fail_to_pass` fails without a change.

    Where files could not be loaded, some of `fail_to_pass` may pass without any change: a run by hand stops at such a
    file, so that to whoever declared them all tests had failed. They earn nothing, and must not be lost.

    Raises:
        VerifierError: it does not.
    """
    early = sorted(frozenset(task.fail_to_pass) & untouched)
    if early and (not unloaded or untouched.issuperset(task.fail_to_pass)):
        raise unfit(
            task,
            f"declares {len(early)} fail_to_pass tests that pass without any change, such as {early[0][:300]}",
            "leave them out of fail_to_pass",
        )


def unfit(task: Task, what: str, remedy: str, output: str = "") -> VerifierError:
    """Return the error of a task that cannot be calibrated."""
    return VerifierError(f"{task.task_id} {what}", remedy=remedy, kind=FailureKind.CALIBRATION, output=output)
