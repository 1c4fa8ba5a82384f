"""Arguments of the mirrored SDK, and ours."""

from __future__ import annotations

import pytest

from worldfork.core.errors import ConfigError
from worldfork.lineage.arguments import check_foreign, choose_base, choose_network, start_options
from worldfork.lineage.identity import SEED_BITS, choose_seeds, hostname
from worldfork.records.sandbox import Base, SandboxFacts


def test_arguments_about_a_remote_service_are_taken() -> None:
    check_foreign({"api_key": "k", "request_timeout": 3, "namespace": "n", "gpus": None})


@pytest.mark.parametrize("arguments", [{"gpus": 1}, {"pool_id": "p"}, {"deny_out": ["x"]}, {"unheard_of": None}])
def test_what_cannot_be_done_is_refused_with_the_reason(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_foreign(arguments)
    assert next(iter(arguments)) in caught.value.message


def test_a_restore_never_inherits_the_network() -> None:
    assert choose_network(None, None, fresh=True) == "host"
    assert choose_network(None, None, fresh=False) == "none"
    assert choose_network(None, True, fresh=False) == "host"
    assert choose_network("none", True, fresh=True) == "none"
    with pytest.raises(ConfigError):
        choose_network("some", None, fresh=True)


def test_a_base_is_named_once() -> None:
    assert choose_base(None, None) == "host"
    assert choose_base("dir:/x", None) == "dir:/x"
    with pytest.raises(ConfigError):
        choose_base("host", "host")
    with pytest.raises(ConfigError):
        choose_base("ubuntu:24.04", None)


@pytest.mark.parametrize(
    "arguments",
    [
        {"cpus": 0},
        {"cpus": float("inf")},
        {"cpus": float("nan")},
        {"memory_mb": 1},
        {"pids": -1},
        {"timeout_secs": 0},
        {"env": {"A=B": "x"}},
        {"name": ""},
        {"driver": "x"},
    ],
)
def test_senseless_arguments_start_nothing(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        start_options(fresh=True, **arguments)  # type: ignore[arg-type]


def test_a_fresh_sandbox_has_limits_and_a_restore_inherits() -> None:
    assert start_options(fresh=True).limits["memory_mb"] == 1024
    assert start_options(fresh=False).limits == {}
    assert start_options(fresh=False, cpus=2).limits == {"cpus": 2}


def test_seeds() -> None:
    assert choose_seeds([1, 2], 2) == [1, 2]
    common = choose_seeds("common", 5)
    assert len(set(common)) == 1
    independent = choose_seeds(None, 50)
    assert len(set(independent)) == 50
    assert all(0 <= seed < 1 << SEED_BITS for seed in independent)
    for wrong in ([1], [1, -1], [1, 1 << SEED_BITS], "other"):
        with pytest.raises(ConfigError):
            choose_seeds(wrong, 2)


def test_a_name_becomes_a_host_name_as_far_as_it_can() -> None:
    def named(name: str) -> str:
        facts = SandboxFacts(
            sandbox_id="sb-x", name=name, run="/r", form="user", driver="namespace", base=Base("host"),
            snapshot_id=None, layers=(),
        )  # fmt: skip
        return hostname(facts)

    assert named("my world!") == "my-world"
    assert named("ümlaut") == "mlaut"
    assert named("///") == "sb-x"
    assert len(named("a" * 100)) == 63


def test_facts_survive_being_written_down() -> None:
    facts = SandboxFacts(
        sandbox_id="sb-x", name="n", run="/r", form="trusted", driver="namespace",
        base=Base("host", binds=(("/usr", "/usr"),), fingerprint="f"), snapshot_id="sn-x", layers=("ly-a", "ly-b"),
        cgroups=("/c",), env={"A": "b"},
    )  # fmt: skip
    assert SandboxFacts.from_json(facts.to_json()) == facts
