"""The ground of a world: the machine's own userland, or any root file system."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import sys
from pathlib import Path

from worldfork.core.errors import ConfigError
from worldfork.records.sandbox import Base

VENV = "/opt/venv"
"""Where a `host` world has its Python virtual environment, first on PATH."""

IDENTITY_PATHS = ("/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/etc/machine-id")
"""Files that each sandbox gets of its own, as mounts, so that no layer ever holds them."""

_PLAIN_DIRS = ("dev", "proc", "sys", "run", "etc", "workspace")
_STICKY_DIRS = ("tmp", "var/tmp")
_HOST_DIRS = (
    "home", "opt", "srv", "mnt", "media", "usr", "var/cache", "var/lib", "var/log", "var/spool", "run/lock",
)  # fmt: skip
_TOP_DIRS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")

# An allow list, since a list of what to leave out is never complete: no shadow, no keys, no host's own services.
_ETC = (
    "adduser.conf", "alternatives", "bash.bashrc", "bash_completion", "ca-certificates", "ca-certificates.conf",
    "debian_version", "default", "fonts", "gai.conf", "group", "host.conf", "inputrc", "java-17-openjdk",
    "java-21-openjdk", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "lsb-release", "locale.alias", "locale.conf",
    "locale.gen", "localtime", "login.defs", "magic", "mailcap", "maven", "mime.types", "nanorc", "networks",
    "nsswitch.conf", "os-release", "pam.conf", "passwd", "perl", "pki/ca-trust", "pki/tls/certs", "pki/tls/cert.pem",
    "profile", "profile.d", "protocols", "python3", "python3.11", "python3.12", "python3.13", "redhat-release",
    "rpc", "services", "shells", "skel", "ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone",
    "vim", "xattr.conf", "wgetrc",
)  # fmt: skip


def host_base() -> Base:
    """Describe the machine's own userland as a base: what is mounted, and its fingerprint.

    Cheap enough for every fork: it is worked out again only when a file that tells of a change has changed.
    """
    return _host_base(tuple(_signature(name) for name in _telling_files()))


@functools.lru_cache(maxsize=1)
def _host_base(signatures: tuple[str, ...]) -> Base:
    binds = [("/usr", "/usr")]
    for name in _TOP_DIRS:
        path = Path("/", name)
        if path.is_dir() and not path.is_symlink():
            binds.append((str(path), str(path)))
    for prefix in _python_prefixes():
        if not any(_below(prefix, source) for source, _ in binds):
            binds.append((prefix, prefix))
    return Base(kind="host", binds=tuple(binds), fingerprint=_fingerprint(signatures))


@functools.cache
def _telling_files() -> tuple[str, ...]:
    return (
        "/etc/os-release",
        "/var/lib/dpkg/status",
        "/var/lib/rpm/rpmdb.sqlite",
        "/lib/apk/db/installed",
        host_python(),
    )


def _signature(name: str) -> str:
    try:
        info = os.stat(name)
    except OSError:
        return ""
    return f"{name} {info.st_size} {info.st_mtime_ns}"


def dir_base(path: str) -> Base:
    """Describe a root file system in a directory as a base.

    Raises:
        ConfigError: it is no directory, or holds nothing that could be a root.
    """
    real = os.path.realpath(path)
    if not os.path.isdir(real):
        raise ConfigError(f"the base {path!r} is not a directory", remedy="give the top of a root file system")
    if real == "/":
        raise ConfigError("the base may not be / itself", remedy="use base='host' for the machine's own userland")
    if not any(os.path.lexists(os.path.join(real, name)) for name in ("bin", "usr", "sbin", "lib")):
        raise ConfigError(f"{path!r} holds none of bin, usr, sbin, lib", remedy="give the top of a root file system")
    return Base(kind="dir", path=real)


def parse_base(text: str) -> Base:
    """Read `host` or `dir:PATH`.

    Raises:
        ConfigError: it is neither, or the directory is not usable.
    """
    if text == "host":
        return host_base()
    kind, _, path = text.partition(":")
    if kind == "dir" and path.startswith("/"):
        return dir_base(path)
    raise ConfigError(f"no such base: {text!r}", remedy="use 'host' or 'dir:/absolute/path'")


def host_python() -> str:
    """Return the interpreter that the virtual environment of a `host` world is made with."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable) or sys.executable)


