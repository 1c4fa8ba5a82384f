"""The runner of the checks: every way in which a check can end, and that none of them hangs the caller."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Sequence

import pytest

from worldfork.core.errors import ConfigError
from worldfork.testing import runner
from worldfork.testing.adapter import Abilities, Adapter, Order, Ran, Wanted, load_adapter
from worldfork.testing.checks import Check, NotApplicable, Outcome, Wrong, check
from worldfork.testing.runner import chosen_checks, run_checks
from worldfork.testing.table import failed, row, shape, summary
from worldfork.testing.trial import Trial


class Paper:
    """An adapter that only remembers what it was asked."""

    def __init__(self, abilities: Abilities | None = None) -> None:
        self.abilities = abilities or Abilities()
        self.ended: list[str] = []
        self.made = 0

    async def create(self, wanted: Wanted) -> str:
        self.made += 1
        return f"box-{self.made}"

    async def run(self, sandbox: str, order: Order) -> Ran:
        return Ran(0, order.stdin)

    async def snapshot(self, sandbox: str, *, memory: bool) -> str:
        self.made += 1
        return f"shot-{self.made}{'-memory' if memory else ''}"

    async def fork(self, snapshot: str, n: int) -> Sequence[str]:
        self.made += n
        return [f"fork-{self.made - index}" for index in range(n)]

    async def end(self, called: str) -> None:
        self.ended.append(called)


class Stubborn(Paper):
    """Its snapshots cannot be called off."""

    async def snapshot(self, sandbox: str, *, memory: bool) -> str:
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return "shot"


class Unending(Paper):
    """Nothing of it can be ended."""

    async def end(self, called: str) -> None:
        raise OSError("busy")


async def _good(trial: Trial) -> None:
    await trial.child_of(await trial.create())


async def _wrong(trial: Trial) -> None:
    await trial.create()
    raise Wrong("the file holds 2 instead of 1")


async def _not_here(trial: Trial) -> None:
    raise NotApplicable("there is no python3")


async def _unexpected(trial: Trial) -> None:
    raise KeyError("box-9")


async def _own_limit(trial: Trial) -> None:
    raise TimeoutError("of the adapter")


async def _endless(trial: Trial) -> None:
    await trial.create()
    await asyncio.Event().wait()


async def _with_memory_wrong(trial: Trial) -> None:
    if trial.memory:
        raise Wrong("two clocks")


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> dict[int, Check]:
    """The checks that the runner knows; filled by the test."""
    known: dict[int, Check] = {}
    monkeypatch.setattr(runner, "CHECKS", known)
    return known


def _make(body: object, number: int = 1, needs: tuple[str, ...] = (), limit_s: float = 5) -> Check:
    return Check(number, f"title {number}", f"peer#{number}", needs, body, limit_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "outcome", "detail"),
    [
        (_good, Outcome.PASS, ""),
        (_wrong, Outcome.FAIL, "the file holds 2 instead of 1"),
        (_not_here, Outcome.NOT_APPLICABLE, "there is no python3"),
        (_unexpected, Outcome.FAIL, "unexpected error: KeyError: 'box-9'"),
        (_own_limit, Outcome.FAIL, "unexpected error: TimeoutError: of the adapter"),
    ],
)
def test_every_way_to_end(bodies: dict[int, Check], body: object, outcome: Outcome, detail: str) -> None:
    bodies[1] = _make(body)
    (found,) = run_checks(Paper())
    assert (found.outcome, found.detail) == (outcome, detail)


def test_a_check_that_takes_too_long_fails_and_is_cleaned_up(bodies: dict[int, Check]) -> None:
    bodies[1] = _make(_endless, limit_s=0.05)
    paper = Paper()
    (found,) = run_checks(paper)
    assert (found.outcome, found.detail) == (Outcome.FAIL, "not done after 0 s")
    assert paper.ended == ["box-1"]


def test_children_end_before_what_they_stand_on(bodies: dict[int, Check]) -> None:
    bodies[1] = _make(_good)
    paper = Paper()
    run_checks(paper)
    assert paper.ended == ["fork-3", "box-1", "shot-2"]


def test_what_cannot_be_ended_fails_a_check_that_passed(bodies: dict[int, Check]) -> None:
    bodies.update({1: _make(_good), 2: _make(_wrong, 2)})
    good, wrong = run_checks(Unending())
    assert good.outcome is Outcome.FAIL
    assert good.detail.startswith("not everything could be ended: fork-3: busy")
    assert wrong.detail == "the file holds 2 instead of 1"


def test_an_end_that_never_comes_is_given_up(bodies: dict[int, Check], monkeypatch: pytest.MonkeyPatch) -> None:
    class Clinging(Paper):
        async def end(self, called: str) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(runner, "CLOSE_S", 0.05)
    bodies[1] = _make(_good)
    (found,) = run_checks(Clinging())
    assert (found.outcome, found.detail) == (Outcome.FAIL, "not everything ended within 0 s")


def test_an_adapter_that_blocks_the_loop_hangs_nobody(
    bodies: dict[int, Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    async def blocks(trial: Trial) -> None:
        released.wait()

    monkeypatch.setattr(runner, "CLOSE_S", 0.05)
    monkeypatch.setattr(runner, "GRACE_S", 0.1)
    bodies.update({1: _make(_good), 2: _make(blocks, 2, limit_s=0.05), 3: _make(_good, 3)})
    try:
        findings = run_checks(Paper())
    finally:
        released.set()
    for thread in threading.enumerate():
        if thread.name == "worldfork-verify":
            thread.join()
    assert [each.outcome for each in findings] == [Outcome.PASS, Outcome.FAIL, Outcome.FAIL]
    assert "blocks the event loop" in findings[1].detail
    assert findings[2].detail == "not run: the adapter blocks the event loop since check 2"


def test_an_interrupt_ends_what_was_started(bodies: dict[int, Check]) -> None:
    async def interrupted(trial: Trial) -> None:
        await trial.create()
        # Unlike `interrupt_main` it wakes whoever waits for a lock.
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    bodies[1] = _make(interrupted, limit_s=60)
    paper = Paper()
    with pytest.raises(KeyboardInterrupt):
        run_checks(paper)
    assert paper.ended == ["box-1"]


def test_needs_are_told_by_what_is_lacking(bodies: dict[int, Check]) -> None:
    bodies[1] = _make(_wrong, needs=("memory", "processes"))
    (found,) = run_checks(Paper(Abilities(processes=False)))
    assert found.outcome is Outcome.NOT_APPLICABLE
    assert found.detail == "its snapshots hold no memory; nothing runs in it besides a command"


def test_each_kind_of_snapshot_is_tried(bodies: dict[int, Check]) -> None:
    kinds = []

    async def notes(trial: Trial) -> None:
        kinds.append(trial.memory)

    bodies.update({1: _make(notes), 2: _make(notes, 2, needs=("memory",)), 3: _make(_with_memory_wrong, 3)})
    *_, last = run_checks(Paper(Abilities(memory=True)))
    assert kinds == [False, True, True]
    assert last.detail == "with memory: two clocks"
    kinds.clear()
    assert run_checks(Paper(), [1, 3])[1].outcome is Outcome.PASS
    assert kinds == [False]


def test_findings_come_in_order_as_they_are_made(bodies: dict[int, Check]) -> None:
    bodies.update({3: _make(_good, 3), 1: _make(_wrong), 2: _make(_not_here, 2)})
    told: list[int] = []
    findings = run_checks(Paper(), told=lambda each: told.append(each.number))
    assert told == [each.number for each in findings] == [1, 2, 3]
    assert [each.number for each in run_checks(Paper(), [3, 1, 3])] == [1, 3]


def test_patience_stretches_the_limits(bodies: dict[int, Check]) -> None:
    async def slow(trial: Trial) -> None:
        await asyncio.sleep(0.1)

    bodies[1] = _make(slow, limit_s=0.01)
    assert run_checks(Paper())[0].outcome is Outcome.FAIL
    assert run_checks(Paper(), patience=500)[0].outcome is Outcome.PASS
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="patience"):
            run_checks(Paper(), patience=wrong)


class Slow(Paper):
    """What a command leaves in the background takes a while."""

    asked = 0

    async def run(self, sandbox: str, order: Order) -> Ran:
        self.asked += 1
        return Ran(0, b"yes" if self.asked > 3 else b"")


def test_patience_stretches_what_is_waited_for(bodies: dict[int, Check]) -> None:
    async def body(trial: Trial) -> None:
        await (await trial.create()).appears("ready", wait_s=0.01)

    bodies[1] = _make(body, limit_s=600)
    assert run_checks(Slow(), patience=500)[0].outcome is Outcome.PASS
    assert run_checks(Slow(), patience=0.01)[0].outcome is Outcome.NOT_APPLICABLE


def test_the_numbers_are_one_to_twenty_nine() -> None:
    checks = chosen_checks()
    assert [each.number for each in checks] == list(range(1, 30))
    assert all(each.title and each.source for each in checks)
    assert len({each.title for each in checks}) == 29
    with pytest.raises(ConfigError, match="no check 30"):
        chosen_checks([30])


def test_a_number_is_given_once_and_a_limit_always() -> None:
    chosen_checks()
    with pytest.raises(ValueError, match="two checks have the number 1"):
        check(1, "again", "nobody")(_good)
    with pytest.raises(ValueError, match="needs a time limit"):
        check(99, "for ever", "nobody", limit_s=float("inf"))


def test_rows_and_data(bodies: dict[int, Check]) -> None:
    bodies.update({1: _make(_good), 2: _make(_wrong, 2), 3: _make(_not_here, 3)})
    findings = run_checks(Paper())
    assert row(findings[1]) == ("2", "fail", "title 2", "peer#2", "the file holds 2 instead of 1")
    assert summary(findings) == "3 checks in 0 s: 1 passed, 1 failed, 1 do not apply"
    assert [each["outcome"] for each in shape(findings)] == ["pass", "fail", "not applicable"]
    assert set(shape(findings)[0]) == {"number", "title", "source", "outcome", "detail", "took_s"}
    assert failed(findings)
    assert not failed([findings[0], findings[2]])


MADE: Adapter = Paper()


class Titled(Paper):
    def __init__(self, title: str = "") -> None:
        super().__init__()
        self.title = title


class Half:
    abilities = Abilities()


def test_adapters_are_found_by_name() -> None:
    here = __name__
    assert load_adapter(f"{here}:MADE") is MADE
    assert isinstance(load_adapter(f"{here}:Paper"), Paper)
    titled = load_adapter(f"{here}:Titled:at:last")
    assert isinstance(titled, Titled)
    assert titled.title == "at:last"
    for named, why in (
        (f"{here}:MADE:more", "cannot be called"),
        ("nowhere", "names no adapter"),
        ("no.such.module:Thing", "cannot be loaded"),
        (f"{here}:Nothing", "cannot be loaded"),
        (f"{here}:Half", "it has no create, run, snapshot, fork, end"),
    ):
        with pytest.raises(ConfigError, match=why):
            load_adapter(named)


def test_a_snapshot_that_cannot_be_called_off_does_not_outlast_the_limit_of_its_check() -> None:
    async def run() -> None:
        [after_failures] = chosen_checks([6])
        async with asyncio.timeout(0.05):
            await after_failures.body(Trial(Stubborn()))

    with pytest.raises(TimeoutError):
        asyncio.run(run())
