from __future__ import annotations

from pathlib import Path

import pytest

from worldfork.cli.places import this_place


def sysctl(root: Path, name: str, value: str) -> None:
    path = root / "proc/sys" / name.replace(".", "/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value + "\n")


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        (
            "kernel.apparmor_restrict_unprivileged_userns",
            "1",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("kernel.unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user.max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=15000"),
        ("user.max_user_namespaces", "9000", ""),
    ],
)
def test_a_machine_is_mended_by_the_sysctl_that_stops_it(tmp_path: Path, name: str, value: str, cure: str) -> None:
    sysctl(tmp_path, name, value)
    place = this_place(tmp_path, {})
    assert (place.name, place.cure) == ("machine", cure)


def test_a_machine_without_any_switch_needs_no_cure(tmp_path: Path) -> None:
    assert this_place(tmp_path, {}).cure == ""


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv"])
def test_docker_is_told_its_flags_and_a_volume(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mark).touch()
    place = this_place(tmp_path, {})
    assert place.name == "docker"
    for part in ("--cap-add SYS_ADMIN", "--security-opt seccomp=unconfined", "apparmor=unconfined", "-v "):
        assert part in place.cure


def test_a_pod_is_told_its_security_context(tmp_path: Path) -> None:
    (tmp_path / ".dockerenv").touch()
    place = this_place(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert place.name == "kubernetes"
    assert "securityContext" in place.cure
    assert "emptyDir" in place.cure
