"""What can be asked of the files of a stored state."""

from __future__ import annotations

import errno
import os
import posixpath
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from worldfork.content.stack import Node
from worldfork.core.errors import ConfigError, PathError, VerifierError
from worldfork.keeping.browse import Browsed
from worldfork.records.checked import checked_text
from worldfork.records.episode import FailureKind
from worldfork.reward.contents import MAX_READ_BYTES, Content, Contents
from worldfork.reward.places import inside_task
from worldfork.reward.scoring import checked_weight

MAX_FILE_BYTES = 64 << 20
"""A larger file is no answer to what is asked of its content."""

MAX_JSON_BYTES = 4 << 20
"""The same of a file that is read as JSON: what it says takes many times its size in memory."""

MAX_CHECKS = 10_000

_KINDS = {"file": "f", "directory": "d", "link": "l", "fifo": "p", "socket": "s", "device": "bc"}


@dataclass(frozen=True)
class FileCheck:
    """Something that must be true of one path; where several things are asked, all of them."""

    path: str
    """Of the task's directory, or absolute. Links on the way lead where they do inside."""
    name: str = ""
    """The id of the check; made of path and question if not given."""
    weight: float = 1.0
    absent: bool = False
    """Nothing is there, not even a link."""
    kind: str = ""
    """file, directory, link, fifo, socket or device; of the path itself, so that a link is a link."""
    follow: bool = False
    """Whether what is asked of a link is asked of what it leads to. Otherwise a link has no content."""
    mode: str = ""
    """Permission bits in octal, such as `0644`."""
    target: str | None = None
    """Of a link."""
    equals: str | None = None
    """The whole content, as UTF-8; `trim` leaves white space at both ends out."""
    trim: bool = False
    sha256: str = ""
    contains: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    matches: str = ""
    """A regular expression of Python that is found somewhere; `^` and `$` mean lines. Given 5 s of CPU."""
    json: Mapping[str, Any] = field(default_factory=dict)
    """JSON pointer (RFC 6901) -> the value there: of the same type, and equal. The empty pointer is the whole."""

    def __post_init__(self) -> None:
        checked_text("verifier.checks.path", self.path)
        if not self.path or "\0" in self.path:
            raise ConfigError("a check needs a path", field="verifier.checks.path")
        for name in ("contains", "lacks"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if self.kind and self.kind not in _KINDS:
            raise ConfigError(f"kind {self.kind!r} is none of {', '.join(_KINDS)}", field="verifier.checks.kind")
        if self.mode and not re.fullmatch("0?[0-7]{3,4}", self.mode):
            raise ConfigError(f"mode {self.mode!r} is not octal", field="verifier.checks.mode")
        checked_weight(self.weight, "verifier.checks.weight")
        if self.sha256 and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ConfigError("sha256 is not 64 hex digits", field="verifier.checks.sha256")
        try:
            re.compile(self.matches)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"matches is no expression: {error}", field="verifier.checks.matches") from None
        asked: object = self.json
        if not isinstance(asked, Mapping) or any(pointer and pointer[0] != "/" for pointer in self.json):
            raise ConfigError("json is not an object of JSON pointer -> value", field="verifier.checks.json")
        if not self.name:
            object.__setattr__(self, "name", self._own_name())

    def _own_name(self) -> str:
        asked = [
            each.name
            for each in fields(self)
            if each.name not in ("path", "name", "weight", "follow", "trim")
            and getattr(self, each.name) not in ("", None, (), {}, False)
        ]
        return f"{self.path}: {', '.join(asked) or 'exists'}"

    @property
    def reads(self) -> bool:
        """Whether the content is asked for."""
        return bool(self.sha256 or self.contains or self.lacks or self.matches or self.json) or self.equals is not None


@dataclass(frozen=True)
class FilesSpec:
    """All that is asked."""

    checks: tuple[FileCheck, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.checks) <= MAX_CHECKS:
            raise ConfigError(f"a files verifier needs 1 to {MAX_CHECKS} checks", field="verifier.checks")
        counts: dict[str, int] = {}
        named = []
        for check in self.checks:
            counts[check.name] = counts.get(check.name, 0) + 1
            again = counts[check.name]
            named.append(check if again == 1 else _renamed(check, f"{check.name} #{again}"))
        object.__setattr__(self, "checks", tuple(named))

    @classmethod
    def from_json(cls, data: object) -> FilesSpec:
        """Read a list of checks.

        Raises:
            ConfigError: something is unknown or malformed.
        """
        if not isinstance(data, list | tuple):
            raise ConfigError("checks is not a list", field="verifier.checks")
        known = {each.name for each in fields(FileCheck)}
        made = []
        for each in data:
            if not isinstance(each, Mapping) or "path" not in each or set(each) - known:
                unknown = sorted(set(each) - known) if isinstance(each, Mapping) else []
                what = f"has no field {unknown[0]!r}" if unknown else "is no object with a path"
                raise ConfigError(f"a check {what}", field="verifier.checks")
            try:
                made.append(FileCheck(**each))
            except TypeError as error:
                raise ConfigError(f"a check is malformed: {error}", field="verifier.checks") from None
        return cls(tuple(made))


