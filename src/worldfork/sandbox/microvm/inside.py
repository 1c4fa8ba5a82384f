"""Where things are in a guest, outside the sandbox that runs in it."""

from __future__ import annotations

from typing import Final

BASE: Final = "/base"
"""The root file system below all layers: the first disk."""
BASE_NAME: Final = "b"
"""Of the one directory that the base's image has."""
LAYERS: Final = "/layers"
"""The layers, each a directory with a short name, the topmost "0": the second disk."""
SCRATCH: Final = "/scratch"
"""What the guest writes: the third disk."""
UPPER: Final = f"{SCRATCH}/upper"
"""What a sandbox has changed against its layers."""
WORK: Final = f"{SCRATCH}/work"
RUN: Final = "/run/wf"
"""The run directory of the one sandbox, as the guest's PID 1 has made it."""
LINKS: Final = f"{RUN}/scratch"
"""Where its launch puts the short links to its layers."""
CGROUPS: Final = "/sys/fs/cgroup"
HOOK: Final = "/etc/worldfork/after-fork"
"""A program of the sandbox's own: run in every memory fork before that is handed out."""
