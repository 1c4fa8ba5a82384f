"""A played apt: programs that answer as apt does, on a PATH of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

OFFERED = (
    "'http://a.example/debian/pool/b/base/base_1%3a2.0_all.deb' base_1%3a2.0_all.deb 100 SHA256:00",
    "'http://a.example/debian/pool/a/apt/apt_2.6_amd64.deb' apt_2.6_amd64.deb 30 SHA256:00",
)
TARGETS = (
    "http://a.example/debian/ stable main",
    "http://a.example/debian/ stable main",
    "http://b.example/others/ stable main",
    "http://name:word@a.example/debian/ stable secret",
)
DUMPED = (
    'APT::Architecture "amd64";',
    'APT::Architectures:: "i386";',
    'Acquire::http::Proxy "http://proxy.example:3128";',
    'DPkg::Post-Invoke:: "rm -f /var/cache/apt/archives/*.deb";',
    'APT::Update::Post-Invoke:: "touch /forbidden";',
)
_APT_GET = """
echo "$*" >>{log}
case "$*" in
*--print-uris*) {offer} ;;
*--download-only*) {fetch} ;;
update*) {update} ;;
indextargets*) printf '%s\\n' {targets} ;;
esac
"""


class PlayedApt:
    """Programs in `directory/bin`, which is made the PATH."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin = directory / "bin"
        self.log = directory / "apt.log"
        self.bin.mkdir()
        monkeypatch.setenv("PATH", f"{self.bin}:/usr/bin:/bin:/usr/sbin:/sbin")
        self.program("apt-config", f"printf '%s\\n' {_words(DUMPED)}")
        self.program("apt-cache", "")
        self.answers()

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def answers(self, *, offer: str = "", fetch: str = "", update: str = "") -> None:
        """Play apt-get; what is not given works."""
        # Where apt keeps what it downloads is in the settings that it is given.
        keep = 'cd "$(sed -n \'s/^Dir::Cache::archives "\\(.*\\)";$/\\1/p\' $APT_CONFIG)" && touch '
        files = " ".join(line.split(" ")[1] for line in OFFERED)
        text = _APT_GET.format(
            log=self.log,
            offer=offer or f"printf '%s\\n' {_words(OFFERED)}",
            fetch=fetch or keep + files,
            update=update or ":",
            targets=_words(TARGETS),
        )
        self.program("apt-get", text)

    def orders(self) -> list[str]:
        """What apt-get was told, in order."""
        return self.log.read_text().splitlines() if self.log.exists() else []


def _words(lines: tuple[str, ...]) -> str:
    return " ".join('"' + line.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"' for line in lines)
