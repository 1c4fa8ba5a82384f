"""Fork plus first result against nitrobox (PyPI): create a sandbox on the same root and run `true`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from bench.harness import Options, Skip, bar, figure, interleave, ratio, repeat, summary_ms
from bench.rootfs import small_root
from bench.worlds import fork_and_first_result_s, library

BAR = 1 / 3
PACKAGE = "nitrobox==0.1.0"
NEEDS = "Python 3.12"

# A directory as image makes this release wait 30 s for a build server that it does not need; the lookup is taken out,
# so that it is compared at its best.
_DRIVE = """
import json, sys, time
import nitrobox.rootfs
nitrobox.rootfs.get_image_config = lambda *a, **k: None
from nitrobox import Sandbox, SandboxConfig
root, place = sys.argv[1], sys.argv[2]
number = 0
for line in sys.stdin:
    taken = []
    for _ in range(int(line)):
        number += 1
        start = time.perf_counter()
        box = Sandbox(SandboxConfig(image=root, working_dir="/", env_base_dir=place), name=f"bench{number}")
        output, code = box.run("true")
        taken.append(time.perf_counter() - start)
        box.delete()
        assert code == 0, output
    print(json.dumps(taken), flush=True)
"""


def _python_3_12() -> str:
    named = os.environ.get("WORLDFORK_BENCH_PYTHON312")
    candidates = (
        [named] if named else ["python3.12", *map(str, Path.home().glob(".pyenv/versions/3.12*/bin/python3.12"))]
    )
    for candidate in filter(None, candidates):
        found = shutil.which(candidate)
        if (
            found
            and subprocess.run(
                [found, "-c", "import sys; sys.exit(sys.version_info[:2] != (3, 12))"], capture_output=True
            ).returncode
            == 0
        ):
            return found
    raise Skip(f"nitrobox needs {NEEDS}, which is not on PATH; name one in WORLDFORK_BENCH_PYTHON312")


def _prepared(options: Options) -> Path:
    place = options.home / "nitrobox-venv"
    python = place / "bin" / "python"
    if python.exists() and subprocess.run([python, "-c", "import nitrobox"], capture_output=True).returncode == 0:
        return python
    if not options.set_up:
        raise Skip(
            "nitrobox is not set up: --set-up makes a virtual environment and installs it from the package registry"
        )
    subprocess.run([_python_3_12(), "-m", "venv", str(place)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", PACKAGE], check=True, capture_output=True)
    return python


def run(options: Options) -> dict[str, Any]:
    """One driver process of its own Python makes nitrobox sandboxes in blocks between our blocks."""
    if os.geteuid() != 0:
        raise Skip("nitrobox is compared as root")
    python = _prepared(options)
    root = small_root(options)
    snapshot = library(options).world(f"bench-root-{root}", build=lambda sandbox: None, base=f"dir:{root}")
    place = options.home / "nitrobox-places"
    place.mkdir(exist_ok=True)
    with subprocess.Popen(
        [str(python), "-c", _DRIVE, str(root), str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None

        def theirs() -> list[float]:
            assert driver.stdin is not None
            assert driver.stdout is not None
            print(10, file=driver.stdin, flush=True)
            line = driver.stdout.readline()
            if not line:
                raise Skip("nitrobox ended without an answer on this machine")
            return [float(each) for each in json.loads(line)]

        ours = repeat(10, lambda: fork_and_first_result_s(snapshot))
        theirs()
        ours()
        taken = interleave(options.samples(15, 2), {"nitrobox_create_and_run": theirs, "fork_and_first_result": ours})
        driver.stdin.close()
    share = ratio(taken["fork_and_first_result"], taken["nitrobox_create_and_run"])
    values: dict[str, Any] = {name: summary_ms(samples) for name, samples in taken.items()}
    values |= {"p50_ratio": round(share, 4), "package": PACKAGE, "root": str(root)}
    note = "nitrobox without its image lookup (30 s for a directory otherwise); its default has no network namespace"
    return figure(
        "versus_nitrobox",
        "fork + first result against nitrobox",
        values,
        [bar("p50 against nitrobox", share, BAR, unit="ratio")],
        note,
    )
