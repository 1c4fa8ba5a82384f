"""Hooks of the package build: compile native/ into the package, and tag the wheel for this machine."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def _native_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("worldfork_native_build", ROOT / "native" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildWithNative(build_py):
    """Compile first, so that wf-init is there when package data is collected, also for an editable install."""

    def run(self) -> None:
        native = _native_build()
        try:
            native.build_init(native.DEFAULT_OUT)
        except native.BuildError as error:
            raise SystemExit(f"worldfork: {error}") from None
        super().run()


class PlatformDistribution(Distribution):
    """Not the same on every machine, although Python sees no extension module."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """The C part is a static program: bound to the machine, to no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithNative, "bdist_wheel": PlatformWheel})
