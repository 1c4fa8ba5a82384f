"""The checks of forks: ours pass them, and each of them fails where its fault was planted."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import faulty, machines
from tests.conformance.world import make_world
from tests.faulty import InPlace, Mended, Rewritten, Sound

from worldfork.testing.adapter import load_adapter
from worldfork.testing.checks import Check, Finding, Outcome
from worldfork.testing.live import ask, hold
from worldfork.testing.ours import name_of
from worldfork.testing.runner import run_check, run_checks
from worldfork.testing.trial import Trial

FAULTS = [
    (1, faulty.FirstState, "after resume 2 the file of turn 2 is ''"),
    (2, faulty.Once, "no such row"),
    (3, faulty.SharedDisk, "should see"),
    (4, faulty.LaterFile, "mixes instants"),
    (5, faulty.TemplateDisk, "at depth 1 the file of depth 0 is ''"),
    (6, faulty.LeftPaused, "does not answer after a snapshot that was called off"),
    (6, faulty.CannotFail, "a snapshot that does not exist gave"),
    (6, faulty.ForkedOnce, "the golden one was forked before"),
    (7, faulty.Deaf, "end of file"),
    (8, faulty.Pinned, "a file read after the source ended differs"),
    (9, faulty.Guarded, "another process could not read"),
    (9, faulty.Sessions, "another process could not read"),
    (10, faulty.OldestLost, "synced files are gone"),
    (10, faulty.Damaged, "differ from what was synced"),
    (12, faulty.Reused, "begins with 'left-0'"),
    (12, faulty.OldSize, "do not fit into a disk of 64 MiB"),
    (14, faulty.Sessions, "no snapshot"),
    (15, faulty.Short, "18432 arrived"),
    (16, faulty.WorkersImage, "after it was used"),
    (17, faulty.Deeper, "those at depth 8 to 10"),
    (18, faulty.NewestLost, "lacks some of the last writes"),
    (19, faulty.Twins, "drew an equal number from os.urandom"),
    (20, faulty.Stalled, "the first use of ssl took"),
    (24, faulty.Stalled, "the first command after going back took"),
    (27, faulty.BrokenTalk, "the source's talk went from"),
    (27, faulty.HungTalk, "is hung"),
    (28, faulty.Twins, "source and forks share"),
    (29, faulty.HostVariables, "in the caller's variables is in the source: variables"),
    (29, faulty.KeptVariables, "given to a command that is over is in the source: /root"),
]
KINDS = [
    "touch left-over",
    "rm plain",
    "chmod 600 mode",
    "rm -f dangling && touch dangling",
    "rm fifo && touch fifo",
    "rm -f hard-too && cp -p hard hard-too",
    "touch times",
    "truncate -s 5M sparse",
    "mv d/deep/file d/deep/else",
    "chmod 755 empty",
]
REWRITTEN = [
    (21, b"time.time()", b"time.time() - 3", 0, " s off, "),
    (21, b"timeout 1 sleep", b"timeout 8 sleep", 0, "ended with 124 after 8"),
    (22, b"getaddrinfo(name", b"getaddrinfo('no.' + name + '.invalid'", 0, "cannot resolve localhost"),
    (22, b"start = time.monotonic()", b"start = time.monotonic() - 120", 0, "three names took 120 s"),
    (23, b"family = [", b"family = 9 if number > 40 else [", 0, "of 50 parallel look-ups failed"),
    (25, b"bytes(1 << 20)", b"bytes(1 << 19)", 20, "524288 bytes arrived"),
    (26, b"for _ in range(2000)", b"for _ in range(256)", 0, "of 2000 failed"),
]


def _run(adapter: Sound, number: int) -> Finding:
    (found,) = run_checks(adapter, [number], named=f"tests.faulty:{type(adapter).__name__}")
    return found


def _fails(found: Finding, evidence: str) -> None:
    assert found.outcome is Outcome.FAIL, found
    assert evidence in found.detail, found


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("number", "fault", "evidence"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_fault_is_found(number: int, fault: type[Sound], evidence: str) -> None:
    _fails(_run(fault(), number), evidence)


@pytest.mark.parametrize("line", KINDS)
def test_a_difference_in_any_kind_of_file_is_found(line: str) -> None:
    adapter = Mended()
    adapter.line = line
    _fails(_run(adapter, 13), "in a fork of the first snapshot")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("number", "old", "new", "after_n", "evidence"), REWRITTEN)
def test_a_planted_fault_of_clock_or_network_is_found(
    number: int, old: bytes, new: bytes, after_n: int, evidence: str
) -> None:
    adapter = Rewritten()
    adapter.old, adapter.new, adapter.after_n = old, new, after_n
    _fails(_run(adapter, number), evidence)


def test_links_that_stay_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from worldfork.testing import network

    seen = iter([{"lo"}, {"lo", *(f"tap{number}" for number in range(31))}])
    monkeypatch.setattr(network, "_links", lambda: next(seen))
    _fails(_run(Sound(), 25), "31 network links stayed")


@pytest.mark.parametrize(
    ("number", "fault", "evidence"),
    [
        (11, faulty.Holey, "the memory of the fork is not what was written"),
        (19, faulty.MemoryTwins, "with memory: 15 of 16 siblings drew an equal number from random of a program"),
    ],
)
def test_planted_faults_of_memory_are_found(number: int, fault: type[InPlace], evidence: str) -> None:
    _fails(_run(fault(), number), evidence)


@pytest.mark.parametrize("number", [11, 19, 21])
def test_programs_that_live_through_a_snapshot_are_asked(number: int) -> None:
    found = _run(InPlace(), number)
    assert found.outcome is Outcome.PASS, found


def test_a_hook_renews_the_random_state_of_a_program_that_runs() -> None:
    async def draw(trial: Trial) -> None:
        box = await trial.create()
        await hold(box, "/etc/after-fork/hook")
        drawn = []
        for line in ("true", "true", "/etc/after-fork/hook"):
            await ask(box, "seed", 1)
            await box.sh(line)
            drawn.append((await ask(box, "random"))[0])
        assert drawn[0] == drawn[1] != drawn[2]

    found = asyncio.run(run_check(Sound(), Check(1, "", "", (), draw, 30)))
    assert found.outcome is Outcome.PASS, found


@pytest.mark.timeout(600)
def test_the_namespace_driver_passes() -> None:
    named = name_of("namespace")
    findings = run_checks(load_adapter(named), named=named)
    assert [each for each in findings if each.outcome is Outcome.FAIL] == []
    assert [each.number for each in findings if each.outcome is Outcome.NOT_APPLICABLE] == [11]
    assert len(findings) == 29


@pytest.mark.timeout(120)
def test_the_verb() -> None:
    done = _verify("--driver", "namespace", "--only", "11,5", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [(each["number"], each["outcome"]) for each in told["checks"]] == [(5, "pass"), (11, "not applicable")]
    done = _verify("--adapter", "tests.faulty:Short", "--only", "15")
    assert done.returncode == 1
    assert "18432 arrived" in done.stdout
    assert "1 check in" in done.stdout
    for wrong in (("--only", "30"), ("--only", "x"), ("--driver", "nothing"), ("--adapter", "nothing")):
        assert _verify(*wrong).returncode == 2, wrong


MEMORY = (5, 11, 19, 21, 27, 28)
"""Checks that memory makes hard; all of them would take a quarter of an hour where QEMU interprets the guests."""


@pytest.mark.timeout(900)
def test_virtual_machines_pass_with_both_kinds_of_snapshots(fresh_home: Path, tmp_path: Path) -> None:
    lacking = machines.missing()
    if lacking:
        pytest.skip(lacking)
    images = machines.prepare_images(fresh_home / "images")
    if images != fresh_home / "images":
        (fresh_home / "images").symlink_to(images)
    environ = {"WORLDFORK_HOME": str(fresh_home), "WORLDFORK_ALLOW_TCG": "1"}
    base = f"dir:{make_world(tmp_path / 'world')}"
    line = ["--driver", "microvm", "--base", base, "--only", ",".join(map(str, MEMORY)), "--json"]
    done = _verify(*line, **environ)
    told = json.loads(done.stdout)["checks"]
    assert [(each["number"], each["outcome"], each["detail"]) for each in told] == [(n, "pass", "") for n in MEMORY]
    assert done.returncode == 0, done.stderr
    # What they could not start from is said once, before any check.
    done = _verify("--driver", "microvm", "--only", "5", **environ)
    assert (done.returncode, "--base dir:PATH" in done.stderr) == (20, True), done.stderr


def _verify(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "worldfork.cli.main", "verify", *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, env={**os.environ, **environ})
