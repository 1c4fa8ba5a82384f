"""What siblings must not share: names, ids, seeds. See `docs/clones.md`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from worldfork.core.errors import ConfigError
from worldfork.records.sandbox import SandboxFacts
from worldfork.sandbox.bases import VENV

SEED_BITS = 63
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HOSTNAME_MAX = 63


def hostname(facts: SandboxFacts) -> str:
    """Return the sandbox's host name: its own name as far as a host name can say it, else its id."""
    text = "".join(c if c.isascii() and (c.isalnum() or c == "-") else "-" for c in facts.name).strip("-")
    return (text or facts.sandbox_id)[:_HOSTNAME_MAX].rstrip("-")


def identity_files(facts: SandboxFacts, resolv_conf: str) -> tuple[tuple[str, str], ...]:
    """Return (path, content) of the files that are this sandbox's own, whatever its snapshot holds."""
    name = hostname(facts)
    hosts = (
        f"127.0.0.1\tlocalhost\n127.0.1.1\t{name}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
        "ff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n"
    )
    machine = hashlib.sha256(facts.sandbox_id.encode()).hexdigest()[:32]
    return (
        ("/etc/hostname", f"{name}\n"),
        ("/etc/hosts", hosts),
        ("/etc/resolv.conf", resolv_conf),
        ("/etc/machine-id", f"{machine}\n"),
    )


def command_env(facts: SandboxFacts) -> dict[str, str]:
    """Return the variables that every command of this sandbox starts with."""
    path = f"{VENV}/bin:{_SYSTEM_PATH}" if facts.base.kind == "host" else _SYSTEM_PATH
    return {
        "PATH": path,
        "HOME": "/root",
        "LANG": "C.UTF-8",
        **facts.network_env,
        **facts.env,
        "WORLDFORK_SANDBOX_ID": facts.sandbox_id,
        "WORLDFORK_FORK_INDEX": str(facts.fork_index),
        "WORLDFORK_SEED": str(facts.seed),
    }


def choose_seeds(seeds: Sequence[int] | str | None, n: int) -> list[int]:
    """Return one seed for each of `n` forks.

    Args:
        seeds: None or "independent" for random ones, "common" for one random seed that all share, or a list.

    Raises:
        ConfigError: a list of another length, a seed that is not a whole number of 63 bits, another word.
    """
    if seeds is None or seeds == "independent":
        return [secrets.randbits(SEED_BITS) for _ in range(n)]
    if seeds == "common":
        return [secrets.randbits(SEED_BITS)] * n
    if isinstance(seeds, str):
        raise ConfigError(f"seeds cannot be {seeds!r}", remedy='use "independent", "common" or a list of whole numbers')
    chosen = list(seeds)
    if len(chosen) != n:
        raise ConfigError(f"{len(chosen)} seeds for {n} forks", remedy="give one seed for each")
    for seed in chosen:
        if not 0 <= seed < 1 << SEED_BITS:
            raise ConfigError(f"{seed!r} is not a seed", remedy="use whole numbers from 0 to 2**63 - 1")
    return chosen
