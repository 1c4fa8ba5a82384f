"""From what the kernel refused to the one thing that a person can do about it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from worldfork.core.errors import DriverUnavailable, LaunchFailed, OutOfSpace, SandboxError

APPARMOR = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"
MAX_USER_NAMESPACES = "/proc/sys/user/max_user_namespaces"
CLONE_SWITCH = "/proc/sys/kernel/unprivileged_userns_clone"

DOCKER_ROOT = (
    "start the container with --cap-add SYS_ADMIN --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined, "
    "and a volume or tmpfs for WORLDFORK_HOME"
)
KUBERNETES = (
    "in the pod: securityContext: {capabilities: {add: [SYS_ADMIN]}, seccompProfile: {type: Unconfined}, "
    "appArmorProfile: {type: Unconfined}, procMount: Unmasked}, and an emptyDir volume for WORLDFORK_HOME"
)


def in_docker() -> bool:
    """Whether this process seems to live under Docker, Podman or Kubernetes, so that their remedies apply."""
    return (
        os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv") or "KUBERNETES_SERVICE_HOST" in os.environ
    )


def _outside() -> str:
    return KUBERNETES if "KUBERNETES_SERVICE_HOST" in os.environ else DOCKER_ROOT


def user_namespace_remedy() -> str:
    """Return what keeps this user from making user namespaces, as the command that mends it."""
    if _number(APPARMOR) == 1:
        return "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    if _number(MAX_USER_NAMESPACES) == 0:
        return "sudo sysctl -w user.max_user_namespaces=15000"
    if _number(CLONE_SWITCH) == 0:
        return "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    return _outside() if in_docker() else "run as root, or ask whoever runs this host to allow user namespaces"


def explain(step: str, number: int, sandbox_id: str) -> SandboxError:
    """Turn a failed step of launch or reroot into the error to raise."""
    text = f"{step}: {os.strerror(number)}" if number else step
    fields: dict[str, object] = {"sandbox_id": sandbox_id, "errno": number, "step": step}
    if number == errno.ENOSPC and step.startswith("userns"):
        return DriverUnavailable(
            f"this host allows no more user namespaces: {text}",
            remedy="sudo sysctl -w user.max_user_namespaces=15000",
            **fields,
        )
    if number == errno.ENOSPC and step.startswith("namespaces"):
        return LaunchFailed(
            f"this host allows no more namespaces: {text}",
            remedy="start fewer sandboxes at a time, or raise the limits in /proc/sys/user/max_*_namespaces",
            **fields,
        )
    if number == errno.E2BIG and "layers" in step:
        return LaunchFailed(
            f"a chain of so many checkpoints cannot be mounted: {text}",
            remedy="go on from an earlier snapshot, or build the world anew from what this one holds",
            **fields,
        )
    if number in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpace(
            f"starting a sandbox ran out of disk space: {text}",
            remedy="free space under WORLDFORK_HOME, for example with `worldfork sweep`",
            scope="host",
            **fields,
        )
    refused = number in (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENODEV, errno.ENOSYS, errno.EUSERS)
    if refused and step.startswith("userns"):
        return DriverUnavailable(
            f"this user may not make user namespaces: {text}", remedy=user_namespace_remedy(), **fields
        )
    if refused and step.startswith("overlay"):
        return DriverUnavailable(
            f"the kernel refused an overlay: {text}",
            remedy="put WORLDFORK_HOME or WORLDFORK_SCRATCH on ext4, XFS, btrfs or tmpfs; "
            "if that is so, try WORLDFORK_OVERLAY=legacy",
            **fields,
        )
    if refused and step.startswith(("namespaces", "making mounts", "mounting proc")):
        remedy = _outside() if in_docker() else "run as root, or ask whoever runs this host to allow namespaces"
        return DriverUnavailable(f"the kernel refused a sandbox: {text}", remedy=remedy, **fields)
    if number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN):
        return LaunchFailed(
            f"the host is at a limit: {text}",
            remedy="start fewer sandboxes at a time, or raise ulimit -n and -u",
            **fields,
        )
    return LaunchFailed(f"the sandbox did not start: {text}", remedy="see `worldfork doctor`", **fields)


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
