"""Named steps of everything that writes, so that a test can stop the process at each of them."""

from __future__ import annotations

from collections.abc import Callable

_hook: Callable[[str], None] | None = None


def fault(name: str) -> None:
    """Pass a named step. Does nothing unless a test has installed a hook."""
    if _hook is not None:
        _hook(name)


def install(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the name of every step from now on; None takes it out again. For tests."""
    global _hook
    _hook = hook
