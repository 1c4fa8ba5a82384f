"""What a policy made of a task's editable files: plain contents, apart from any sandbox."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from worldfork.core.errors import ConfigError, FormatUnsupported
from worldfork.core.ids import content_id

EDITS_FORMAT = 1

MOST_DROPPED = 100
"""Of paths that are not carried over, so many are named."""

_WHY = {
    "link": "a link",
    "special": "no regular file",
    "files": "more files than may be carried (limit carry_files)",
    "bytes": "more bytes than may be carried (limit carry_bytes)",
    "name": "a name that is no UTF-8",
}


@dataclass(frozen=True)
class EditedFile:
    """One regular file."""

    content: bytes
    executable: bool = False


@dataclass(frozen=True)
class Edits:
    """The difference between a task's starting state and what a policy left, within the editable paths.

    Two equal `Edits` are worth the same: nothing else of the policy's sandbox reaches a verifier's.
    """

    files: Mapping[str, EditedFile] = field(default_factory=dict)
    """Path of the task -> a file that is new, or not as it was."""
    removed: tuple[str, ...] = ()
    """Paths that were files in the starting state and are none now, sorted."""
    dropped: tuple[tuple[str, str], ...] = ()
    """(path, why) of what was there and is not carried over: `link`, `special`, `files`, `bytes`, `name`; sorted, at
    most `MOST_DROPPED` of them. No part of `digest`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", MappingProxyType(dict(sorted(self.files.items()))))
        object.__setattr__(self, "removed", tuple(sorted(self.removed)))

    @property
    def empty(self) -> bool:
        """Whether the starting state is as it was."""
        return not self.files and not self.removed

    @property
    def notes(self) -> tuple[str, ...]:
        """For people: what of the editable files is not carried over, one line for each reason."""
        by_why: dict[str, list[str]] = {}
        for path, why in self.dropped:
            by_why.setdefault(why, []).append(path)
        least = "at least " if len(self.dropped) >= MOST_DROPPED else ""
        return tuple(_note(paths, why, least) for why, paths in sorted(by_why.items()))

    @cached_property
    def digest(self) -> str:
        """64 hex digits over what is carried over."""
        return content_id(b"worldfork edits", self._canonical({"dropped": []}))

    def to_bytes(self) -> bytes:
        """Return one line of JSON, the same for equal edits."""
        return self._canonical({"dropped": [list(each) for each in self.dropped]})

    def _canonical(self, rest: Mapping[str, object]) -> bytes:
        files = {
            path: {"content": base64.b64encode(each.content).decode("ascii"), "executable": each.executable}
            for path, each in self.files.items()
        }
        data = {"format": EDITS_FORMAT, "files": files, "removed": list(self.removed), **rest}
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes) -> Edits:
        """Read what `to_bytes` wrote.

        Raises:
            FormatUnsupported: a newer version wrote it.
            ConfigError: it is no edits.
        """
        try:
            found = json.loads(data)
            if found["format"] > EDITS_FORMAT:
                raise FormatUnsupported(
                    f"edits of format {found['format']}", remedy="use the Worldfork that wrote them"
                )
            files = {
                path: EditedFile(base64.b64decode(each["content"], validate=True), bool(each["executable"]))
                for path, each in found["files"].items()
            }
            dropped = tuple((str(path), str(why)) for path, why in found["dropped"])
            return cls(files, tuple(map(str, found["removed"])), dropped)
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise ConfigError(f"not the edits of a rollout: {error!r}", field="edits") from None

    def __reduce__(self) -> tuple[object, ...]:
        # A mapping proxy cannot be pickled.
        return type(self), (dict(self.files), self.removed, self.dropped)


def _note(paths: list[str], why: str, least: str) -> str:
    others = f" and {least}{len(paths) - 1} more" if len(paths) > 1 else ""
    return f"not carried: {paths[0][:150]}{others}: {_WHY.get(why, why)}"
