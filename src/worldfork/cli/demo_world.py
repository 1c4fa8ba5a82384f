"""The world of the demo: what is built once, and how it is proved that a restore brought all of it back."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldfork import Sandbox
from worldfork.core.errors import SandboxError

PACKAGES = ("numpy", "pandas", "requests", "pytest", "pytest-timeout")
"""The article's four, and the plug-in that the verifier wants for its time limits."""
OWN_PACKAGE = "worldfork-demo"
"""What is installed where no registry is in reach; the world makes it itself."""
PYTEST_PARTS = ("pytest", "pytest-timeout", "pluggy", "iniconfig", "packaging", "pygments")
"""What pytest needs on Python 3.11 and newer; all of it pure Python."""

CONFIG_PATH = "/workspace/config.json"
FIRST_CONFIG: dict[str, Any] = {"learning_rate": 0.001, "stage": "raw"}
INSTALL_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 120.0

Say = Callable[[str], None]
Installed = tuple[tuple[str, ...], bool]
"""The packages, and whether they came from the registry."""

MAKE_STATE = '''
"""Runs inside the sandbox: makes the part of the world that no image recipe could hold."""
import array, http.server, io, json, pathlib, random, struct, threading, urllib.request
try:
    import numpy, pandas, requests
except ImportError:
    numpy = None

work = pathlib.Path("/workspace")
draw = random.Random(11)
rows = ["id,sensor,value"]
rows += [f"{i},s{draw.randrange(40):02d},{draw.gauss(20.0, 4.0):.4f}" for i in range(20000)]
table = ("\\n".join(rows) + "\\n").encode()

class Origin(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(table)))
        self.end_headers()
        self.wfile.write(table)

    def log_message(self, *args):
        pass

origin = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Origin)
threading.Thread(target=origin.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{origin.server_port}/readings.csv"
if numpy is None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    fetched = direct.open(url, timeout=30).read()
else:
    session = requests.Session()
    session.trust_env = False
    fetched = session.get(url, timeout=30).content
origin.shutdown()
(work / "data").mkdir(exist_ok=True)
(work / "data" / "readings.csv").write_bytes(fetched)

step = work / "checkpoints" / "step-0100"
step.mkdir(parents=True, exist_ok=True)
if numpy is None:
    values = array.array("f", (draw.gauss(0.0, 1.0) for _ in range(1000 * 128)))
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000, 128), }"
    header += " " * (-(len(header) + 11) % 64) + "\\n"
    with open(work / "embeddings.npy", "wb") as file:
        file.write(b"\\x93NUMPY\\x01\\x00" + struct.pack("<H", len(header)) + header.encode() + values.tobytes())
    (step / "weights.bin").write_bytes(values[:4096].tobytes())
    count = len(rows) - 1
else:
    values = numpy.random.default_rng(7).standard_normal((1000, 128)).astype("float32")
    numpy.save(work / "embeddings.npy", values)
    (step / "weights.bin").write_bytes(values[:32].tobytes())
    count = len(pandas.read_csv(io.BytesIO(fetched)))
(step / "optimizer.json").write_text(json.dumps({"name": "adam", "beta1": 0.9, "beta2": 0.999}))
(step / "state.json").write_text(json.dumps({"step": 100, "rows_seen": count}))

path = work / "config.json"
config = json.loads(path.read_text())
config.update(learning_rate=0.0003, stage="warm", rows=count)
path.write_text(json.dumps(config))
'''

MAKE_PACKAGE = '''
"""Runs inside a sandbox that reaches no registry: writes a wheel and has pip install it."""
import subprocess, sys, zipfile

name, info = "worldfork_demo", "worldfork_demo-1.0.dist-info"
files = {
    f"{name}.py": "answer = 42\\n",
    f"{info}/METADATA": "Metadata-Version: 2.1\\nName: worldfork-demo\\nVersion: 1.0\\n",
    f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: demo\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
}
files[f"{info}/RECORD"] = "".join(f"{path},,\\n" for path in [*files, f"{info}/RECORD"])
wheel = f"/tmp/{name}-1.0-py3-none-any.whl"
with zipfile.ZipFile(wheel, "w") as archive:
    for path, text in files.items():
        archive.writestr(path, text)
subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)
'''

READ_STATE = '''
"""Runs inside a sandbox: says what is there, as one JSON object."""
import ast, hashlib, importlib.metadata, json, pathlib, struct, sys

work = pathlib.Path("/workspace")

def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None

packages = {}
for name in sys.argv[1:]:
    try:
        __import__(name.replace("-", "_"))
        packages[name] = importlib.metadata.version(name)
    except Exception:
        packages[name] = None

shape = None
saved = work / "embeddings.npy"
if saved.is_file():
    with saved.open("rb") as file:
        size = struct.unpack("<8xH", file.read(10))[0]
        shape = list(ast.literal_eval(file.read(size).decode())["shape"])

step = work / "checkpoints"
files = {str(p.relative_to(step)): digest(p) for p in sorted(step.rglob("*")) if p.is_file()}
config = work / "config.json"
print(json.dumps({
    "packages": packages,
    "data": digest(work / "data" / "readings.csv"),
    "embeddings": {"shape": shape, "digest": digest(saved)},
    "checkpoint": files,
    "config": json.loads(config.read_text()) if config.is_file() else None,
}))
'''


