"""Where files come from: what a world is made of, where hidden tests and solutions lie, what is mounted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from worldfork.core.errors import ConfigError
from worldfork.records.checked import check_path, checked_seconds, checked_strings, checked_text, refuse_unknown


@dataclass(frozen=True)
class Origin:
    """A tree of files somewhere. At most one of `snapshot`, `git`, `package` and `directory` is given."""

    snapshot: str = ""
    """Id or name of a snapshot."""
    git: str = ""
    """`PATH@COMMIT`: a repository on this machine, and what `git rev-parse` understands."""
    package: str = ""
    """Name of a package whose source distribution the registry has."""
    version: str = ""
    """Of the package."""
    sha256: str = ""
    """Of the source distribution's file, 64 hex digits; checked where it is given."""
    directory: str = ""
    """An absolute path on this machine."""

    def __post_init__(self) -> None:
        for each in fields(self):
            checked_text(f"origin.{each.name}", getattr(self, each.name))
        given = [name for name in ("snapshot", "git", "package", "directory") if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(f"an origin is {given[0]} or {given[1]}, not both", field="origin")
        if bool(self.package) != bool(self.version):
            raise ConfigError("a package and its version come together", field="origin.version")
        if self.sha256 and not self.package:
            raise ConfigError("sha256 is of a package", field="origin.sha256")
        if self.directory and not self.directory.startswith("/"):
            raise ConfigError(f"directory {self.directory!r} is not absolute", field="origin.directory")
        if self.git and not all(self.git.rpartition("@")[::2]):
            raise ConfigError(f"git {self.git!r} is not PATH@COMMIT", field="origin.git")

    @property
    def empty(self) -> bool:
        """Whether it names nothing."""
        return not (self.snapshot or self.git or self.package or self.directory)

    def to_json(self) -> dict[str, Any]:
        """Return what is given."""
        return {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name)}

    @classmethod
    def from_json(cls, data: object, name: str = "origin") -> Origin:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: an unknown field or a bad value.
        """
        return cls(**refuse_unknown(name, data, cls))


@dataclass(frozen=True)
class WorldSource:
    """How a task's world is made, once; its files lie in the task's directory."""

    origin: Origin = field(default_factory=Origin)
    """Empty: the default world, with pytest and pytest-timeout. A snapshot is taken as it is, with its own Python."""
    dependencies: tuple[str, ...] = ()
    """Requirements for pip, installed into the Python that is first on PATH."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Run one after the other in the task's directory, with the host's network; each must end with 0."""
    without: tuple[str, ...] = ()
    """Paths of the task's directory that are removed at the end, such as visible tests that contradict hidden ones."""
    build_wall_s: float = 1800.0
    """Wall time of the whole build."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dependencies", checked_strings("world.dependencies", self.dependencies))
        object.__setattr__(self, "without", checked_strings("world.without", self.without))
        for path in self.without:
            check_path("world.without", path)
        if not isinstance(self.commands, list | tuple):
            raise ConfigError("world.commands is not a list of commands", field="world.commands")
        commands = tuple(checked_strings("world.commands", command) for command in self.commands)
        if not all(commands):
            raise ConfigError("world.commands holds an empty command", field="world.commands")
        object.__setattr__(self, "commands", commands)
        object.__setattr__(self, "build_wall_s", checked_seconds("world.build_wall_s", self.build_wall_s))

    @property
    def empty(self) -> bool:
        """Whether it is the default world as it is."""
        return self.origin.empty and not (self.dependencies or self.commands or self.without)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "origin": self.origin.to_json(),
            "dependencies": list(self.dependencies),
            "commands": [list(command) for command in self.commands],
            "without": list(self.without),
            "build_wall_s": self.build_wall_s,
        }

    @classmethod
    def from_json(cls, data: object) -> WorldSource:
        """Read what `to_json` wrote; all of it may be absent.

        Raises:
            ConfigError: an unknown field or a bad value.
        """
        values = refuse_unknown("world", data, cls)
        if "origin" in values:
            values["origin"] = Origin.from_json(values["origin"], "world.origin")
        return cls(**values)


@dataclass(frozen=True)
class TreeSource:
    """Files that are taken from somewhere else, at the same paths."""

    origin: Origin
    paths: tuple[str, ...]
    """Files and directories; of a directory everything below it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", checked_strings("paths", self.paths))
        for path in self.paths:
            check_path("paths", path)
        if self.origin.empty or not self.paths:
            raise ConfigError("files from elsewhere need an origin and paths", field="origin")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"origin": self.origin.to_json(), "paths": list(self.paths)}

    @classmethod
    def from_json(cls, data: object, name: str) -> TreeSource:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: something is missing, unknown or malformed.
        """
        values = refuse_unknown(name, data, cls)
        if set(values) != {"origin", "paths"}:
            raise ConfigError(f"{name} needs origin and paths", field=name)
        return cls(Origin.from_json(values["origin"], f"{name}.origin"), values["paths"])


@dataclass(frozen=True)
class Mount:
    """Something that sandboxes of a task see read-only at a path, and that is no part of their disk."""

    target: str
    """Absolute path inside."""
    origin: Origin
    """A snapshot or a directory of this machine."""
    path: str = ""
    """Within the snapshot: the absolute path of the directory that is shown; empty is its root."""
    at_grading: bool = False
    """Whether verifiers' sandboxes see it too."""

    def __post_init__(self) -> None:
        for name in ("target", "path"):
            text = checked_text(f"mounts.{name}", getattr(self, name))
            parts = text.split("/")
            if text and (parts[0] or not all(parts[1:]) or {".", ".."} & set(parts)):
                raise ConfigError(f"mounts.{name} {text!r} is not an absolute path", field=f"mounts.{name}")
        if not self.target:
            raise ConfigError("a mount needs a target", field="mounts.target")
        if not (self.origin.snapshot or self.origin.directory):
            raise ConfigError("a mount shows a snapshot or a directory", field="mounts.origin")
        if self.path and not self.origin.snapshot:
            raise ConfigError("path is within a snapshot", field="mounts.path")
        if not isinstance(self.at_grading, bool):
            raise ConfigError("mounts.at_grading is not true or false", field="mounts.at_grading")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "target": self.target,
            "origin": self.origin.to_json(),
            "path": self.path,
            "at_grading": self.at_grading,
        }

    @classmethod
    def from_json(cls, data: object) -> Mount:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: something is missing, unknown or malformed.
        """
        values: Mapping[str, Any] = refuse_unknown("mounts", data, cls)
        if not {"target", "origin"} <= set(values):
            raise ConfigError("a mount needs target and origin", field="mounts")
        return cls(**{**values, "origin": Origin.from_json(values["origin"], "mounts.origin")})
