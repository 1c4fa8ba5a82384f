"""What each verb asks of the library, prints and ends with. The library itself is played."""

from __future__ import annotations

import json

import pytest
from tests.unit.cli import played
from tests.unit.cli.conftest import Invoke

from worldfork.records.snapshot import CheckpointType

Library = type[played.PlayedSandbox]


def test_create_passes_on_only_what_was_given(library: Library, invoke: Invoke) -> None:
    result = invoke("create")
    assert (result.exit_code, result.stdout) == (0, "sb-new\n")
    assert library.calls[0] == ("create", {"detached": True})
    assert ("close", "sb-new") in library.calls


def test_create_takes_every_option(library: Library, invoke: Invoke) -> None:
    line = "create --base dir:/srv/root --network none --name box --cpus 1.5 --memory-mb 512 --disk-mb 100 --pids 64"
    line += " --timeout 60 -e A=1 -e B=x=y -u 1000:1000 -w /tmp --seed 7 --driver microvm"
    assert invoke(*line.split()).exit_code == 0
    assert library.calls[0] == (
        "create",
        {
            "detached": True,
            "base": "dir:/srv/root",
            "network": "none",
            "driver": "microvm",
            "name": "box",
            "cpus": 1.5,
            "memory_mb": 512,
            "disk_mb": 100,
            "pids": 64,
            "timeout_secs": 60.0,
            "env": {"A": "1", "B": "x=y"},
            "user": "1000:1000",
            "working_dir": "/tmp",
            "seed": 7,
        },
    )


def test_create_from_a_snapshot_names_no_base(library: Library, invoke: Invoke) -> None:
    invoke("create", "--snapshot", "sn-a")
    assert library.calls[0] == ("create", {"detached": True, "snapshot_id": "sn-a"})


@pytest.mark.parametrize("pair", ["A", "=1", ""])
def test_a_variable_needs_a_name_and_a_value(library: Library, invoke: Invoke, pair: str) -> None:
    result = invoke("create", "-e", pair)
    assert result.exit_code == 2
    assert "NAME=VALUE" in result.stderr
    assert library.calls == []


def test_create_as_json_is_the_sandbox(library: Library, invoke: Invoke) -> None:
    facts = json.loads(invoke("create", "--json").stdout)
    assert facts["sandbox_id"] == "sb-new"
    assert {"name", "status", "base", "network", "limits", "snapshot_id", "created_at", "detached"} <= set(facts)
    assert facts["status"] == "running"


def test_ls(library: Library, invoke: Invoke) -> None:
    assert invoke("ls").stdout == "No sandbox is live.\n"
    assert json.loads(invoke("ls", "--json").stdout) == []
    library.live[:] = [played.sandbox_info("sb-a", name="box"), played.sandbox_info("sb-b", snapshot_id="sn-a")]
    lines = invoke("ls").stdout.splitlines()
    assert lines[0].split()[:2] == ["sandbox", "name"]
    assert "box" in lines[1]
    assert "sn-a" in lines[2]
    assert invoke("ls", "-q").stdout == "sb-a\nsb-b\n"
    assert [each["sandbox_id"] for each in json.loads(invoke("ls", "--json").stdout)] == ["sb-a", "sb-b"]


def test_rm_ends_each_and_says_which(library: Library, invoke: Invoke) -> None:
    result = invoke("rm", "sb-a", "sb-b")
    assert (result.exit_code, result.stdout) == (0, "sb-a\nsb-b\n")
    assert library.calls == [("terminate", "sb-a"), ("terminate", "sb-b")]


def test_rm_of_a_name_tells_the_id(library: Library, invoke: Invoke) -> None:
    library.live[:] = [played.sandbox_info("sb-a", name="box")]
    assert json.loads(invoke("rm", "box", "sb-b", "--json").stdout) == {"removed": ["sb-a", "sb-b"]}
    assert invoke("rm", "box").stdout == "sb-a\n"


def test_rm_goes_on_past_one_that_is_not_there(library: Library, invoke: Invoke) -> None:
    result = invoke("rm", "sb-missing", "sb-b", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout) == {"removed": ["sb-b"]}
    assert json.loads(result.stderr)["error"]["code"] == "not_found"


def test_rm_of_nothing_that_is_there_is_not_partial(library: Library, invoke: Invoke) -> None:
    result = invoke("rm", "sb-missing")
    assert result.exit_code == 13
    assert result.stderr == "worldfork: there is no sandbox 'sb-missing'.\n  try: worldfork ls\n"


