"""Where this process runs, as far as that decides which command lets it start sandboxes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from worldfork.core.settings import load_settings

APPARMOR_SYSCTL = "kernel.apparmor_restrict_unprivileged_userns"
NAMESPACES_SYSCTL = "user.max_user_namespaces"
DEBIAN_SYSCTL = "kernel.unprivileged_userns_clone"

POD_CONTEXT = (
    'securityContext: {capabilities: {add: ["SYS_ADMIN"]}, seccompProfile: {type: Unconfined}, '
    "appArmorProfile: {type: Unconfined}}"
)


@dataclass(frozen=True)
class Place:
    """Where this process runs."""

    name: str
    """"machine", "docker" or "kubernetes"."""
    cure: str
    """The one command or setting that lets sandboxes start here; empty where none is known to be needed."""


def this_place(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Place:
    """Look at the marks that Docker, Podman, Kubernetes and kernel settings leave.

    Args:
        root: where `/proc` and the marks are looked for.
        environ: variables of the process; by default its own.
    """
    variables = os.environ if environ is None else environ
    if "KUBERNETES_SERVICE_HOST" in variables:
        return Place("kubernetes", _pod_cure())
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return Place("docker", _docker_cure())
    return Place("machine", _sysctl_cure(root))


def _docker_cure() -> str:
    home = load_settings().home
    return (
        "docker run --cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
        f"--security-opt systempaths=unconfined -v worldfork-home:{home} IMAGE"
    )


def _pod_cure() -> str:
    home = load_settings().home
    return f"give this container in the pod `{POD_CONTEXT}` and mount an emptyDir volume at {home}"


def _sysctl_cure(root: Path) -> str:
    if _value(root, APPARMOR_SYSCTL) == "1":
        return f"sudo sysctl -w {APPARMOR_SYSCTL}=0"
    if _value(root, DEBIAN_SYSCTL) == "0":
        return f"sudo sysctl -w {DEBIAN_SYSCTL}=1"
    if _value(root, NAMESPACES_SYSCTL) == "0":
        return f"sudo sysctl -w {NAMESPACES_SYSCTL}=15000"
    return ""


def _value(root: Path, name: str) -> str | None:
    try:
        return (root / "proc/sys" / name.replace(".", "/")).read_text().strip()
    except OSError:
        return None
