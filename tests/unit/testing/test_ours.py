"""Our own sandboxes as the checks see them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from worldfork import AsyncSandbox, ForkResult, ForkResults
from worldfork.core.errors import ForkError, LaunchFailed
from worldfork.sandbox.driver import Capabilities
from worldfork.testing import ours
from worldfork.testing.ours import OwnSandboxes


class Ended:
    """A sandbox that only remembers that it was ended."""

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.ended = False

    async def terminate(self) -> None:
        self.ended = True


def test_where_one_fork_fails_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    able = Capabilities(form="trusted", limits=True, rename_base_dirs=True, other_users=True)
    monkeypatch.setattr(ours, "_capabilities", lambda driver: able)
    boxes = [Ended("sb-a"), Ended("sb-b")]
    failed = ForkResult[AsyncSandbox](2, None, LaunchFailed("it did not start"))
    results = [*(ForkResult(at, cast(AsyncSandbox, box), None) for at, box in enumerate(boxes)), failed]

    async def fork_snapshot(snapshot_id: str, n: int) -> ForkResults[Any]:
        return ForkResults(results)

    monkeypatch.setattr(AsyncSandbox, "fork_snapshot", fork_snapshot)
    with pytest.raises(ForkError):
        asyncio.run(OwnSandboxes().fork("sn-a", 3))
    assert [box.ended for box in boxes] == [True, True]
