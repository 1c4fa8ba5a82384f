"""A Debian root from the distribution's packages, used by both drivers. Needs the distribution's archive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import machines

from worldfork import Sandbox

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(machines.missing()), reason=machines.missing()),
]

USED = """
set -e
test -z "$(dpkg --audit)"
dpkg-query -W -f '${db:Status-Abbrev}\\n' | grep -c '^ii'
python -c 'import ssl, sqlite3, venv; print("python")'
python -m pip --version >/dev/null
git init -q repository && git -C repository status --short && echo git
su nobody -s /bin/sh -c 'id -un'
test -x /usr/bin/apt-get && test -s /etc/apt/sources.list && test ! -e /usr/sbin/policy-rc.d && echo apt
"""


def build() -> Any:
    """The image, as the program tells it."""
    line = [sys.executable, "-m", "worldfork.cli.main", "image", "build", "--from", "debian", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "WORLDFORK_ALLOW_TCG": "1"})
    assert done.returncode == 0, done.stderr
    assert "apt-get" in done.stderr  # it says beforehand what it does
    return json.loads(done.stdout)


def test_a_debian_of_the_distributions_packages(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDFORK_ALLOW_TCG", "1")
    status = Path("/var/lib/dpkg/status")
    before = status.read_bytes() if status.exists() else b""
    made = build()
    assert (status.read_bytes() if status.exists() else b"") == before
    assert Path(made["root"]).is_relative_to(home / "images/roots")
    packages = json.loads((Path(made["root"]).parent / "manifest.json").read_text())["packages"]
    for driver in ("namespace", "microvm"):
        with Sandbox.create(image=made["image"], driver=driver, network="none") as sandbox:
            result = sandbox.run("sh", ["-c", USED], timeout=120)
            assert result.stdout.split() == [str(packages), "python", "git", "nobody", "apt"], result.stderr
    # What is there is not made again.
    assert build()["root_image"] == made["root_image"]
