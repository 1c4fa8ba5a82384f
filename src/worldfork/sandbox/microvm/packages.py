"""The distribution's packages, as apt offers them here, without touching what is installed and without rights of root.

Apt works on a state of its own in a directory of the caller's. It sees the machine's sources, keys and proxies, and an
empty machine: so it names all that a root file system needs, down to the C library.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from worldfork.core.errors import ConfigError, DriverUnavailable
from worldfork.sandbox.microvm.programs import run_program

_T = TypeVar("_T")
PROGRAMS = ("apt-get", "apt-cache", "apt-config", "dpkg-deb")
REMEDY = "see that `sudo apt-get update` works on this machine, and try again"

_LISTS = Path("/var/lib/apt/lists")
_UPDATE_S = 300.0
_RESOLVE_S = 120.0
_DOWNLOAD_S = 1200.0
_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]*[a-z0-9+]", re.ASCII)
_OFFERED = re.compile(r"^'(?P<uri>[^']+)' (?P<file>\S+\.deb) (?P<size>\d+)", re.MULTILINE)
_KEPT_SETTING = re.compile(r'^(Acquire(::[^ ]*)?|APT::Architecture) "(.*)";$', re.MULTILINE)
_INDEX = "$(REPO_URI) $(RELEASE) $(COMPONENT)"


@dataclass(frozen=True)
class Package:
    """A package that can be downloaded."""

    uri: str
    file: str
    """Its name says the package, the version and the architecture."""
    size_bytes: int


def missing_program() -> str:
    """Return the first program of apt and dpkg that this machine lacks; empty if it has them all."""
    return next((name for name in PROGRAMS if shutil.which(name) is None), "")


def check_name(name: str) -> str:
    """Return the name of a package if it can be one; apt would read others as options or removals.

    Raises:
        ConfigError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a package", remedy="give names such as gcc or python3-numpy")
    return name


class Apt:
    """Apt on a state of its own.

    Args:
        place: an empty directory, which it fills.
        lists: the machine's package lists by default; None: lists that are downloaded first.
    """

    def __init__(self, place: Path, lists: Path | None = _LISTS) -> None:
        self.place = place
        self.archives = place / "cache/archives"
        (place / "state/lists").mkdir(parents=True)
        (self.archives / "partial").mkdir(parents=True)
        (place / "status").touch()
        own = {
            "Dir::State": f"{place}/state/",
            "Dir::State::lists": f"{lists or place / 'state/lists'}/",
            "Dir::State::status": f"{place}/status",
            "Dir::Cache": f"{place}/cache/",
            "Dir::Cache::archives": f"{self.archives}/",
            # What the machine does before and after its own installations is none of our business.
            "Dir::Etc::parts": "/dev/null",
            "Dir::Etc::main": "/dev/null",
            "APT::Install-Recommends": "0",
            "APT::Sandbox::User": "root",
            "Debug::NoLocking": "1",
        }
        settings = run_program(["apt-config", "dump"], place, _RESOLVE_S, REMEDY)
        lines = [match[0] for match in _KEPT_SETTING.finditer(settings)]
        lines += [f'{name} "{value}";' for name, value in own.items()]
        (place / "apt.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if lists is None:
            self._run(["apt-get", "update", "-q"], _UPDATE_S)

    def _run(self, argv: list[str], limit_s: float) -> str:
        return run_program(argv, self.place, limit_s, REMEDY, variables={"APT_CONFIG": f"{self.place}/apt.conf"})

    def offered(self, names: Iterable[str]) -> list[Package]:
        """Return the packages of these names or patterns with all that they depend on."""
        text = self._run(["apt-get", "install", "-qq", "--print-uris", *names], _RESOLVE_S)
        found = [Package(match["uri"], match["file"], int(match["size"])) for match in _OFFERED.finditer(text)]
        return sorted(found, key=lambda package: package.file)

    def fetch(self, packages: Iterable[Package], names: Iterable[str]) -> dict[str, Path]:
        """Download what `offered` returned for these names; apt checks each against the signed lists."""
        self._run(["apt-get", "install", "-qq", "-y", "--download-only", *names], _DOWNLOAD_S)
        files = {package.file: self.archives / package.file for package in packages}
        for file, path in files.items():
            if not path.exists():
                raise DriverUnavailable(f"apt-get downloaded no {file}", remedy=REMEDY)
        return files

    def depends(self, name: str) -> str:
        """Return what `apt-cache depends` prints of a package."""
        return self._run(["apt-cache", "depends", name], _RESOLVE_S)

    def download(self, name: str) -> Path:
        """Download one package without what it depends on."""
        before = set(self.place.glob("*.deb"))
        self._run(["apt-get", "download", "-q", name], _DOWNLOAD_S)
        files = set(self.place.glob("*.deb")) - before
        if len(files) != 1:
            raise DriverUnavailable(f"apt-get downloaded no {name}", remedy=REMEDY)
        return files.pop()

    def sources(self, packages: Iterable[Package]) -> str:
        """Return lines for sources.list: where these packages came from, without names and passwords of anybody."""
        text = self._run(["apt-get", "indextargets", "--format", _INDEX, "Identifier: Packages"], _RESOLVE_S)
        used = [unquote(package.uri) for package in packages]
        lines = []
        for uri, release, component in sorted({tuple(line.split(" ")) for line in text.splitlines()}):
            if "@" not in uri and any(one.startswith(unquote(uri)) for one in used):
                lines.append(f"deb {uri} {release} {component}\n")
        return "".join(lines)


def with_apt(place: Path, action: Callable[[Apt], _T], lists: Path = _LISTS) -> _T:
    """Return what `action` makes of apt: with the machine's lists, and again with fresh ones if these do not do.

    Raises:
        DriverUnavailable: apt is not there, or does not deliver.
    """
    lacks = missing_program()
    if lacks:
        raise DriverUnavailable(
            f"this machine has no {lacks}", remedy="do it on Debian or Ubuntu, and copy the result", lacks=lacks
        )
    if any(lists.glob("*_Packages*")):
        try:
            return action(_apt(place / "first", lists))
        except DriverUnavailable:
            pass  # a list that is older than what the archive keeps names files that are gone
    return action(_apt(place / "second", None))


def _apt(place: Path, lists: Path | None) -> Apt:
    place.mkdir(parents=True)
    return Apt(place, lists)
