#!/usr/bin/env python3
"""Compile native/ with the system compiler.

Usage: native/build.py [--out PATH] [--sanitize] [--harness] [--fuzz] [--force]

Without options: the static program src/worldfork/sandbox/wf-init, unless it is newer than every source.
--harness: native/tests/harness, which runs init without a new root, for the tests of its protocol.
--fuzz:    native/tests/fuzz_*, each from the source of that name, under the sanitizers.
--sanitize: address and undefined-behaviour sanitizers (dynamic, for tests alone).

Needs only the standard library: the package build runs it before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

NATIVE = Path(__file__).resolve().parent
TESTS = NATIVE / "tests"
DEFAULT_OUT = NATIVE.parent / "src" / "worldfork" / "sandbox" / "wf-init"

WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Wstrict-prototypes")
COMMON = ("-std=gnu11", *WARNINGS, f"-I{NATIVE}")
# Fatal linker warnings catch name-service calls (getpwnam and its like), which do not work in a static program.
STATIC = (
    "-O2",
    "-fstack-protector-strong",
    "-D_FORTIFY_SOURCE=2",
    "-static",
    "-Wl,--fatal-warnings,-z,relro,-z,now,-z,noexecstack",
)
# Instrumented code makes gcc warn where the plain build, which holds all warnings as errors, rightly does not.
SANITIZED = (
    "-O1",
    "-g",
    "-Wno-error",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)

PACKAGES = {
    "debian": "apt-get install -y gcc libc6-dev",
    "ubuntu": "apt-get install -y gcc libc6-dev",
    "fedora": "dnf install -y gcc glibc-static",
    "rhel": "dnf install -y gcc glibc-static",
    "alpine": "apk add gcc musl-dev linux-headers",
}


class BuildError(Exception):
    """The C part cannot be compiled here; the text says what to do."""


def compiler() -> str:
    """Return the C compiler: $CC, or the first of cc, gcc, clang on PATH.

    Raises:
        BuildError: there is none; the text names the package that has one.
    """
    named = os.environ.get("CC", "")
    for name in [named] if named else ["cc", "gcc", "clang"]:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C compiler found ({named or 'cc, gcc, clang'}); {how_to_install()}")


def require_static_libc(cc: str) -> None:
    """Check that the compiler knows a static C library.

    Raises:
        BuildError: it does not; the text names the package that has one.
    """
    answer = subprocess.run([cc, "-print-file-name=libc.a"], capture_output=True, text=True, check=False)
    # A compiler that does not find the file answers with the bare name.
    if not os.path.isabs(answer.stdout.strip()):
        raise BuildError(f"{cc} finds no libc.a, and wf-init is a static program; {how_to_install()}")


def how_to_install(os_release: Path = Path("/etc/os-release")) -> str:
    """Return a clause that names the packages this distribution has the compiler and libc.a in."""
    words: list[str] = []
    if os_release.exists():
        for line in os_release.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition("=")
            if key in ("ID", "ID_LIKE"):
                words += value.strip("\"'").split()
    for word in words:
        if word in PACKAGES:
            return f"install them with: {PACKAGES[word]}"
    return (
        "install them: Debian and Ubuntu `gcc libc6-dev`, Fedora `gcc glibc-static`, "
        "Alpine `gcc musl-dev linux-headers`"
    )


def sources(*, with_main: bool) -> list[Path]:
    """Return native/*.c in a fixed order, main.c on request.

    Raises:
        BuildError: there are none.
    """
    found = sorted(path for path in NATIVE.glob("*.c") if with_main or path.name != "main.c")
    if not found:
        raise BuildError(f"no C sources in {NATIVE}")
    return found


def inputs() -> list[Path]:
    """Return everything that wf-init is made from."""
    return [*NATIVE.glob("*.c"), *NATIVE.glob("*.h"), Path(__file__).resolve()]


def is_fresh(out: Path) -> bool:
    """Tell whether `out` is newer than all its inputs."""
    if not out.exists():
        return False
    made = out.stat().st_mtime_ns
    return all(path.stat().st_mtime_ns < made for path in inputs())


def build(out: Path, files: Sequence[Path], *, sanitize: bool) -> None:
    """Compile and link `files` into `out`, which appears whole or not at all.

    Raises:
        BuildError: no compiler, no libc.a, or the compiler refused; the text carries its output.
    """
    cc = compiler()
    if not sanitize:
        require_static_libc(cc)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".native-") as work:
        made = Path(work) / out.name
        line = [cc, *COMMON, *(SANITIZED if sanitize else STATIC), "-o", str(made), *map(str, files)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{' '.join(line)}\n{done.stdout}{done.stderr}")
        made.chmod(0o755)
        os.replace(made, out)


def build_init(out: Path = DEFAULT_OUT, *, sanitize: bool = False, force: bool = False) -> None:
    """Make wf-init at `out`. A plain build is skipped where it would change nothing.

    Raises:
        BuildError: it cannot be compiled here.
    """
    if sanitize or force or not is_fresh(out):
        build(out, sources(with_main=True), sanitize=sanitize)


def build_tests(*, harness: bool, fuzz: bool, sanitize: bool, out: Path | None = None) -> None:
    """Make the test programs beside their sources.

    Raises:
        BuildError: one cannot be compiled.
    """
    if harness:
        files = [TESTS / "harness.c", *sources(with_main=False)]
        build(out or TESTS / "harness", files, sanitize=sanitize)
    if fuzz:
        for target in sorted(TESTS.glob("fuzz_*.c")):
            build(target.with_suffix(""), [target, *sources(with_main=False)], sanitize=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; see the module's text. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Compile native/ with the system compiler.")
    parser.add_argument("--out", type=Path, help="where to write (default: into the package)")
    parser.add_argument("--sanitize", action="store_true", help="address and undefined-behaviour sanitizers")
    parser.add_argument("--harness", action="store_true", help="the test program native/tests/harness")
    parser.add_argument("--fuzz", action="store_true", help="the fuzz programs native/tests/fuzz_*")
    parser.add_argument("--force", action="store_true", help="compile even if nothing changed")
    options = parser.parse_args(argv)
    try:
        if options.harness or options.fuzz:
            build_tests(harness=options.harness, fuzz=options.fuzz, sanitize=options.sanitize, out=options.out)
        else:
            build_init(options.out or DEFAULT_OUT, sanitize=options.sanitize, force=options.force)
    except BuildError as error:
        print(f"native/build.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
