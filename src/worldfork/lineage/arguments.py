"""The arguments of the SDK that this API mirrors, checked and turned into ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from worldfork.core.errors import ConfigError
from worldfork.lineage.mounts import check_mounts
from worldfork.lineage.starting import StartOptions
from worldfork.records.origin import Mount
from worldfork.sandbox.network import HOST_SETTINGS

REMOTE_ONLY = frozenset({
    "proxy_url", "request_timeout", "startup_timeout", "api_key", "api_url", "organization_id", "project_id",
    "namespace", "max_pending_secs", "cancel_on_timeout", "auto_resume", "allow_unauthenticated_access",
    "routing_hint",
})  # fmt: skip
"""About reaching a remote service. They are taken, so that a program runs unchanged, and mean nothing here."""

OWN_EXTRAS = ("host_settings", "allow_changed_base", "mounts")
"""Arguments of ours that few need."""

DRIVERS = ("namespace", "microvm")
"""The first is the default."""

OUTSIDE = ("refuse", "close", "keep")
"""What may become of connections that leave a sandbox whose memory is saved."""

UNSUPPORTED = {
    "gpus": "no driver has GPUs",
    "gpu": "no driver has GPUs",
    "gpu_model": "no driver has GPUs",
    "pool_id": "forks are cheap enough to need no pool: use create(snapshot_id=...)",
    "allow_out": "rules for outgoing traffic are not supported: use network='none' or network='host'",
    "deny_out": "rules for outgoing traffic are not supported: use network='none' or network='host'",
    "file_systems": "remote file systems are not supported: use upload_directory",
    "entrypoint": "start the program with start_process",
    "exposed_ports": "no driver exposes ports",
}

DEFAULT_LIMITS: dict[str, float | int | None] = {"cpus": 1.0, "memory_mb": 1024, "disk_mb": None, "pids": 1024}
"""Of a fresh sandbox; a restore inherits its snapshot's."""


def check_foreign(arguments: Mapping[str, Any]) -> None:
    """Refuse what cannot be done here, and what nobody knows.

    Raises:
        ConfigError: with the remedy.
    """
    for name, value in arguments.items():
        if name in UNSUPPORTED:
            if value is not None:
                raise ConfigError(f"{name} is not supported", remedy=UNSUPPORTED[name])
        elif name not in REMOTE_ONLY:
            raise ConfigError(f"create() has no argument {name!r}")


def check_outside(outside: str) -> None:
    """Refuse what is none of the words.

    Raises:
        ConfigError: it is not.
    """
    if outside not in OUTSIDE:
        raise ConfigError(f"outside cannot be {outside!r}", remedy=f"use one of {', '.join(OUTSIDE)}")


def choose_base(image: str | None, base: str | None, default: str = "host") -> str:
    """Return the base that `image` and `base` name together; `default` where neither does."""
    if image is not None and base is not None:
        raise ConfigError("image and base both say what to start from", remedy="give one of them")
    chosen = base or image or default
    if chosen != "host" and not chosen.startswith("dir:"):
        raise ConfigError(f"{chosen!r} is not a base here", remedy="use 'host' or 'dir:/absolute/path'")
    return chosen


def choose_network(network: str | None, allow_internet: bool | None, fresh: bool) -> str:
    """Return "host" or "none". A fresh sandbox has the network unless told otherwise; a restore never inherits it."""
    if network is None:
        allowed = fresh if allow_internet is None else allow_internet
        return "host" if allowed else "none"
    if network not in ("none", "host"):
        raise ConfigError(f"network cannot be {network!r}", remedy="use 'none' or 'host'")
    return network


def choose_limits(fresh: bool, given: Mapping[str, float | int | None]) -> dict[str, float | int | None]:
    """Return the limits to set against the snapshot's.

    Raises:
        ConfigError: a limit that nothing could run under.
    """
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0 and finite, not {value}")
    memory = given.get("memory_mb")
    if memory is not None and memory < 8:
        raise ConfigError(f"{memory} MiB of memory are too little to run a command", remedy="give 8 or more")
    chosen = dict(DEFAULT_LIMITS) if fresh else {}
    chosen.update({name: value for name, value in given.items() if value is not None})
    return chosen


def start_options(
    *,
    fresh: bool,
    name: str | None = None,
    network: str | None = None,
    allow_internet_access: bool | None = None,
    cpus: float | None = None,
    memory_mb: int | None = None,
    disk_mb: int | None = None,
    pids: int | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    working_dir: str | None = None,
    detached: bool = False,
    timeout_secs: float | None = None,
    host_settings: tuple[str, ...] = HOST_SETTINGS,
    allow_changed_base: bool = False,
    driver: str | None = None,
    mounts: Sequence[Mount] = (),
) -> StartOptions:
    """Check the arguments of `create` and `fork` and return them as options."""
    if driver not in (None, *DRIVERS):
        raise ConfigError(f"no such driver: {driver!r}", remedy=f"use one of {', '.join(DRIVERS)}")
    chosen = driver or DRIVERS[0]
    if timeout_secs is not None and not timeout_secs > 0:
        raise ConfigError(f"timeout_secs must be above 0, not {timeout_secs}")
    for key, value in (env or {}).items():
        if not key or "=" in key or "\0" in key + value:
            raise ConfigError(f"not a variable that a process can be given: {key!r}")
    if name is not None and (not name or "\0" in name or len(name) > 200):
        raise ConfigError(f"not a name for a sandbox: {name!r}")
    limits = {"cpus": cpus, "memory_mb": memory_mb, "disk_mb": disk_mb, "pids": pids}
    return StartOptions(
        name=name,
        driver=chosen,
        # A machine has the network only if that is said.
        network=choose_network(network, allow_internet_access, fresh and chosen == DRIVERS[0]),
        limits=choose_limits(fresh, limits),
        env=dict(env or {}),
        user=user,
        working_dir=working_dir,
        detached=detached,
        timeout_s=timeout_secs,
        host_settings=host_settings,
        allow_changed_base=allow_changed_base,
        mounts=check_mounts(mounts),
    )
