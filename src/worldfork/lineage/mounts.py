"""Read-only mounts of a sandbox: a directory of this machine, or a directory of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence

from worldfork.core.errors import ConfigError
from worldfork.records.origin import Mount

MAX_MOUNTS = 16
"""In one sandbox."""
_RESERVED = ("/dev", "/proc", "/sys")


def check_mounts(mounts: Sequence[Mount]) -> tuple[Mount, ...]:
    """Return mounts in the order of their targets.

    Raises:
        ConfigError: too many; or a target that is the root, lies in what every sandbox has of its own, or lies in
            another one.
    """
    ordered = tuple(sorted(mounts, key=lambda mount: mount.target.split("/")))
    if len(ordered) > MAX_MOUNTS:
        raise ConfigError(f"{len(ordered)} mounts are more than {MAX_MOUNTS}", remedy="mount a directory above them")
    last = ""
    for mount in ordered:
        for own in _RESERVED:
            if f"{mount.target}/".startswith(f"{own}/"):
                raise ConfigError(f"nothing can be mounted in {own}", field="mounts.target")
        if last and f"{mount.target}/".startswith(f"{last}/"):
            raise ConfigError(f"the mount at {mount.target} lies in the one at {last}", field="mounts.target")
        last = mount.target
    return ordered
