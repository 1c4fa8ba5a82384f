"""The article's flow in real machines, by the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import machines
from tests.conformance.world import make_world

from worldfork import Sandbox
from worldfork.cli.demo import LABEL
from worldfork.core.errors import ERROR_TABLE
from worldfork.rollout.demo_task import DEMO_REWARDS

PROGRAM = str(Path(sys.executable).with_name("worldfork"))

pytestmark = pytest.mark.root


def demo(base: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    line = [PROGRAM, "demo", "--driver", "microvm", "--base", f"dir:{base}", "--json"]
    return subprocess.run(
        line, env={**os.environ, **settings}, capture_output=True, text=True, timeout=580, check=False
    )


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())
def test_the_demo_in_machines(home: Path, tmp_path: Path) -> None:
    images, own = machines.prepare_images(home / "images"), home / "images"
    if images != own:
        # Where the home has its directory already, what is in it stays, and the kernels are the shared ones.
        images, own = (images / "kernels", own / "kernels") if own.exists() else (images, own)
        own.symlink_to(images)
    # Without a registry the world is the standard library, made in a tenth of the time; all of it comes back as well.
    nothing = f"file://{tmp_path}/none"
    no_registry = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_EXTRA_INDEX_URL": nothing, "PIP_FIND_LINKS": nothing}
    done = demo(make_world(tmp_path / "root"), WORLDFORK_ALLOW_TCG="1", **no_registry)
    assert done.returncode == 0, done.stderr + done.stdout
    story = json.loads(done.stdout)
    survived = [(one["name"], one["ok"]) for one in story["survived"]]
    assert [name for name, _ in survived].count("live process") == 1
    assert len(survived) == 11
    assert all(ok for _, ok in survived)
    assert story["rewards"] == pytest.approx(list(DEMO_REWARDS))
    kinds = story["machines"]
    assert kinds["memory"]["pause_s"] < kinds["memory"]["checkpoint_s"]
    assert kinds["memory"]["size_bytes"] > kinds["filesystem"]["size_bytes"]
    assert kinds["article"] == {"filesystem_restore_s": 1.9, "memory_restore_s": 0.9}
    assert [Sandbox.list(), [one for one in Sandbox.list_all_snapshots() if one.label == LABEL]] == [[], []]


def test_without_a_machine_the_remedy_is_named(home: Path, tmp_path: Path) -> None:
    (tmp_path / "root" / "usr").mkdir(parents=True)
    done = demo(tmp_path / "root", PATH=str(tmp_path))
    assert done.returncode == ERROR_TABLE["driver_unavailable"][1]
    assert json.loads(done.stderr)["error"]["remedy"]
    assert done.stdout == ""
