from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.cli.conftest import Invoke

from worldfork.cli import upkeep
from worldfork.core.settings import Settings
from worldfork.sandbox.probe import ProbeResult
from worldfork.store.collect import CollectReport
from worldfork.store.sweep import SweepReport

LACKING = ProbeResult("machines: QEMU", False, "this machine has no qemu", "apt-get install qemu")


def play_probe(monkeypatch: pytest.MonkeyPatch, *results: ProbeResult, machines: Sequence[ProbeResult] = ()) -> None:
    async def probe(settings: Settings) -> list[ProbeResult]:
        return list(results)

    monkeypatch.setattr(upkeep, "probe", probe)
    monkeypatch.setattr(upkeep, "probe_machines", lambda images, allow_tcg: list(machines) or [LACKING])


GOOD = ProbeResult("root, overlay mounted the new way", True, "a command ran")
BAD = ProbeResult("user namespace", False, "refused", "sudo sysctl -w kernel.x=0")
WORSE = ProbeResult("network host", False, "refused too", "sudo sysctl -w kernel.x=0")


def test_doctor_is_content_while_one_way_works(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    play_probe(monkeypatch, GOOD, BAD, WORSE)
    result = invoke("doctor")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[1].split()[0] == "works"
    assert lines[2].split()[0] == "NOT"
    assert result.stdout.count("sudo sysctl -w kernel.x=0") == 1
    assert "For user namespace, network host:" in result.stdout


def test_doctor_ends_with_20_where_nothing_starts(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    play_probe(monkeypatch, BAD, WORSE)
    assert invoke("doctor").exit_code == 20


def test_doctor_says_what_machines_lack(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    play_probe(monkeypatch, GOOD)
    result = invoke("doctor")
    assert result.exit_code == 0
    assert result.stdout.endswith("For machines: QEMU:\n  apt-get install qemu\n")


@pytest.mark.parametrize(("lacks", "code"), [(False, 0), (True, 20)])
def test_machines_are_one_way_to_start_if_nothing_lacks(
    monkeypatch: pytest.MonkeyPatch, invoke: Invoke, lacks: bool, code: int
) -> None:
    there = ProbeResult("machines: mke2fs", True, "/sbin/mke2fs")
    play_probe(monkeypatch, BAD, machines=[there, LACKING] if lacks else [there])
    assert invoke("doctor").exit_code == code


def test_doctor_as_json(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    play_probe(monkeypatch, GOOD, BAD)
    assert json.loads(invoke("doctor", "--json").stdout) == [
        {"name": GOOD.name, "ok": True, "detail": "a command ran", "remedy": ""},
        {"name": BAD.name, "ok": False, "detail": "refused", "remedy": "sudo sysctl -w kernel.x=0"},
        {"name": LACKING.name, "ok": False, "detail": LACKING.detail, "remedy": LACKING.remedy},
    ]


def play_store(monkeypatch: pytest.MonkeyPatch, swept: SweepReport, collected: CollectReport) -> None:
    store = SimpleNamespace(collect=lambda: collected)
    here = SimpleNamespace(sweep=lambda: swept, store=store)
    monkeypatch.setattr(upkeep, "sweep_ends", lambda _: ["sn-a"] if swept.holders else [])
    monkeypatch.setattr(upkeep, "place", lambda: here)


def test_sweep_says_what_went(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    play_store(monkeypatch, SweepReport(holders=["sb-a"], drafts=["ly-a"]), CollectReport(["ly-b"], ["memory/sn-b"]))
    assert json.loads(invoke("sweep", "--json").stdout) == {
        "sandboxes": ["sb-a"],
        "snapshots": ["sn-a"],
        "layers": ["ly-a", "ly-b"],
        "leftovers": ["memory/sn-b"],
        "failures": [],
    }
    rows = dict(line.split() for line in invoke("sweep").stdout.splitlines())
    assert rows == {"removed": "count", "sandboxes": "1", "snapshots": "1", "layers": "2", "leftovers": "1"}


def test_sweep_tells_what_stays(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    play_store(monkeypatch, SweepReport(failures=[("layers/ly-a", "busy")]), CollectReport())
    result = invoke("sweep")
    assert result.exit_code == 3
    assert result.stderr == "worldfork: layers/ly-a stays: busy\n"


def test_bench_hands_over_to_the_benches(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(os, "chdir", asked.append)
    monkeypatch.setattr(os, "execv", lambda path, line: asked.append(line))
    line = ["fork", "bursts", "--quick", "--json", "figures.json", "--home", "/tmp/h", "-h"]
    invoke("bench", *line)
    assert (asked[0] / "bench" / "main.py").is_file()
    assert asked[1] == [sys.executable, "-m", "bench", *line]
