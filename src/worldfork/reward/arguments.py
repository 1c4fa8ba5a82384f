"""How the hidden tests are run: what pytest is told, and by whom it is configured."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from worldfork.core.errors import PathError, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import FailureKind
from worldfork.records.globs import is_editable
from worldfork.records.task import Task
from worldfork.reward.places import TASK_DIRECTORY, inside_task
from worldfork.reward.reporter import WALL_FACTOR as WALL_FACTOR

TEST_ENV = {
    "PYTEST_ADDOPTS": "",
    "PYTEST_PLUGINS": "",
    # Only what is asked for by name: an installed plug-in can change what passes.
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    # The order of sets, and so the set of passed tests, is the same each time.
    "PYTHONHASHSEED": "0",
}
"""Variables of the process that runs the tests."""

CONFIGURATIONS = {
    "pytest.toml": b"[pytest]",
    ".pytest.toml": b"[pytest]",
    "pytest.ini": b"",
    ".pytest.ini": b"",
    "pyproject.toml": b"[tool.pytest",
    "tox.ini": b"[pytest]",
    "setup.cfg": b"[tool:pytest]",
}
"""What pytest reads in the task's directory, in its order, and what must be in it to count."""

PLUGINS = {
    "--timeout": "pytest_timeout",
    "--forked": "pytest_forked",
    "--asyncio-mode": "pytest_asyncio.plugin",
    "--anyio-mode": "anyio.pytest_plugin",
    "--reruns": "pytest_rerunfailures",
    "--randomly-seed": "pytest_randomly",
    "--randomly-dont-reorganize": "pytest_randomly",
    "--benchmark-disable": "pytest_benchmark.plugin",
    "--hypothesis-profile": "_hypothesis_pytestplugin",
    "--hypothesis-seed": "_hypothesis_pytestplugin",
}
"""Options of plug-ins: a task that names one wants the plug-in. Any other is named by `-p`."""

_MAX_CONFIGURATION_BYTES = 1 << 20
_MARKED = re.compile(rb"\bmark\s*\.\s*timeout\s*\(\s*(?:timeout\s*=\s*)?(\d+(?:\.\d*)?|\.\d+)")
_CONFIGURED = re.compile(rb"(?:^[ \t]*|--)timeout[\"']?[ \t]*[= ][ \t]*[\"']?(\d+(?:\.\d*)?|\.\d+)", re.MULTILINE)


def fixed_args(task: Task, configuration: str | None = None) -> list[str]:
    """Return what pytest is told before the task's own arguments.

    Args:
        task: whose tests.
        configuration: path of the task; by default the one that the texts of its hidden tests hold, or none at all.
    """
    chosen = configuration or first_configuration(task.hidden_tests)
    return [
        "-q",
        "--tb=no",
        "--no-summary",
        # A file of tests that names what is not there yet says nothing of the others.
        "--continue-on-collection-errors",
        "-c",
        inside_task(chosen) if chosen else "/dev/null",
        f"--rootdir={TASK_DIRECTORY}",
        f"--confcutdir={TASK_DIRECTORY}",
        "-p",
        "no:cacheprovider",
    ]


def first_configuration(paths: Iterable[str]) -> str | None:
    """Return which of the paths pytest would take for its configuration."""
    there = set(paths)
    return next((name for name in CONFIGURATIONS if name in there), None)


async def find_configuration(sandbox: AsyncSandbox, task: Task, tests: Iterable[str]) -> str | None:
    """Return the configuration that counts: of the hidden tests, else of the world where no policy may change it.

    Raises:
        SandboxError: the sandbox could not be read.
    """
    hidden = first_configuration(tests)
    if hidden is not None:
        return hidden
    # One look at the directory: to ask for each by name is a way to the sandbox and back for each.
    try:
        entries = (await sandbox.list_directory(TASK_DIRECTORY)).entries
    except PathError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return None
    found = {entry.name: entry for entry in entries}
    for name, mark in CONFIGURATIONS.items():
        facts = found.get(name)
        if facts is None or facts.kind != "f" or (facts.size or 0) > _MAX_CONFIGURATION_BYTES:
            continue
        if is_editable(name, task.editable):
            continue
        if mark in await sandbox.read_file(inside_task(name), max_bytes=_MAX_CONFIGURATION_BYTES):
            return name
    return None


async def shortest_limit(sandbox: AsyncSandbox, tests: Mapping[str, bytes], configuration: str | None) -> float | None:
    """Return the shortest limit that the tests' own marks and configuration set for a test, in seconds.

    What a report says of a test's limit may have been written by code under test; nothing below this is believed.

    Args:
        sandbox: where the configuration is, if it is none of the hidden tests.
        tests: those, path of the task -> content.
        configuration: its path of the task.

    Raises:
        SandboxError: the sandbox could not be read.
    """
    texts = [content for path, content in tests.items() if path.endswith(".py")]
    found = [number for text in texts for number in _MARKED.findall(text[:_MAX_CONFIGURATION_BYTES])]
    if configuration:
        text = tests.get(configuration)
        if text is None:
            text = await sandbox.read_file(inside_task(configuration), max_bytes=_MAX_CONFIGURATION_BYTES)
        found += _CONFIGURED.findall(text)
    return min((float(number) for number in found if float(number) > 0), default=None)


def test_limits(test_args: Sequence[str]) -> tuple[list[str], float | None]:
    """Turn a test's time limit from wall into CPU seconds, and leave a longer wall limit for tests that sleep.

    Returns:
        (arguments for pytest with the plug-ins that they need, CPU seconds that one test may use or None).

    Raises:
        VerifierError: `--timeout` without a number.
    """
    plugins = _plugins(test_args)
    limit = next((each for each in test_args if each.startswith("--timeout=")), None)
    if limit is None:
        return [*plugins, *test_args], None
    try:
        seconds = float(limit.partition("=")[2])
    except ValueError:
        raise VerifierError(f"{limit!r} is no time limit", kind=FailureKind.CALIBRATION) from None
    if not 0 < seconds < math.inf:
        return [*plugins, *test_args], None
    kept = [each for each in test_args if each is not limit]
    return [*plugins, f"--timeout={seconds * WALL_FACTOR:g}", *kept], seconds


test_limits.__test__ = False  # type: ignore[attr-defined]  # pytest would collect a function of this name


def _plugins(test_args: Sequence[str]) -> list[str]:
    named = dict.fromkeys(
        module
        for each in test_args
        for option, module in PLUGINS.items()
        if each == option or each.startswith((f"{option}=", f"{option}-method", f"{option}_method"))
    )
    return [part for module in named for part in ("-p", module)]
