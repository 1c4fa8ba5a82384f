"""From the exit of a sandbox's init, and what the kernel counted, to why it ended."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

from worldfork.core.errors import SandboxError
from worldfork.records.death import Death, DeathCause, LimitHits
from worldfork.sandbox.pressure import HostKills

_ASKED_CODE, _TIME_CODE = 0, 2
"""What init exits with; `native/wf.h` has the same."""
_MACHINE_CODE, _GUEST_CODE, _INIT_CODE = 3, 4, 5
"""What `keep` exits with besides, which stands in the place of init where a sandbox is a machine."""
_OF_MACHINES = {
    _MACHINE_CODE: "its machine ended: the kernel in it gave up, or QEMU was ended",
    _GUEST_CODE: "its machine sent what the init of a guest never sends",
    _INIT_CODE: "its init in the machine was ended by a signal",
}


def exit_of(pidfd: int) -> os.waitid_result | None:
    """Return how a child ended, and leave it to be reaped; None where nobody can say any more."""
    try:
        return os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return None


def condemned(error: SandboxError) -> Death:
    """Return the death of a sandbox that was ended on purpose, for what this error says."""
    own = getattr(error, "scope", "") == "sandbox"
    return Death(DeathCause.DISK if own else DeathCause.HOST_DISK, error.message)


def asked() -> Death:
    """Return the death of a sandbox that a handle of this process ended."""
    return Death(DeathCause.ENDED, "this process ended it")


def left() -> Death:
    """Return the death of a sandbox whose owner's process came to its end."""
    return Death(DeathCause.ENDED, "its process came to its end")


def cleared() -> Death:
    """Return the death of a sandbox that was cleared away: nobody who acted in it ended it."""
    return Death(DeathCause.ENDED, "it was cleared away")


def found_dead(status: os.waitid_result | None, kills: HostKills, hits: LimitHits) -> Death:
    """Return the death of a sandbox whose init was found dead.

    Args:
        status: how it ended; None where this process cannot know.
        kills: what the host's memory cost of late.
        hits: what its own limits did.
    """
    # What its own group counted of them was not init, which is in no limited group.
    return replace(_by_status(status, kills.lately() - hits.memory - hits.host_memory), hits=hits)


def _by_status(status: os.waitid_result | None, killed: int) -> Death:
    if status is None:
        return Death(DeathCause.UNKNOWN, "its init is gone, and how it ended was not for this process to learn")
    number = status.si_status
    if status.si_code == os.CLD_EXITED:
        if number == _ASKED_CODE:
            return Death(DeathCause.ENDED, "its init was asked to end")
        if number == _TIME_CODE:
            return Death(DeathCause.TIME, "its time ran out")
        if number == _MACHINE_CODE and killed > 0:
            return Death(
                DeathCause.HOST_MEMORY, "its machine ended while the kernel ended processes for want of memory"
            )
        return Death(DeathCause.CRASHED, _OF_MACHINES.get(number, f"its init gave up with exit code {number}"))
    # The first process of a pid namespace takes no signal that it has not asked for, from anywhere, but this one.
    if number != signal.SIGKILL:
        return Death(DeathCause.CRASHED, f"its init broke with signal {number}")
    if killed > 0:
        return Death(DeathCause.HOST_MEMORY, "its init was killed while the kernel ended processes for want of memory")
    return Death(DeathCause.OUTSIDE, "its init was killed from outside")