def write_ground(root: Path, base: Base) -> None:
    """Write the layer that lies directly on the base: mount points, and for `host` the private rest.

    Only what the base lacks is made, so that its own directories keep their owner, mode and content.
    """
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    below = Path(base.path) if base.kind == "dir" else None
    if below is not None:
        _like(below, root)
    for name in _PLAIN_DIRS:
        _make_dir(root, below, name, 0o755)
    for name in _STICKY_DIRS:
        _make_dir(root, below, name, 0o1777)
    _make_dir(root, below, "root", 0o700)
    if base.kind == "host":
        _write_host_rest(root, base)
    for path in IDENTITY_PATHS:
        _make_file(root, below, path.lstrip("/"))


def _write_host_rest(root: Path, base: Base) -> None:
    for name in _HOST_DIRS:
        _make_dir(root, None, name, 0o755)
    for name in _TOP_DIRS:
        source = Path("/", name)
        if source.is_symlink():
            (root / name).symlink_to(os.readlink(source))
        elif source.is_dir():
            (root / name).mkdir(mode=0o755)
    for _, target in base.binds:
        (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name, target in (("run", "/run"), ("lock", "/run/lock")):
        (root / "var" / name).symlink_to(target)
    for name in _ETC:
        _copy_readable(Path("/etc", name), root / "etc" / name)
    with contextlib.suppress(FileExistsError):
        (root / "etc" / "mtab").symlink_to("/proc/self/mounts")


def _copy_readable(source: Path, target: Path) -> None:
    """Copy files, links and directories that this user may read; leave out the rest and what is no such thing."""
    with contextlib.suppress(PermissionError, FileNotFoundError):
        info = source.lstat()
        target.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISLNK(info.st_mode):
            target.symlink_to(os.readlink(source))
        elif stat.S_ISREG(info.st_mode) and not info.st_mode & (stat.S_ISUID | stat.S_ISGID):
            if info.st_mode & stat.S_IROTH:  # what only its owner may read is nobody else's business
                shutil.copy2(source, target)
        elif stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_IROTH:
            target.mkdir(exist_ok=True)
            for child in sorted(source.iterdir()):
                _copy_readable(child, target / child.name)


def _make_dir(root: Path, below: Path | None, name: str, mode: int) -> None:
    if below is not None and (os.path.lexists(below / name) or not _parents_are_dirs(below, name)):
        return
    _make_parents(root, below, name)
    path = root / name
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=mode)
    path.chmod(mode)


def _make_file(root: Path, below: Path | None, name: str) -> None:
    if below is not None and (_has(below, name, stat.S_ISREG) or not _parents_are_dirs(below, name)):
        return
    _make_parents(root, below, name)
    path = root / name
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    path.touch(mode=0o644)


def _make_parents(root: Path, below: Path | None, name: str) -> None:
    """Make the directories above `name`, alike to those that they will cover."""
    at = Path()
    for part in Path(name).parts[:-1]:
        at = at / part
        path = root / at
        if not path.exists():
            path.mkdir(mode=0o755)
            if below is not None and (below / at).is_dir():
                _like(below / at, path)


def _has(below: Path, name: str, kind: object) -> bool:
    try:
        info = (below / name).lstat()
    except OSError:
        return False
    return bool(kind(info.st_mode)) and _parents_are_dirs(below, name)  # type: ignore[operator]  # stat.S_IS* are plain callables


def _parents_are_dirs(below: Path, name: str) -> bool:
    at = below
    for part in Path(name).parts[:-1]:
        at = at / part
        if at.is_symlink() or (at.exists() and not at.is_dir()):
            return False
    return True


def _like(source: Path, target: Path) -> None:
    info = source.lstat()
    with contextlib.suppress(PermissionError):
        os.chown(target, info.st_uid, info.st_gid)
    target.chmod(stat.S_IMODE(info.st_mode))


def _below(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


def _python_prefixes() -> list[str]:
    """Return the directories that this Python needs: its base prefix, and where its executable really lies."""
    prefixes = [os.path.realpath(sys.base_prefix)]
    executable = host_python()
    if not _below(executable, prefixes[0]) and not _below(executable, "/usr"):
        prefixes.append(os.path.dirname(os.path.dirname(executable)))
    return [prefix for prefix in prefixes if prefix not in ("/", "/usr")]


def _fingerprint(signatures: tuple[str, ...]) -> str:
    lines = [f"python {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro} {sys.base_prefix}"]
    with contextlib.suppress(OSError):
        release = Path("/etc/os-release").read_text()
        lines += [line for line in release.splitlines() if line.startswith(("ID=", "VERSION_ID="))]
    lines += [signature for signature in signatures if signature]
    return "\n".join(lines)
