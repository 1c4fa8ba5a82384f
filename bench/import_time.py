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
_STATEMENTS = {
    "import": "import worldfork",
    "names": "from worldfork import AsyncSandbox, Sandbox, world",
    "standard_library_floor": "import asyncio, sqlite3, subprocess",
}
_OPTIONAL = {"typer", "rich", "httpx", "starlette", "pydantic", "numpy", "ray", "pytest"}


def run(options: Options) -> dict[str, Any]:
    """Measure the import, the import with the names that load the library, and what the standard library takes."""
    loaded: set[str] = set()
    # A machine that forbids writing bytecode would compile everything at each start; installed packages have it.
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(options.home / "bytecode")}

    def one(statement: str) -> float:
        code = _IMPORT.replace("import worldfork", statement)
        taken, modules = json.loads(python_lines(code, **bytecode).stdout)
        loaded.update(modules)
        return float(taken)

    for statement in _STATEMENTS.values():
        one(statement)
    taken = interleave(options.samples(20, 3), {name: repeat(1, one, text) for name, text in _STATEMENTS.items()})
    values: dict[str, Any] = {name: summary_ms(samples) for name, samples in taken.items()}
    values["optional_packages_loaded"] = sorted(loaded & _OPTIONAL)
    bars = [bar("import worldfork: p50", values["import"]["p50_ms"], BAR_MS, unit="ms")]
    bars.append({"what": "no optional package loaded", "passed": not loaded & _OPTIONAL})
    note = "names are loaded when they are first used: `names` is the import with the library behind it"
    return figure("import_time", "import of worldfork", values, bars, note)
