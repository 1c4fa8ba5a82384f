"""Runs the checks, one after the other; none of them can hang the caller."""

from __future__ import annotations

import asyncio
import importlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from worldfork.core.errors import ConfigError
from worldfork.testing.adapter import Adapter
from worldfork.testing.checks import CHECKS, Check, Finding, NotApplicable, Outcome, Wrong
from worldfork.testing.trial import Trial

MODULES = ("disk", "disk_kinds", "disk_writers", "live", "identity", "clock", "network", "connections")
CLOSE_S = 60.0
"""How long what a check started may take to end."""
GRACE_S = 30.0
"""How much later than its limits a check is given up that does not even let itself be cancelled."""
LACKS = {
    "memory": "its snapshots hold no memory",
    "network": "its forks have no network",
    "detached": "its snapshots end with the process that took them",
    "processes": "nothing runs in it besides a command",
    "limits": "it limits no disk",
}

Told = Callable[[Finding], None]


def chosen_checks(only: Iterable[int] = ()) -> tuple[Check, ...]:
    """Return the checks in order, all or those of these numbers.

    Raises:
        ConfigError: a number has no check.
    """
    for name in MODULES:
        importlib.import_module(f"worldfork.testing.{name}")
    wanted = sorted(set(only)) or sorted(CHECKS)
    missing = [number for number in wanted if number not in CHECKS]
    if missing:
        raise ConfigError(f"there is no check {missing[0]}", remedy=f"they have numbers {min(CHECKS)} to {max(CHECKS)}")
    return tuple(CHECKS[number] for number in wanted)


async def run_check(adapter: Adapter, check: Check, named: str = "", patience: float = 1.0) -> Finding:
    """Run one check with each kind of snapshot that it is about; what goes wrong, however, is its finding."""
    start_s = time.monotonic()
    outcome, detail = Outcome.PASS, ""
    try:
        abilities = adapter.abilities
        lacking = [LACKS[need] for need in check.needs if not getattr(abilities, need)]
        if lacking:
            outcome, detail = Outcome.NOT_APPLICABLE, "; ".join(lacking)
        else:
            kinds = (True,) if "memory" in check.needs else (False, True) if abilities.memory else (False,)
            for memory in kinds:
                outcome, said = await _attempt(Trial(adapter, named, memory=memory, patience=patience), check)
                if said:
                    detail = f"with memory: {said}" if memory and len(kinds) > 1 else said
                if outcome is not Outcome.PASS:
                    break
    except Exception as error:
        outcome, detail = Outcome.FAIL, f"its abilities cannot be read: {_words(error)}"
    return Finding(check.number, check.title, check.source, outcome, detail, time.monotonic() - start_s)


async def _attempt(trial: Trial, check: Check) -> tuple[Outcome, str]:
    try:
        outcome, detail = await _judged(trial, check)
    except BaseException:
        # Called off from outside: what it started still ends.
        await _closed(trial)
        raise
    said = await _closed(trial)
    # The first thing that went wrong is the evidence; an end that failed may only follow from it.
    return (Outcome.FAIL, said) if said and outcome is not Outcome.FAIL else (outcome, detail)


async def _judged(trial: Trial, check: Check) -> tuple[Outcome, str]:
    try:
        async with asyncio.timeout(check.limit_s) as limit:
            await check.body(trial)
    except Wrong as error:
        return Outcome.FAIL, str(error)
    except NotApplicable as error:
        return Outcome.NOT_APPLICABLE, str(error)
    except TimeoutError as error:
        late = f"not done after {check.limit_s:.0f} s"
        return Outcome.FAIL, late if limit.expired() else f"unexpected error: {_words(error)}"
    except Exception as error:
        return Outcome.FAIL, f"unexpected error: {_words(error)}"
    return Outcome.PASS, ""


async def _closed(trial: Trial) -> str:
    """End what a check started; return what went wrong in that."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await trial.close()
    except TimeoutError:
        return f"not everything ended within {CLOSE_S:.0f} s"
    except Exception as error:
        return _words(error)
    return ""


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, Wrong) else f"{type(error).__name__}: {text}"


def run_checks(
    adapter: Adapter,
    only: Iterable[int] = (),
    *,
    named: str = "",
    patience: float = 1.0,
    told: Told | None = None,
) -> list[Finding]:
    """Run the checks in a thread of their own and return what they found, in order.

    An adapter that blocks the event loop for good fails the check that it blocks; those after it cannot be run and
    fail with that reason.

    Args:
        named: what `load_adapter` finds the adapter by, for checks that need another process.
        patience: multiplies the time limits, for slow systems; what a check says of speed stays as it is.
        told: called with each finding as it comes.

    Raises:
        ConfigError: a number has no check, or patience is none.
    """
    if not (patience > 0 and math.isfinite(patience)):
        raise ConfigError(f"patience must be above 0, not {patience}")
    checks = [replace(each, limit_s=each.limit_s * patience) for each in chosen_checks(only)]
    findings: list[Finding] = []
    side = _Side()
    blocked = ""
    try:
        for check in checks:
            found = None if blocked else side.run(adapter, check, named, patience)
            if found is None:
                why = blocked or f"the adapter blocks the event loop: nothing after {_patience_s(check):.0f} s"
                blocked = blocked or f"not run: the adapter blocks the event loop since check {check.number}"
                found = Finding(check.number, check.title, check.source, Outcome.FAIL, why, 0.0)
            findings.append(found)
            if told is not None:
                told(found)
    finally:
        side.stop(0.0 if blocked else GRACE_S)
    return findings


def _patience_s(check: Check) -> float:
    return 2 * (check.limit_s + CLOSE_S) + GRACE_S


class _Side:
    """An event loop in a thread of its own, so that an adapter that blocks it does not block the caller."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._over: asyncio.Event
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(ready)), name="worldfork-verify", daemon=True
        )
        self._thread.start()
        ready.wait()

    def run(self, adapter: Adapter, check: Check, named: str, patience: float) -> Finding | None:
        """Run a check to its end; None where it does not come back."""
        future = asyncio.run_coroutine_threadsafe(run_check(adapter, check, named, patience), self._loop)
        try:
            return future.result(_patience_s(check))
        except TimeoutError:
            future.cancel()
            return None

    def stop(self, wait_s: float) -> None:
        """Ask the thread to end, and wait so long for it."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(wait_s)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await self._over.wait()
