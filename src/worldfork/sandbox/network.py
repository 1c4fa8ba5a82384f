"""What a sandbox on the host's network takes from the host: names, proxies, certificates, pip's settings."""

from __future__ import annotations

import configparser
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROXY_SETTINGS = (
    "http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy",
    "HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY",
)  # fmt: skip
CERTIFICATE_SETTINGS = (
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO",
)  # fmt: skip
PIP_SETTINGS = (
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES", "PIP_CONSTRAINT",
    "PIP_FIND_LINKS", "PIP_DISABLE_PIP_VERSION_CHECK", "PIP_PROXY", "UV_INDEX_URL", "UV_DEFAULT_INDEX",
)  # fmt: skip
HOST_SETTINGS = PROXY_SETTINGS + CERTIFICATE_SETTINGS + PIP_SETTINGS
"""The variables that a sandbox on the host's network takes over; `create(host_settings=...)` replaces the list."""

_PIP_CONFIG_KEYS = (
    "index-url", "extra-index-url", "trusted-host", "timeout", "retries", "constraint", "find-links", "cert", "proxy",
)  # fmt: skip
_INDEX_SETTINGS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX")
_SHARED = ("/usr/", "/etc/ssl/certs", "/etc/pki/")
"""Below these a `host` world has the host's own files."""
_INSIDE = "/dev/.worldfork"


@dataclass
class HostNetwork:
    """What to hand to a sandbox on the host's network."""

    env: dict[str, str] = field(default_factory=dict)
    binds: list[tuple[str, str]] = field(default_factory=list)
    """(host path, path inside): files and directories that the variables name, read-only."""
    resolv_conf: str = ""

    def _share(self, path: str) -> str:
        """Return where `path` of the host can be read inside."""
        if path.startswith(_SHARED):
            return path
        source = os.path.realpath(path)
        for known, target in self.binds:
            if known == source:
                return target
        target = f"{_INSIDE}/host-{len(self.binds)}"
        self.binds.append((source, target))
        return target

    def _take(self, name: str, value: str) -> None:
        """Take one setting over; a value that names only what is missing on the host is left out."""
        words = []
        for word in value.split():
            path = word.removeprefix("file://")
            if not path.startswith("/"):
                words.append(word)
            elif not os.path.exists(path):
                continue
            elif name in _INDEX_SETTINGS:
                # The pages of an index link to files beside it (PEP 503: ../../packages/...).
                above, _, own = path.rstrip("/").rpartition("/")
                words.append(f"file://{self._share(above)}/{own}" if above else word)
            else:
                words.append(word[: len(word) - len(path)] + self._share(path))
        if words:
            self.env[name] = " ".join(words)


def host_network(environ: Mapping[str, str], names: tuple[str, ...] = HOST_SETTINGS) -> HostNetwork:
    """Collect the host's settings that `names` lists; pip's configuration files count as its variables."""
    network = HostNetwork(resolv_conf=_read(Path("/etc/resolv.conf")))
    found = {name: value for name, value in _pip_configuration(environ).items() if name in names}
    found |= {name: environ[name] for name in names if environ.get(name)}
    for name in sorted(found):
        network._take(name, found[name])
    return network


def _pip_configuration(environ: Mapping[str, str]) -> dict[str, str]:
    home = Path(environ.get("HOME", "/root"))
    files = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf")]
    files += [home / ".pip/pip.conf", home / ".config/pip/pip.conf"]
    if environ.get("PIP_CONFIG_FILE"):
        files.append(Path(environ["PIP_CONFIG_FILE"]))
    settings: dict[str, str] = {}
    for file in files:
        parser = configparser.RawConfigParser()
        with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
            parser.read_string(file.read_text())
        for section in ("global", "install"):
            if parser.has_section(section):
                settings |= {key.replace("_", "-"): value for key, value in parser.items(section)}
    names = {"timeout": "DEFAULT_TIMEOUT"}
    return {
        "PIP_" + names.get(key, key.upper().replace("-", "_")): " ".join(settings[key].split())
        for key in _PIP_CONFIG_KEYS
        if key in settings
    }


def _read(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""
