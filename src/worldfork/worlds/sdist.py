"""Source distributions: fetched by pip inside a sandbox, unpacked, and never run or built."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from worldfork.core.errors import SandboxError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.origin import Origin

FETCH_S = 600.0
"""Wall time for asking the registry, the download and unpacking."""


async def fetch_sdist(sandbox: AsyncSandbox, origin: Origin, directory: str) -> None:
    """Unpack a package's source distribution into a directory, without the one directory that holds everything in it.

    Regular files and directories only, with mode 644 or 755; a link within the archive becomes what it leads to.

    Args:
        sandbox: with the host's network, and a Python that has pip.
        origin: package, version, and the SHA-256 of the file where it is known; what the registry says it is, is
            checked in any case.
        directory: exists.

    Raises:
        SandboxError: there is none of this version, the registry cannot be reached, or the file is another.
    """
    result = await sandbox.run(
        "python",
        ["-", origin.package, origin.version, origin.sha256, directory],
        stdin=_program(),
        working_dir="/",
        timeout=FETCH_S,
    )
    if not result.ok:
        words = (result.stderr or result.stdout).strip()[-500:]
        raise SandboxError(
            f"the source distribution of {origin.package} {origin.version} could not be fetched "
            f"({result.reason.value}): {words or 'no output'}",
            remedy="the registry that pip is configured for must be in reach, and have this version as a source "
            "distribution",
            package=origin.package,
            version=origin.version,
        )


@cache
def _program() -> bytes:
    return Path(__file__).with_name("fetching.py").read_bytes()