def test_checkpoint(library: Library, invoke: Invoke) -> None:
    result = invoke("checkpoint", "sb-a", "--durable", "--label", "first", "--stop", "--verify", "make check")
    assert (result.exit_code, result.stdout) == (0, "sn-new\n")
    assert result.stderr == "worldfork: /dev/shm holds 1 file\n"
    options = {"stop": True, "label": "first", "level": "local", "timeout": 300.0, "wait_until": "completed"}
    options["verify"] = "make check"
    assert library.calls == [("checkpoint", options)]


def test_a_checkpoint_with_memory(library: Library, invoke: Invoke) -> None:
    assert invoke("checkpoint", "sb-a", "--memory", "--outside", "close").exit_code == 0
    [(_, options)] = library.calls
    assert (options["checkpoint_type"], options["outside"]) == (CheckpointType.MEMORY, "close")


def test_a_word_about_connections_is_not_passed_over(library: Library, invoke: Invoke) -> None:
    for verb in ("checkpoint", "fork"):
        result = invoke(verb, "sb-a", "--outside", "close")
        assert (result.exit_code, "--memory" in result.stderr) == (2, True)
    assert library.calls == []


def test_explain_takes_none_and_shows_both_kinds(library: Library, invoke: Invoke) -> None:
    lines = invoke("checkpoint", "sb-a", "--explain").stdout.splitlines()
    assert lines[1].split()[:3] == ["filesystem", "3.0", "MiB"]
    assert "9.0 MiB" in lines[2]
    assert "64.0 MiB" in lines[2]
    assert "12.0 ms" in lines[2]
    costs = json.loads(invoke("checkpoint", "sb-a", "--explain", "--json").stdout)
    assert (costs["memory_bytes"], costs["memory_pause_s"]) == (9 << 20, 0.012)
    plain = invoke("checkpoint", "sb-plain", "--explain").stdout
    assert "nothing stands still" in plain
    assert "saves none" in plain
    assert library.calls == []


def test_suspend_and_resume(library: Library, invoke: Invoke) -> None:
    assert invoke("suspend", "sb-a").stdout == "sn-rest\n"
    told = json.loads(invoke("suspend", "sb-a", "--outside", "keep", "--json").stdout)
    assert told == {"sandbox_id": "sb-a", "snapshot_id": "sn-rest"}
    assert library.calls == [("suspend", {"outside": "refuse"}), ("suspend", {"outside": "keep"})]
    assert invoke("resume", "sb-a").stdout == "sb-a\n"
    assert library.calls[2:] == [("resume", {"detached": True}), ("close", "sb-a")]
    assert json.loads(invoke("resume", "sb-a", "--json").stdout)["sandbox_id"] == "sb-a"
    assert invoke("resume", "sb-missing").exit_code == 13


def test_fork_with_memory_is_of_a_live_sandbox(library: Library, invoke: Invoke) -> None:
    assert invoke("fork", "sb-a", "--memory", "--outside", "keep").exit_code == 0
    [(_, (_, _, options))] = library.calls
    assert (options["memory"], options["outside"]) == (True, "keep")
    assert invoke("fork", "sn-a", "--memory").exit_code == 2
    assert len(library.calls) == 1


def test_snapshots_rm(library: Library, invoke: Invoke) -> None:
    result = invoke("snapshots", "rm", "sn-a", "sn-missing", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout) == {"removed": ["sn-a"]}
    assert library.calls == [("delete_snapshot", "sn-a")]


def test_fork_prints_an_id_for_each(library: Library, invoke: Invoke) -> None:
    result = invoke("fork", "sn-a", "-n", "3", "--seed", "1", "--seed", "2", "--seed", "3", "--concurrency", "2")
    assert (result.exit_code, result.stdout) == (0, "sb-0\nsb-1\nsb-2\n")
    options = {"seeds": [1, 2, 3], "max_concurrency": 2, "detached": True}
    assert library.calls == [("fork", ("sn-a", 3, options))]
    assert invoke("fork", "sn-a", "--driver", "microvm").exit_code == 0
    assert library.calls[1][1][2]["driver"] == "microvm"


def test_fork_keeps_what_worked(library: Library, invoke: Invoke) -> None:
    library.failing_forks.add(1)
    result = invoke("fork", "sb-a", "-n", "3", "--json")
    assert result.exit_code == 3
    found = json.loads(result.stdout)
    assert [each["sandbox_id"] for each in found] == ["sb-0", None, "sb-2"]
    assert found[1]["error"]["code"] == "worldfork"
    assert "no more of it" in found[1]["error"]["message"]
    library.failing_forks.update({0, 2})
    assert invoke("fork", "sb-a", "-n", "3").exit_code == 1


@pytest.mark.parametrize("arguments", [("fork", "sn-a", "-n", "0"), ("create", "--cpus", "many"), ("no-such-verb",)])
def test_a_mistake_in_the_arguments_ends_with_2(library: Library, invoke: Invoke, arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).exit_code == 2
    assert library.calls == []
