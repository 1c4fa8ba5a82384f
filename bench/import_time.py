"""How long `import worldfork` takes in a fresh interpreter."""

from __future__ import annotations

import json
from typing import Any

from bench.harness import Options, bar, figure, interleave, python_lines, repeat, summary_ms

BAR_MS = 100.0
_IMPORT = """
import sys, time
start = time.perf_counter()
import worldfork
taken = time.perf_counter() - start
import json
print(json.dumps([taken, sorted(m.split('.')[0] for m in sys.modules)]))
"""
_OPTIONAL = {"typer", "rich", "httpx", "starlette", "pydantic", "numpy", "ray", "pytest"}


def run(options: Options) -> dict[str, Any]:
    """Measure the import, with an asyncio import beside it as the floor that the standard library sets."""
    loaded: set[str] = set()

    def one() -> float:
        taken, modules = json.loads(python_lines(_IMPORT).stdout)
        loaded.update(modules)
        return float(taken)

    def floor() -> float:
        return float(
            json.loads(python_lines(_IMPORT.replace("import worldfork", "import asyncio, sqlite3, subprocess")).stdout)[
                0
            ]
        )

    one()
    floor()
    taken = interleave(options.samples(20, 3), {"worldfork": repeat(1, one), "floor": repeat(1, floor)})
    values: dict[str, Any] = {
        "import_worldfork": summary_ms(taken["worldfork"]),
        "import_asyncio_sqlite3_subprocess": summary_ms(taken["floor"]),
        "optional_packages_loaded": sorted(loaded & _OPTIONAL),
    }
    bars = [bar("import worldfork p50", values["import_worldfork"]["p50_ms"], BAR_MS, unit="ms")]
    bars.append({"what": "no optional package loaded", "passed": not loaded & _OPTIONAL})
    return figure("import_time", "import of worldfork", values, bars)
