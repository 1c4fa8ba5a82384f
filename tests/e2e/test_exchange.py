"""Snapshots that move between homes, by the program itself, and what a sandbox sees afterwards."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.buckets import BUCKET, s3_server

PROGRAM = str(Path(sys.executable).with_name("worldfork"))
LIMIT_S = 100
SHOW = "cd /workspace && find . | sort | xargs ls -ldn --time-style=+%s | cut -d' ' -f1,2,3,4,6- && cat kept/two"

Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def homes(tmp_path: Path, home: Path) -> dict[str, Path]:
    """The home of the run, and one of another machine."""
    return {"here": home, "there": tmp_path / "there"}


def run(where: Path, *arguments: str, stdin: bytes = b"", code: int = 0) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        [PROGRAM, *arguments],
        input=stdin,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "WORLDFORK_HOME": str(where)},
    )
    assert done.returncode == code, done.stderr.decode()
    return done


def line(where: Path, *arguments: str) -> str:
    return run(where, *arguments).stdout.decode().strip()


def world(where: Path, *create: str) -> tuple[str, str]:
    """A snapshot of two layers of its own; returns its id, and what it looks like inside."""
    sandbox = line(where, "create", "--network", "none", *create)
    try:
        run(where, "exec", sandbox, "--", "sh", "-c", "mkdir -p a/b; echo one > a/one; ln a/one a/b/one; ln -s x a/l")
        line(where, "checkpoint", sandbox)
        run(where, "exec", sandbox, "--", "sh", "-c", "rm a/l; mkdir kept; echo two > kept/two; rm -r a; mkdir a")
        return line(where, "checkpoint", "--label", "moves", sandbox), looks(where, sandbox)
    finally:
        run(where, "rm", sandbox)


def looks(where: Path, sandbox: str) -> str:
    return run(where, "exec", sandbox, "--", "sh", "-c", SHOW).stdout.decode()


def restored(where: Path, snapshot: str) -> str:
    sandbox = line(where, "create", "--snapshot", snapshot)
    try:
        return looks(where, sandbox)
    finally:
        run(where, "rm", sandbox)


def test_a_file_carries_a_world(homes: dict[str, Path], tmp_path: Path) -> None:
    here, there = homes["here"], homes["there"]
    snapshot, seen = world(here)
    archive = tmp_path / "world.wfa"
    done = run(here, "export", snapshot, str(archive))
    assert re.fullmatch(r"b3:[0-9a-f]{64}\n", done.stdout.decode())
    assert b"does not travel" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["world.wfa"]
    assert run(here, "export", snapshot, "-").stdout == archive.read_bytes()
    assert line(there, "import", str(archive)) == snapshot
    assert run(there, "import", "-", stdin=archive.read_bytes()).stdout.decode().strip() == snapshot
    assert run(there, "export", snapshot, "-").stdout == archive.read_bytes()
    assert restored(there, snapshot) == seen
    (listed,) = json.loads(run(there, "snapshots", "--json").stdout)
    assert (listed["snapshot_id"], listed["label"]) == (snapshot, "moves")


def test_a_pipe_carries_it_too(homes: dict[str, Path]) -> None:
    snapshot, seen = world(homes["here"])
    environment = {name: {**os.environ, "WORLDFORK_HOME": str(path)} for name, path in homes.items()}
    with subprocess.Popen(
        [PROGRAM, "export", snapshot, "-"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment["here"]
    ) as sending:
        found = subprocess.run(
            [PROGRAM, "import", "-", "--json"],
            stdin=sending.stdout,
            capture_output=True,
            timeout=LIMIT_S,
            check=True,
            env=environment["there"],
        )
    assert sending.returncode == 0
    assert json.loads(found.stdout)["status"] == "completed"
    assert restored(homes["there"], snapshot) == seen


def test_a_world_on_a_directory_needs_it_no_more(homes: dict[str, Path], tmp_path: Path, small_root: Path) -> None:
    snapshot, seen = world(homes["here"], "--base", f"dir:{small_root}")
    run(homes["here"], "export", snapshot, str(tmp_path / "archive"))
    small_root.rename(tmp_path / "away")
    run(homes["there"], "import", str(tmp_path / "archive"))
    assert restored(homes["there"], snapshot) == seen


@pytest.mark.parametrize("kind", ["directory", "s3"])
def test_push_and_pull(
    homes: dict[str, Path], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    remote = str(tmp_path / "remote")
    if kind == "s3":
        request.getfixturevalue("s3")
        remote = f"s3://{BUCKET}/{tmp_path.name}"
    here, there = homes["here"], homes["there"]
    snapshot, seen = world(here)
    sent = json.loads(run(here, "push", snapshot, remote, "--json").stdout)
    assert sent["snapshots"] == [snapshot]
    assert len(sent["layers_sent"]) >= 3
    again = json.loads(run(here, "push", snapshot, remote, "--json").stdout)
    assert again == {"snapshots": [snapshot], "layers_sent": [], "layers_there": sent["layers_sent"]}
    assert line(there, "pull", remote, snapshot) == snapshot
    assert restored(there, snapshot) == seen
    missing = "sn-" + "a" * 16
    partly = run(there, "pull", remote, snapshot, missing, code=3)
    assert partly.stdout.decode().strip() == snapshot
    assert missing in partly.stderr.decode()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server(monkeypatch) as address:
        yield address


@pytest.fixture
def small_root(tmp_path: Path) -> Path:
    """A root file system with what these tests run in it."""
    from bench.harness import Options
    from bench.rootfs import small_root as make

    root = make(Options(home=tmp_path / "made"))
    for program in ("mkdir", "ln", "rm", "find", "sort", "xargs", "ls", "cut", "cat", "mv"):
        subprocess.run(["cp", "--parents", f"/usr/bin/{program}", str(root)], check=True)
        needed = subprocess.run(["ldd", f"/usr/bin/{program}"], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+)\s+\(0x", needed):
            subprocess.run(["cp", "-L", "--parents", library, str(root)], check=True)
    return root


def test_a_terminal_is_refused(homes: dict[str, Path]) -> None:
    parent, child = pty.openpty()
    for verb in (["export", "sn-" + "a" * 16, "-"], ["import", "-"]):
        done = subprocess.run(
            [PROGRAM, *verb],
            stdin=child,
            stdout=child,
            stderr=subprocess.PIPE,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, "WORLDFORK_HOME": str(homes["there"])},
        )
        assert done.returncode in (2, 13), done.stderr
        assert b"terminal" in done.stderr or b"no snapshot" in done.stderr
    os.close(parent)
    os.close(child)


def test_what_is_no_archive(homes: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"PK\3\4 and so on, and so on")
    assert b"damaged" in run(homes["there"], "import", str(tmp_path / "file"), code=12).stderr
    assert run(homes["there"], "import", str(tmp_path / "none"), code=13).stdout == b""
    run(homes["there"], "export", "sn-" + "a" * 16, str(tmp_path / "out"), code=13)
    run(homes["there"], "export", "-", "--json", "-", code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]
