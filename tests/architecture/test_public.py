"""What `import worldfork` gives, costs and touches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.architecture import rules

import worldfork

PUBLIC = [
    "AsyncRollout",
    "AsyncSandbox",
    "CheckpointType",
    "CommandExitReason",
    "CommandResult",
    "ConfigError",
    "Episode",
    "FailureKind",
    "ForkResult",
    "ForkResults",
    "Group",
    "NotFound",
    "OutputMode",
    "ProcessInfo",
    "ProcessStatus",
    "Rollout",
    "Sandbox",
    "SandboxDied",
    "SandboxError",
    "SandboxInfo",
    "SandboxStatus",
    "SnapshotInfo",
    "SnapshotLevel",
    "SnapshotStatus",
    "SnapshotStore",
    "SnapshotWaitCondition",
    "StdinMode",
    "Task",
    "TaskLimits",
    "WorldforkError",
    "async_open_rollout",
    "async_run_group",
    "async_world",
    "load_tasks",
    "open_rollout",
    "run_group",
    "world",
]

PROBE = """
import json, os, sys, threading, time
before = set(sys.modules)
descriptors = set(os.listdir("/proc/self/fd"))
start_s = time.perf_counter()
import {module}
took_s = time.perf_counter() - start_s
foreign = {{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)
print(json.dumps({{
    "took_s": took_s,
    "foreign": sorted(foreign - {{"worldfork"}}),
    "threads": threading.active_count(),
    "descriptors": len(set(os.listdir("/proc/self/fd")) - descriptors),
}}))
"""


def probe(module: str, home: Path, path: str = "") -> dict[str, object]:
    """Import `module` in a new interpreter that may write below `home` alone, and say what that did."""
    environ = {**os.environ, "HOME": str(home), "XDG_DATA_HOME": str(home / "data"), "PYTHONPATH": path}
    environ |= {"WORLDFORK_HOME": str(home / "worldfork"), "TMPDIR": str(home)}
    program = PROBE.format(module=module)
    line = [sys.executable, "-B", "-W", "error", "-c", program]
    done = subprocess.run(line, cwd=home, env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    facts = json.loads(done.stdout)
    facts["written"] = sorted(path.name for path in home.iterdir())
    assert isinstance(facts, dict)
    return facts


def test_public_names_are_exact() -> None:
    assert sorted(worldfork.__all__) == PUBLIC


def test_public_names_are_there_and_documented() -> None:
    assert [name for name in PUBLIC if not getattr(worldfork, name).__doc__] == []


def test_a_room_is_never_hidden_by_a_public_name() -> None:
    rooms = {room for floor in rules.FLOORS for room in floor}
    assert rooms & set(PUBLIC) == set()


def test_import_is_quick(tmp_path: Path) -> None:
    took_s = [probe("worldfork", tmp_path)["took_s"] for _ in range(5)]
    assert min(took_s) < 0.1  # type: ignore[type-var, operator]


def test_import_touches_nothing(tmp_path: Path) -> None:
    facts = probe("worldfork", tmp_path)
    assert (facts["foreign"], facts["threads"], facts["descriptors"], facts["written"]) == ([], 1, 0, [])


def test_the_probe_sees_a_planted_fault(tmp_path: Path) -> None:
    home, plants = tmp_path / "home", tmp_path / "plants"
    home.mkdir()
    plants.mkdir()
    (plants / "guest.py").write_text("")
    (plants / "planted.py").write_text(
        "import os, threading, time, guest\n"
        "open(os.path.join(os.environ['HOME'], 'written'), 'w').close()\n"
        "kept = os.open('/dev/null', os.O_RDONLY)\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "time.sleep(0.1)\n"
    )
    facts = probe("planted", home, str(plants))
    assert facts["foreign"] == ["guest", "planted"]
    assert (facts["threads"], facts["descriptors"], facts["written"]) == (2, 1, ["written"])
    assert facts["took_s"] >= 0.1  # type: ignore[operator]