def check_files(browsed: Browsed, spec: FilesSpec) -> tuple[dict[str, str], list[FileCheck]]:
    """Look at the files of a stored state. Blocking.

    Returns:
        (name of a check -> why it is not true, the checks whose expressions are still to be looked for).

    Raises:
        VerifierError: a check asks for what no state holds. StoreError, OutOfSpace: a layer cannot be read.
    """
    why: dict[str, str] = {}
    pending: list[FileCheck] = []
    contents = Contents(browsed)
    # Those of one path together, so that its content is read once.
    for check in sorted(spec.checks, key=lambda check: (check.path, check.follow)):
        reason, _ = _asked(contents, check)
        if reason:
            why[check.name] = reason
        elif check.matches and not check.absent:
            pending.append(check)
    return why, pending


def text_of(browsed: Browsed, check: FileCheck) -> str:
    """Return the content of the file that a check is about; all else that it asks is true. Blocking."""
    return _asked(Contents(browsed), check)[1]


def _asked(contents: Contents, check: FileCheck) -> tuple[str, str]:
    """Return why a check is not true, its expression apart, and the content where it asks for that."""
    try:
        node = _node(contents.browsed, check)
    except PathError as error:
        # Neither there nor absent: a policy that hides a path proves nothing by it.
        return f"cannot be looked at: {os.strerror(error.errno or errno.EIO)}", ""
    if check.absent or node is None:
        right = check.absent == (node is None)
        return ("" if right else "is there" if node is not None else "is not there"), ""
    reason = _about(check, node)
    return _inside(contents, check, node) if not reason and check.reads else (reason, "")


def _renamed(check: FileCheck, name: str) -> FileCheck:
    values = {each.name: getattr(check, each.name) for each in fields(check)}
    return FileCheck(**{**values, "name": name})


def _node(browsed: Browsed, check: FileCheck) -> Node | None:
    """Return what is at a path, None where nothing is.

    Raises:
        PathError: that cannot be told. VerifierError: no state holds the path.
    """
    path = check.path if check.path.startswith("/") else inside_task(check.path)
    try:
        browsed.expect_stored(posixpath.normpath(path).lstrip("/"))
    except PathError as error:
        raise VerifierError(
            f"check {check.name!r}: {error}",
            remedy="ask for a path that a sandbox can change",
            kind=FailureKind.CALIBRATION,
        ) from None
    try:
        return browsed.node(path, follow=check.follow)
    except PathError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def _about(check: FileCheck, node: Node) -> str:
    if check.kind and node.seen.kind not in _KINDS[check.kind]:
        return f"is no {check.kind}"
    if check.target is not None and (node.seen.kind != "l" or node.seen.target != check.target):
        return "leads elsewhere" if node.seen.kind == "l" else "is no link"
    info = node.seen.info
    if check.mode and (info is None or stat.S_IMODE(info.st_mode) != int(check.mode, 8)):
        return f"has mode {stat.S_IMODE(info.st_mode):04o}" if info else "has no mode"
    return ""


def _inside(contents: Contents, check: FileCheck, node: Node) -> tuple[str, str]:
    """Return why the content is not as it must be, and the content where that is text."""
    info = node.seen.info
    if node.seen.kind != "f" or info is None:
        return "is no file", ""
    if info.st_size > MAX_FILE_BYTES:
        return f"is larger than {MAX_FILE_BYTES >> 20} MiB", ""
    if check.json and info.st_size > MAX_JSON_BYTES:
        return f"is larger than {MAX_JSON_BYTES >> 20} MiB of JSON", ""
    content = contents.of(node)
    if content is None:
        return f"is not read, since all files together are larger than {MAX_READ_BYTES >> 20} MiB", ""
    if check.sha256 and content.sha256 != check.sha256:
        return "has other bytes", ""
    if check.equals is None and not (check.contains or check.lacks or check.matches or check.json):
        return "", ""
    text = content.text
    if text is None:
        return "is no text in UTF-8", ""
    if check.equals is not None:
        mine, asked = (content.trimmed, check.equals.strip()) if check.trim else (text, check.equals)
        if mine != asked:
            return "has another content", ""
    missing = [each for each in check.contains if each not in text]
    found = [each for each in check.lacks if each in text]
    if missing or found:
        return (f"lacks {missing[0]!r}" if missing else f"holds {found[0]!r}"), ""
    return (_about_json(content, check.json) if check.json else ""), text


def _about_json(content: Content, asked: Mapping[str, Any]) -> str:
    if not content.json:
        return "is no JSON"
    (whole,) = content.json
    for pointer, expected in asked.items():
        try:
            value = _at(whole, pointer)
        except (KeyError, IndexError, TypeError, ValueError):
            return f"has no {pointer}"
        if not _is_equal(value, expected):
            return f"has another {pointer or 'value'}"
    return ""


def _at(value: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            if not re.fullmatch("0|[1-9][0-9]{0,8}", name):
                raise KeyError(name)
            value = value[int(name)]
        else:
            if not isinstance(value, dict):
                raise KeyError(name)
            value = value[name]
    return value


def _is_equal(value: Any, expected: Any) -> bool:
    """Compare without taking 1 for true, and 1 for 1.0 as JSON does."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, dict) and isinstance(expected, Mapping):
        return value.keys() == expected.keys() and all(_is_equal(value[key], expected[key]) for key in value)
    if isinstance(value, list) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(_is_equal, value, expected))
    return bool(value == expected)
