"""The whole way: build a world, freeze it, restore it, fork it."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

import pytest
from tests.conformance.conftest import Sandboxes

from worldfork import AsyncSandbox, CheckpointType, CommandExitReason, Sandbox

BUGGY = b"def add(a, b):\n    return a - b\n"
TEST = (
    b"from buggy import add\ndef test_add():\n    assert add(2, 2) == 4\ndef test_none():\n    assert add(0, 0) == 0\n"
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.behaviour("flow-1")
def test_the_flow_with_packages_from_the_registry(sandboxes: Sandboxes) -> None:
    world = sandboxes.keep(Sandbox.create())
    installed = world.run("pip", ["install", "numpy", "pandas", "requests", "pytest"])
    if installed.exit_code != 0 and not _registry():
        pytest.skip("the package registry cannot be reached from here")
    assert installed.exit_code == 0, installed.stderr
    world.write_file("/workspace/buggy.py", BUGGY)
    world.write_file("/workspace/test_buggy.py", TEST)
    snap = world.checkpoint(checkpoint_type=CheckpointType.FILESYSTEM)
    one = sandboxes.keep(Sandbox.create(snapshot_id=snap.snapshot_id))
    results = snap.fork(8)
    for child in results.unwrap():
        sandboxes.keep(child)
    twins = world.fork(2)
    for child in twins.unwrap():
        sandboxes.keep(child)
    r = one.run("python", ["-m", "pytest", "-q"], timeout=60)
    assert (r.exit_code, r.reason) == (1, CommandExitReason.EXITED)
    assert "1 failed, 1 passed" in r.stdout
    assert r.stdout_bytes.decode() == r.stdout
    line = one.sh("cd /workspace && pytest -q 2>&1 | tail -5", timeout=60)
    assert "1 failed, 1 passed" in line.stdout
    mend = "sed -i 's/a - b/a + b/' /workspace/buggy.py && python -m pytest -q"
    assert [child.sh(mend, timeout=60).exit_code for child in results.unwrap()[:2]] == [0, 0]
    assert "1 failed" in world.run("python", ["-m", "pytest", "-q"], timeout=60).stdout
    assert one.run("python", ["-c", "import numpy, pandas, requests; print(numpy.arange(3).sum())"]).stdout == "3\n"


def _registry() -> bool:
    line = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", "/dev/null/x", "pytest"]
    return "No matching distribution" not in subprocess.run(line, capture_output=True, text=True, check=False).stderr


@pytest.mark.behaviour("flow-1")
def test_the_flow_with_the_standard_library(sandboxes: Sandboxes, driver: str) -> None:
    world = sandboxes.keep(Sandbox.create(driver=driver))
    assert world.run("pip", ["--version"]).ok
    world.write_file("/workspace/buggy.py", BUGGY)
    world.write_file("/workspace/check.py", TEST + b"test_none()\ntest_add()\nprint('passed')\n")
    snap = world.checkpoint(checkpoint_type=CheckpointType.FILESYSTEM)
    one = sandboxes.keep(Sandbox.create(snapshot_id=snap.snapshot_id))
    results = snap.fork(8)
    children = [sandboxes.keep(child) for child in results.unwrap()]
    twins = [sandboxes.keep(child) for child in world.fork(2).unwrap()]
    r = one.run("python", ["check.py"], timeout=60)
    assert (r.exit_code, r.reason, r.stdout, r.stdout_bytes) == (1, CommandExitReason.EXITED, "", b"")
    assert "AssertionError" in r.stderr
    line = one.sh("cd /workspace && python check.py 2>&1 | tail -5", timeout=60)
    assert "AssertionError" in line.stdout
    for child in (children[0], twins[1]):
        assert child.sh("sed -i 's/a - b/a + b/' buggy.py && python check.py", timeout=60).stdout == "passed\n"
    for child in (children[1], twins[0], world, one):
        assert child.read_file("buggy.py") == BUGGY


@pytest.mark.behaviour("flow-2")
def test_both_doors_have_the_same_names_and_arguments() -> None:
    names = {name for name, _ in inspect.getmembers(Sandbox) if not name.startswith("_")}
    other = {name for name, _ in inspect.getmembers(AsyncSandbox) if not name.startswith("_")}
    assert names - other == {"bind_outcome"}  # there an attribute of the handle itself
    assert other - names <= {"stream", "stat"}
    for name in sorted(names & other):
        one, two = getattr(Sandbox, name), getattr(AsyncSandbox, name)
        if not callable(one) or not callable(two):
            continue
        mine, theirs = inspect.signature(one), inspect.signature(two)
        if any(p.kind is p.VAR_KEYWORD for p in mine.parameters.values()):
            # Hands the rest on; what it names comes in the same order.
            named = [p for p in mine.parameters if mine.parameters[p].kind is not inspect.Parameter.VAR_KEYWORD]
            assert named == list(theirs.parameters)[: len(named)], name
            continue
        assert list(mine.parameters) == list(theirs.parameters), name
        defaults = {p.name: p.default for p in theirs.parameters.values()}
        assert {p.name: p.default for p in mine.parameters.values()} == defaults, name


SDK = """
Sandbox.create(image=None, cpus=None, memory_mb=None, disk_mb=None, timeout_secs=None, allow_internet_access=True,
               snapshot_id=None, name=None, wait=True)
Sandbox.connect(sandbox_id)
Sandbox.get_or_create(name, resume=True)
Sandbox.get_snapshot(snapshot_id)
Sandbox.delete_snapshot(snapshot_id)
Sandbox.list()
box.checkpoint(wait=True, timeout=300, poll_interval=1.0, checkpoint_type=None, wait_until="local_ready")
box.suspend(wait=True, timeout=300, poll_interval=1.0)
box.list_snapshots()
box.info()
box.close()
box.terminate()
box.run(command, args=None, env=None, working_dir=None, timeout=None, user=None)
box.start_process(command, args=None, env=None, working_dir=None, stdin_mode="closed", stdout_mode="capture",
                  stderr_mode="capture", user=None, name=None)
box.list_processes()
box.get_process(p)
box.kill_process(p)
box.send_signal(p, signal)
box.write_stdin(p, data)
box.close_stdin(p)
box.get_stdout(p)
box.get_stderr(p)
box.get_output(p)
box.follow_stdout(p)
box.follow_stderr(p)
box.follow_output(p)
box.read_file(path)
box.write_file(path, content)
box.upload_file(local_path, path)
box.delete_file(path)
box.list_directory(path)
"""
"""The calls of the SDK that is mirrored, with its argument names and defaults."""


@pytest.mark.behaviour("flow-2")
def test_names_and_arguments_are_those_of_the_mirrored_sdk() -> None:
    for statement in ast.parse(SDK).body:
        assert isinstance(statement, ast.Expr)
        call = statement.value
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Attribute)
        name = call.func.attr
        function = inspect.signature(getattr(AsyncSandbox, name)).parameters
        parameters = {key: p for key, p in function.items() if key != "self"}
        positional = [a.id for a in call.args if isinstance(a, ast.Name)]
        assert list(parameters)[: len(positional)] == positional, name
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for keyword in call.keywords:
            assert keyword.arg is not None
            if keyword.arg in parameters:
                assert isinstance(keyword.value, ast.Constant)
                default = parameters[keyword.arg].default
                # None says "as a fresh sandbox has it", which is what the SDK's own default is.
                assert default in (keyword.value.value, None), f"{name}({keyword.arg})"
            else:
                assert takes_any, f"{name} has no {keyword.arg}"
