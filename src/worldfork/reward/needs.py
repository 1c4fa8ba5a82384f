"""What a task's reference needs of the limits that others are held to."""

from __future__ import annotations

from dataclasses import dataclass

ROOM = 2.0
"""So many times what the reference needs is enough for other code that is right: for what it does otherwise, and for
CPUs that do less while others work beside them."""


@dataclass(frozen=True)
class Need:
    """Seconds, on a machine of its own; 0 where nobody knows."""

    cpu_s: float = 0.0
    """Of all processes of the tests."""
    wall_s: float = 0.0
    """Of the tests."""
    rebuild_s: float = 0.0
    """Wall time of the rebuild step."""
    rebuild_cpu_s: float = 0.0
    """Of all its processes."""

    def cpu_limit_s(self, limit_s: float) -> float:
        """Return how many CPU seconds a process of a grading may use.

        A CPU whose other half works for somebody else does as little as half in a second, and nobody can tell that from
        code that does nothing useful. So there is room for it here rather than an excuse afterwards; no more than it
        takes, since the reference came to its end within the limit itself.
        """
        return max(limit_s, ROOM * min(self.cpu_s, limit_s))


UNKNOWN = Need()
"""What nobody has measured yet."""
