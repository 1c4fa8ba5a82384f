"""What every handle on a live sandbox has: its defaults, laid under each command."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import TypedDict

from worldfork.lineage.identity import command_env
from worldfork.lineage.live import Live
from worldfork.sandbox.command import CommandSpec

Rlimits = Iterable[tuple[int, int, int]]
"""(resource, soft, hard) as `resource.RLIMIT_*` numbers them; -1 is no limit."""


class Where(TypedDict):
    """Who does a file operation, and where relative paths begin."""

    user: str
    working_dir: str


class Handle:
    """A handle on a live sandbox."""

    _live: Live

    def _full(self, path: str) -> str:
        return posixpath.join(self._live.facts.working_dir, path) if path else self._live.facts.working_dir

    def _where(self, path: str) -> Where:
        # A full path needs no place to begin at, and the working directory may be gone.
        return {"user": self._live.facts.user, "working_dir": "/" if path[:1] == "/" else self._live.facts.working_dir}

    def _spec(
        self,
        argv: tuple[str, ...],
        env: Mapping[str, str] | None,
        working_dir: str | None,
        timeout: float | None,
        user: str | None,
        *,
        stdin: bool | bytes = False,
        merge: bool = False,
        keep: bool = False,
        discard_stdout: bool = False,
        discard_stderr: bool = False,
        rlimits: Rlimits = (),
    ) -> CommandSpec:
        facts = self._live.facts
        return CommandSpec(
            argv,
            env={**command_env(facts), **(env or {})},
            working_dir=self._full(working_dir or ""),
            user=facts.user if user is None else user,
            stdin=stdin,
            merge=merge,
            keep=keep,
            timeout_s=timeout,
            rlimits=(*self._live.rlimits(), *rlimits),
            discard_stdout=discard_stdout,
            discard_stderr=discard_stderr,
        )