@dataclass(frozen=True)
class WorldFacts:
    """What stands in the world once it is built."""

    packages: tuple[str, ...]
    """The packages it holds."""
    from_registry: bool
    """True where they came from the package registry; False for the world made of the standard library alone."""
    state: dict[str, Any]
    """What `READ_STATE` said of it."""

    @property
    def has_pytest(self) -> bool:
        """Whether hidden tests can be run with pytest in this world."""
        return "pytest" in self.packages


@dataclass(frozen=True)
class Survivor:
    """One of the five things and whether the restored sandbox has it unchanged."""

    name: str
    ok: bool
    detail: str


def build_world(sandbox: Sandbox, say: Say, installed: Installed | None = None) -> WorldFacts:
    """Make the world of the demo in a fresh sandbox that has a network.

    Args:
        say: told what is worth a line.
        installed: what `install_packages` returned, where it was called already; then no network is needed.

    Raises:
        SandboxError: a step that needs no network failed, which is a defect.
    """
    packages, from_registry = installed or install_packages(sandbox, say)
    sandbox.write_file(CONFIG_PATH, json.dumps(FIRST_CONFIG).encode())
    _python(sandbox, MAKE_STATE)
    return WorldFacts(packages, from_registry, read_state(sandbox, packages))


def install_packages(sandbox: Sandbox, say: Say) -> Installed:
    """Install the world's packages; where no registry is in reach, `say` is told so, and others take their place.

    Raises:
        SandboxError: a step that needs no network failed, which is a defect.
    """
    arguments = ["install", "--retries", "1", "--timeout", "20", "--progress-bar", "off", *PACKAGES]
    result = sandbox.run("pip", arguments, timeout=INSTALL_TIMEOUT_S)
    if result.exit_code == 0:
        return PACKAGES, True
    lines = (result.stdout + result.stderr).strip().splitlines() or [f"pip ended with {result.exit_code}"]
    say("The package registry is out of reach or refused: this world is made of the standard library alone.")
    say(f"pip said: {lines[-1].strip()[:200]}")
    _python(sandbox, MAKE_PACKAGE)
    if _copy_pytest(sandbox):
        say("pytest, which the hidden tests need, was copied from the Python that runs this demo.")
        return (OWN_PACKAGE, "pytest", "pytest-timeout"), False
    say("pytest is not to be had either: the hidden tests run with a loop of a few lines in its place.")
    return (OWN_PACKAGE,), False


def _copy_pytest(sandbox: Sandbox) -> bool:
    """Copy the caller's own pytest into the world's site-packages; False where the caller has none."""
    place = _python(sandbox, "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    try:
        parts = [importlib.metadata.distribution(name) for name in PYTEST_PARTS]
    except importlib.metadata.PackageNotFoundError:
        return False
    for part in parts:
        for file in part.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                sandbox.write_file(f"{place}/{file}", Path(file.locate()).read_bytes())
    return sandbox.run("python", ["-c", "import pytest, pytest_timeout"], timeout=STEP_TIMEOUT_S).exit_code == 0


def read_state(sandbox: Sandbox, packages: tuple[str, ...]) -> dict[str, Any]:
    """Say what a sandbox holds of the demo's world: versions, digests, shapes and the configuration."""
    state: dict[str, Any] = json.loads(_python(sandbox, READ_STATE, *packages))
    return state


def survivors(built: WorldFacts, restored: dict[str, Any]) -> list[Survivor]:
    """Compare a restored sandbox with the world as it was built: the article's five things, in its order."""
    before = built.state
    names = ", ".join(f"{name} {version}" for name, version in before["packages"].items())
    config, first = restored["config"] or {}, FIRST_CONFIG["learning_rate"]
    same = {name: before[name] == restored[name] for name in before}
    found = {
        "packages": bool(before["packages"]) and None not in before["packages"].values(),
        "data": before["data"] is not None,
        "embeddings": before["embeddings"]["shape"] == [1000, 128],
        "checkpoint": len(before["checkpoint"]) == 3,
        "config": config.get("learning_rate") not in (None, first),
    }
    details = {
        "packages": ("installed packages", names),
        "data": ("fetched file", f"data/readings.csv, sha256 {before['data']}"),
        "embeddings": ("generated embeddings", f"embeddings.npy, {_shape(restored)}"),
        "checkpoint": ("checkpoint directory", ", ".join(sorted(restored["checkpoint"]))),
        "config": (
            "changed configuration",
            f"learning_rate {first} -> {config.get('learning_rate')}",
        ),
    }
    return [Survivor(details[key][0], same[key] and found[key], details[key][1]) for key in details]


def _shape(state: dict[str, Any]) -> str:
    return " x ".join(str(side) for side in state["embeddings"]["shape"] or ["missing"])


def _python(sandbox: Sandbox, code: str, *arguments: str) -> str:
    result = sandbox.run("python", ["-c", code, *arguments], timeout=STEP_TIMEOUT_S)
    if result.exit_code != 0:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise SandboxError(f"a step of the demo's world ended with {result.exit_code}: {last}")
    return result.stdout
