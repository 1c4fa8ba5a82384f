"""Every error that Worldfork raises on purpose.

::

    WorldforkError                    code, retryable, message, remedy, fields
      ConfigError (ValueError)        the caller's fault, raised before anything starts
      SandboxError                    a sandbox could not be started, reached or used
        DriverUnavailable             what the host lacks, and how to mend it
        LaunchFailed                  the host could do it in principle, this start failed
        SandboxDied                   the sandbox ended while it was needed
        OutOfSpace                    scope: "sandbox" (its limit), "host" (the reserve), "quota"
        PathError (OSError)           path, errno: a file operation inside a sandbox
      CommandError                    result; raised only where a caller asked for check=True
        CommandFailed
        CommandTimeout (TimeoutError)
      StoreError                      snapshots on disk
        NotFound (LookupError)
        Corrupt                       expected, actual
        FormatUnsupported             written by a newer version
        Locked                        holders: who still uses it
      ForkError                       a checkpoint, restore or fork
        NotCapturable                 what, why
      PolicyError                     a policy broke, which is not a low reward
      VerifierError                   a judge broke, which is not a low reward

A command's exit code, time limit and output limit are results, never errors.
"""

from __future__ import annotations

from typing import Any, ClassVar


class WorldforkError(Exception):
    """The root of the tree; catch it to catch everything that Worldfork raises on purpose.

    Args:
        message: one plain sentence about what happened.
        remedy: what the reader can do about it, as a command where there is one; may be empty.
        fields: what a program needs to act; each is also an attribute.
    """

    code: ClassVar[str] = "worldfork"
    """Stable word for this kind of error; a key of `ERROR_TABLE`."""
    retryable: ClassVar[bool] = False
    """True where the same call may succeed later although the caller changes nothing."""

    message: str
    remedy: str
    fields: dict[str, Any]

    def __init__(self, message: str, *, remedy: str = "", **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.fields = dict(fields)
        for name, value in fields.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own way calls the class with `args` alone and loses the remedy and the fields.
        return _rebuild, (type(self), self.message, self.remedy, self.fields)


def _rebuild(kind: type[WorldforkError], message: str, remedy: str, fields: dict[str, Any]) -> WorldforkError:
    return kind(message, remedy=remedy, **fields)


class ConfigError(WorldforkError, ValueError):
    """An argument or a setting is wrong; nothing was started."""

    code = "config"


class SandboxError(WorldforkError):
    """A sandbox could not be started, reached or used."""

    code = "sandbox"


class DriverUnavailable(SandboxError):
    """This host cannot start a sandbox this way; the remedy says what it lacks."""

    code = "driver_unavailable"


class LaunchFailed(SandboxError):
    """One start failed on a host that can start sandboxes."""

    code = "launch_failed"


class SandboxDied(SandboxError):
    """The sandbox ended while it was needed. It is never replaced silently."""

    code = "sandbox_died"


class OutOfSpace(SandboxError):
    """Disk ran out."""

    code = "out_of_space"
    scope: str
    """"sandbox": its own disk limit; "host": the reserve that the host keeps free; "quota": what layers may take."""


class PathError(SandboxError, OSError):
    """A file operation inside a sandbox failed."""

    code = "path"
    path: str
    """The path inside the sandbox, as the caller gave it."""


class CommandError(WorldforkError):
    """A command did not succeed and the caller had asked for that to raise."""

    code = "command"
    result: Any
    """The `CommandResult`, with whatever output there was."""


class CommandFailed(CommandError):
    """A command ended with a code other than zero, by a signal, or never started."""

    code = "command_failed"


class CommandTimeout(CommandError, TimeoutError):
    """A command met its time limit."""

    code = "command_timeout"


class StoreError(WorldforkError):
    """The store of snapshots failed."""

    code = "store"


class NotFound(StoreError, LookupError):
    """No such snapshot, layer, sandbox or name."""

    code = "not_found"


class Corrupt(StoreError):
    """Stored bytes are not what was stored."""

    code = "corrupt"
    expected: Any
    actual: Any


class FormatUnsupported(StoreError):
    """The store was written by a newer version of Worldfork."""

    code = "format_unsupported"


class Locked(StoreError):
    """Somebody alive still uses it."""

    code = "locked"
    retryable = True
    holders: list[str]
    """Ids of the sandboxes or owners that hold it."""


class ForkError(WorldforkError):
    """A checkpoint, restore or fork failed."""

    code = "fork"


class NotCapturable(ForkError):
    """The state holds something that a snapshot cannot carry."""

    code = "not_capturable"
    what: str
    why: str


class PolicyError(WorldforkError):
    """A policy broke; the rollout has no reward."""

    code = "policy"


class VerifierError(WorldforkError):
    """A verifier broke; the rollout has no reward."""

    code = "verifier"


ERROR_TABLE: dict[str, tuple[int, int]] = {
    "worldfork": (500, 1),
    "config": (400, 2),
    "store": (500, 10),
    "locked": (409, 11),
    "corrupt": (500, 12),
    "not_found": (404, 13),
    "format_unsupported": (501, 14),
    "driver_unavailable": (503, 20),
    "sandbox": (500, 21),
    "launch_failed": (500, 22),
    "sandbox_died": (410, 23),
    "out_of_space": (507, 24),
    "path": (422, 25),
    "command": (422, 30),
    "command_failed": (422, 31),
    "command_timeout": (408, 32),
    "fork": (500, 40),
    "not_capturable": (409, 41),
    "policy": (502, 50),
    "verifier": (500, 51),
}
"""Code -> (HTTP status, exit code). 0 is success, 3 a partly failed batch, 130 a cancelled one."""
