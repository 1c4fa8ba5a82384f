"""What the process environment says about how Worldfork should work."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from worldfork.core.errors import ConfigError

Form = Literal["auto", "trusted", "user"]
Overlay = Literal["auto", "new", "legacy"]
Cgroups = Literal["auto", "off"]
IdRange = Literal["auto", "off"]
Upkeep = Literal["auto", "off"]
DriverName = Literal["namespace", "microvm"]

DEFAULT_RESERVE_BYTES = 1 << 30
DEFAULT_LEASE_TTL_S = 300


@dataclass(frozen=True)
class Settings:
    """One reading of the settings; later changes of the process environment do not touch it."""

    home: Path
    """Where snapshots live. `WORLDFORK_HOME`."""
    scratch: Path | None = None
    """Where uppers, locks, sockets and the database go if home cannot carry them. `WORLDFORK_SCRATCH`."""
    form: Form = "auto"
    """"trusted": real root; "user": a user namespace; "auto": by the caller's uid. `WORLDFORK_FORM`."""
    overlay: Overlay = "auto"
    """Which mount interface makes overlays; "auto": the new one where the kernel has it. `WORLDFORK_OVERLAY`."""
    cgroups: Cgroups = "auto"
    """"off": limits by rlimits alone. `WORLDFORK_CGROUPS`."""
    reserve_bytes: int = DEFAULT_RESERVE_BYTES
    """Free disk space in bytes that sandboxes must leave to the host. `WORLDFORK_RESERVE_BYTES`."""
    quota_bytes: int = 0
    """What the layers of this home may take on disk; 0 is no limit. `WORLDFORK_QUOTA_BYTES`."""
    lease_ttl_s: int = DEFAULT_LEASE_TTL_S
    """How long an owner that is alive may stand still before it loses what it was writing or reading.
    `WORLDFORK_LEASE_TTL_S`."""
    remote: str = ""
    """Where snapshots of level `exported` go: a directory or `s3://bucket/prefix`. `WORLDFORK_REMOTE`."""
    upkeep: Upkeep = "auto"
    """"off": layers are sealed, shared and squashed only by `worldfork store upkeep`. `WORLDFORK_UPKEEP`."""
    id_range: IdRange = "auto"
    """"auto": sandboxes of an ordinary user get the ids of /etc/subuid and /etc/subgid where a really started one
    proved that they can; "off": root alone. `WORLDFORK_ID_RANGE`."""
    driver: DriverName = "namespace"
    """What isolates a sandbox where its caller names nothing. `WORLDFORK_DRIVER`."""
    base: str = "host"
    """What a fresh sandbox starts from where its caller names nothing: `host` or `dir:PATH`. `WORLDFORK_BASE`."""
    allow_tcg: bool = False
    """Whether machines may be interpreted by QEMU, which is slow and no security boundary, where no KVM works.
    `WORLDFORK_ALLOW_TCG`."""


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings now, from `environ` or from the process.

    Raises:
        ConfigError: a variable holds something that it cannot.
    """
    source = os.environ if environ is None else environ
    scratch = source.get("WORLDFORK_SCRATCH", "")
    return Settings(
        home=_home(source),
        scratch=_absolute("WORLDFORK_SCRATCH", scratch) if scratch else None,
        form=cast(Form, _one_of(source, "WORLDFORK_FORM", get_args(Form))),
        overlay=cast(Overlay, _one_of(source, "WORLDFORK_OVERLAY", get_args(Overlay))),
        cgroups=cast(Cgroups, _one_of(source, "WORLDFORK_CGROUPS", get_args(Cgroups))),
        id_range=cast(IdRange, _one_of(source, "WORLDFORK_ID_RANGE", get_args(IdRange))),
        reserve_bytes=_size(source, "WORLDFORK_RESERVE_BYTES", DEFAULT_RESERVE_BYTES),
        quota_bytes=_size(source, "WORLDFORK_QUOTA_BYTES", 0),
        lease_ttl_s=_seconds(source, "WORLDFORK_LEASE_TTL_S", DEFAULT_LEASE_TTL_S),
        remote=source.get("WORLDFORK_REMOTE", ""),
        upkeep=cast(Upkeep, _one_of(source, "WORLDFORK_UPKEEP", get_args(Upkeep))),
        driver=cast(DriverName, _one_of(source, "WORLDFORK_DRIVER", get_args(DriverName))),
        base=source.get("WORLDFORK_BASE", "") or "host",
        allow_tcg=_one_of(source, "WORLDFORK_ALLOW_TCG", ("0", "1")) == "1",
    )


def _home(source: Mapping[str, str]) -> Path:
    named = source.get("WORLDFORK_HOME", "")
    if named:
        return _absolute("WORLDFORK_HOME", named)
    if os.geteuid() == 0:
        return Path("/var/lib/worldfork")
    data = source.get("XDG_DATA_HOME", "")
    # The XDG specification says that a relative value is to be ignored.
    if data.startswith("/"):
        return Path(data) / "worldfork"
    user_home = source.get("HOME", "") or _home_of_user()
    return _absolute("HOME", user_home) / ".local" / "share" / "worldfork"


def _home_of_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        raise ConfigError(
            "this user has no home directory", remedy="set WORLDFORK_HOME to a directory that it may write"
        ) from None


def _absolute(name: str, text: str) -> Path:
    path = Path(text)
    if not path.is_absolute() or "\0" in text:
        raise ConfigError(f"{name} is {text!r}, which is not an absolute path", remedy=f"set {name} to one", name=name)
    return path


def _one_of(source: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = source.get(name, "") or choices[0]
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}", remedy=f"use one of {', '.join(choices)}", name=name)
    return value


def _size(source: Mapping[str, str], name: str, default: int) -> int:
    return _whole_number(source, name, default, "bytes")


def _seconds(source: Mapping[str, str], name: str, default: int) -> int:
    seconds = _whole_number(source, name, default, "seconds")
    if seconds < 1:
        raise ConfigError(f"{name} is {seconds}", remedy="give at least 1", name=name)
    return seconds


def _whole_number(source: Mapping[str, str], name: str, default: int, unit: str) -> int:
    text = source.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is {text!r}", remedy=f"give a whole number of {unit}", name=name)
    return int(text)
