"""The decoders of untrusted bytes against a bounded, repeatable number of broken inputs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[3] / "native"
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ITERATIONS = 30_000


def compiled(name: str, directory: Path) -> Path:
    """Compile one target, under the sanitizers where the compiler has them."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    out = directory / name
    line = [compiler, "-std=gnu11", "-O1", "-g", "-o", str(out), str(NATIVE / "tests" / f"{name}.c")]
    line += [str(NATIVE / source) for source in ("frame.c", "mux.c", "mux_stream.c", "guest_body.c")]
    if subprocess.run([*line, *SANITIZE], capture_output=True, check=False).returncode:
        subprocess.run(line, check=True)
    return out


@pytest.mark.timeout(180)  # compiled under sanitizers first
@pytest.mark.parametrize("name", ["fuzz_frame", "fuzz_exec", "fuzz_mux", "fuzz_body"])
@pytest.mark.parametrize("seed", ["1", "20000001"])
def test_broken_bytes_never_break_a_decoder(name: str, seed: str, tmp_path: Path) -> None:
    program = compiled(name, tmp_path)
    done = subprocess.run([program, str(ITERATIONS), seed], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{ITERATIONS} inputs\n"), done.stderr
