"""The build of the C part: what it says on a machine that cannot compile, and what it leaves when it fails."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

NATIVE = Path(__file__).resolve().parents[3] / "native"


@pytest.fixture
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("native_build", NATIVE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("ID=debian\n", "apt-get install -y gcc libc6-dev"),
        ('ID=linuxmint\nID_LIKE="ubuntu debian"\n', "apt-get install -y gcc libc6-dev"),
        ('ID="fedora"\n', "dnf install -y gcc glibc-static"),
        ("ID=alpine\n", "apk add gcc musl-dev"),
        ("ID=plan9\n", "Fedora `gcc glibc-static`"),
    ],
)
def test_the_package_is_named(build: ModuleType, tmp_path: Path, lines: str, words: str) -> None:
    (tmp_path / "os-release").write_text(lines)
    assert words in build.how_to_install(tmp_path / "os-release")


def test_no_compiler(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(build.BuildError, match=r"no C compiler found.*install them"):
        build.compiler()


def test_no_static_libc(build: ModuleType, tmp_path: Path) -> None:
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho libc.a\n")
    fake.chmod(0o755)
    with pytest.raises(build.BuildError, match=r"finds no libc.a.*install them"):
        build.require_static_libc(str(fake))


def test_a_failed_build_tells_why_and_keeps_what_was_there(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    monkeypatch.setattr(build, "NATIVE", tmp_path)
    (tmp_path / "main.c").write_text("int main(void) { int unused; return 0; }\n")
    out = tmp_path / "out" / "wf-init"
    out.parent.mkdir()
    out.write_text("the one before")
    assert build.main(["--force", "--out", str(out)]) == 2
    assert "unused" in capsys.readouterr().err
    assert out.read_text() == "the one before"
    assert os.listdir(out.parent) == ["wf-init"]


def test_a_build_is_repeated_only_when_a_source_changed(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    monkeypatch.setattr(build, "NATIVE", tmp_path)
    source = tmp_path / "main.c"
    source.write_text("int main(void) { return 0; }\n")
    out = tmp_path / "wf-init"
    build.build_init(out)
    first = out.stat().st_ino, out.stat().st_mtime_ns
    build.build_init(out)
    assert (out.stat().st_ino, out.stat().st_mtime_ns) == first
    later_ns = out.stat().st_mtime_ns + 1_000_000_000
    os.utime(source, ns=(later_ns, later_ns))
    build.build_init(out)
    assert out.stat().st_mtime_ns != first[1]
    assert os.access(out, os.X_OK)
