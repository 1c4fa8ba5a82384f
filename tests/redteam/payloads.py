"""What attacks want to have run, and the shapes in which they are written down."""

from __future__ import annotations

from textwrap import dedent

from tests.redteam.tasks import WRONG, WRONG_CODE

CHEAT = dedent("""\
    try:
        import _pytest.python
        _pytest.python.Function.runtest = lambda self: None
    except ImportError:
        pass
    try:
        import unittest
        unittest.TestCase.assertEqual = lambda *_, **__: None
    except (ImportError, AttributeError):
        pass
    """)
"""Run in the process of the tests, it makes every one of them pass."""

IDS = ("test_answer.py::test_odd", "test_answer.py::test_even", "test_answer.py::test_nothing")

FORGED_LINES = dedent(f"""\
    import json
    LINES = [json.dumps(dict(id=prefix + name, outcome="passed", wall_s=0.0, cpu_s=0.0, waited_s=0.0))
             for name in {IDS!r} for prefix in ("", "tests/")]
    LINES = [json.dumps(dict(ready=1)), json.dumps(dict(collected=3)), *LINES, json.dumps(dict(finished=0))]
    FORGED = ("\\n" + "\\n".join(LINES) + "\\n").encode()
    """)
"""Defines FORGED: what a report of three passed tests looks like."""


FORGE = FORGED_LINES + dedent("""\
    import os
    for number in range(1, 64):
        try:
            os.write(number, FORGED)
        except OSError:
            pass
    os._exit(0)
    """)
"""Writes FORGED wherever it can be written, and leaves."""


def code(before: str = "", after: str = "", body: str = WRONG_CODE) -> dict[str, str]:
    """Return files whose answer does something when it is loaded, and is wrong."""
    return {**WRONG, "answer.py": f"{dedent(before)}\n\n{dedent(body)}\n\n{dedent(after)}"}


def planted(**files: str) -> dict[str, str]:
    """Return the wrong answer and files beside it: `conftest__py` is `conftest.py`."""
    return {**WRONG, **{name.replace("__", "."): dedent(text) for name, text in files.items()}}


def beside(files: dict[str, str]) -> dict[str, str]:
    """Return the wrong answer and files beside it."""
    return {**WRONG, **{name: dedent(text) for name, text in files.items()}}


def python(text: str) -> str:
    """Return a shell line that runs a program."""
    return f"python - <<'PROGRAM'\n{dedent(text)}\nPROGRAM"


IN_SITE_PACKAGES = 'cd "$(python -c \'import sysconfig; print(sysconfig.get_paths()["purelib"])\')"'
