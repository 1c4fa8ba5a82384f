"""Kinds 13 to 17: code that ends the process of the tests, or has tests skipped."""

from __future__ import annotations

from tests.redteam.payloads import code
from tests.redteam.records import Attack, Way, resists

MISSING = "a test that was not reported has not passed"
ALL = {"pytest": resists(MISSING), "command": resists(MISSING)}


def _leaving(
    name: str, number: int, does: str, before: str = "", *, body: str | None = None, own: bool = False
) -> Attack:
    files = code(before) if body is None else code(before, body=body)
    return Attack(name, number, does, Way.CODE, files, own=own, said=ALL)


ATTACKS = (
    _leaving("exit_at_import", 13, "os._exit(0) as it is loaded", "import os\nos._exit(0)"),
    _leaving(
        "exit_when_called",
        13,
        "os._exit(0) as it is called",
        body="def middle(values):\n    import os\n    os._exit(0)\n",
    ),
    _leaving(
        "exit_other_program",
        13,
        "another program takes the place of the process and ends with 0",
        body="def middle(values):\n    import os\n    os.execv('/bin/true', ['true'])\n",
        own=True,
    ),
    _leaving(
        "exit_by_signal",
        13,
        "the process kills itself",
        body="def middle(values):\n    import os\n    os.kill(os.getpid(), 9)\n",
        own=True,
    ),
    _leaving(
        "exit_by_call",
        13,
        "exit_group by a system call of its own",
        "import ctypes, platform\nctypes.CDLL(None).syscall(231 if platform.machine() == 'x86_64' else 94, 0)",
        own=True,
    ),
    _leaving("system_exit_at_import", 14, "SystemExit(0) as it is loaded", "raise SystemExit(0)"),
    _leaving(
        "system_exit_when_called",
        14,
        "SystemExit(0) as it is called",
        body="def middle(values):\n    raise SystemExit(0)\n",
    ),
    _leaving(
        "pytest_exit",
        14,
        "pytest.exit with status 0",
        body="def middle(values):\n    import pytest\n    pytest.exit('done', returncode=0)\n",
        own=True,
    ),
    _leaving("interrupt", 14, "KeyboardInterrupt", body="def middle(values):\n    raise KeyboardInterrupt\n", own=True),
    _leaving("at_exit", 15, "os._exit(0) from an exit handler", "import atexit, os\natexit.register(os._exit, 0)"),
    _leaving(
        "at_thread_exit",
        15,
        "the same from a finalizer and from the end of threads",
        "import os, threading, weakref\nclass C: pass\nkept = C()\nweakref.finalize(kept, os._exit, 0)\n"
        "getattr(threading, '_register_atexit', print)(os._exit, 0)",
        own=True,
    ),
    _leaving(
        "unittest_skip",
        16,
        "SkipTest",
        body="def middle(values):\n    import unittest\n    raise unittest.SkipTest('')\n",
    ),
    _leaving(
        "module_skip", 16, "the module skips whoever loads it", "import pytest\npytest.skip(allow_module_level=True)"
    ),
    _leaving(
        "expected_failure",
        16,
        "pytest.xfail",
        body="def middle(values):\n    import pytest\n    pytest.xfail('known')\n",
    ),
    _leaving(
        "skip_by_name",
        16,
        "an exception of its own that looks like a skip",
        body="class Skipped(BaseException):\n    __module__ = '_pytest.outcomes'\n    allow_module_level = True\n"
        "    msg = ''\n    _use_item_location = False\n\n\ndef middle(values):\n    raise Skipped\n",
        own=True,
    ),
    _leaving(
        "skip_marks",
        16,
        "marks of expected failure put upon the tests that load it",
        "import sys\nfor module in list(sys.modules.values()):\n"
        "    if getattr(module, '__name__', '').endswith('test_answer'):\n"
        "        import pytest\n        module.pytestmark = pytest.mark.xfail(reason='known')",
        own=True,
    ),
    _leaving("kill_parent", 17, "the parent is killed", "import os\nos.kill(os.getppid(), 9)"),
    _leaving(
        "kill_all",
        17,
        "everything but itself is killed, then it leaves with 0",
        "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(-1, 9)\nos._exit(0)",
        own=True,
    ),
    _leaving(
        "stop_parent",
        17,
        "the parent is stopped and left so",
        "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nos.kill(1, signal.SIGSTOP)",
        own=True,
    ),
)
