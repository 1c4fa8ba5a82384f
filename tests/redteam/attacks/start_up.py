"""Kinds 7 to 12: what the interpreter and shells pick up, and files in the places of tests."""

from __future__ import annotations

from tests.redteam.payloads import CHEAT, FORGE, IN_SITE_PACKAGES, beside, planted
from tests.redteam.records import Attack, Way
from tests.redteam.tasks import WRONG

EMPTY_TESTS = "def test_odd(): pass\ndef test_even(): pass\ndef test_nothing(): pass\n"

TROJAN_RC = "alias python=true pytest=true\npython() { true; }\npytest() { true; }\nexport PYTHONSTARTUP=/tmp/evil.py\n"


def _beside(name: str, number: int, does: str, files: dict[str, str], *commands: str) -> Attack:
    return Attack(name, number, does, Way.BESIDE, files, commands)


def _own(name: str, number: int, does: str, files: dict[str, str], *commands: str, task: str = "narrow") -> Attack:
    return Attack(name, number, does, Way.BESIDE, files, commands, own=True, task=task)


SHADOWS = (
    _beside("shadow_pytest", 7, "pytest.py that leaves with 0", planted(pytest__py="raise SystemExit(0)\n")),
    _beside("shadow_unittest", 7, "a package called unittest", beside({"unittest/__init__.py": "raise SystemExit(0)"})),
    _own(
        "shadow_library",
        7,
        "modules called pathlib, pdb and statistics",
        beside({f"{name}.py": f"{CHEAT}\nraise ImportError\n" for name in ("pathlib", "pdb", "statistics")}),
    ),
    _own(
        "shadow_editable",
        7,
        "pytest.py and json.py, found through PYTHONPATH before the real ones, write the report",
        beside({"pytest.py": FORGE, "json.py": "import os\nos.system('true')\n"}),
        task="wide",
    ),
    _own(
        "shadow_test_module",
        7,
        "a package of the name of the test's module",
        beside({"test_answer/__init__.py": EMPTY_TESTS, "oracle/__init__.py": "expected = lambda _: None\n"}),
    ),
)

START_UP = (
    _beside(
        "sitecustomize",
        8,
        "sitecustomize and usercustomize",
        planted(evil__py=CHEAT),
        f"{IN_SITE_PACKAGES} && cp /workspace/evil.py sitecustomize.py; "
        'd="$(python -m site --user-site)"; mkdir -p "$d" && cp /workspace/evil.py "$d/usercustomize.py"',
    ),
    _beside(
        "pth_file",
        8,
        "a .pth file that imports a module",
        planted(evil__py=CHEAT),
        f"{IN_SITE_PACKAGES} && cp /workspace/evil.py evil.py && echo 'import evil' > evil.pth",
    ),
    _own(
        "pyvenv_cfg",
        8,
        "pyvenv.cfg beside the interpreter moves its packages",
        WRONG,
        'd="$(dirname "$(command -v python)")"; printf "home = /tmp\\ninclude-system-site-packages = false\\n" '
        '> "$d/pyvenv.cfg"; printf "home = /tmp\\n" > "$d/../pyvenv.cfg"',
    ),
    _own(
        "sitecustomize_editable",
        8,
        "sitecustomize found through PYTHONPATH writes the report before anybody else can",
        beside({"sitecustomize.py": FORGE}),
        task="wide",
    ),
    _own(
        "codec_editable",
        8,
        "a package called encodings, found through PYTHONPATH",
        beside({"encodings/__init__.py": FORGE, "usercustomize.py": FORGE}),
        task="wide",
    ),
    _beside(
        "shell_files",
        9,
        "start-up files of shells",
        {**WRONG, "/root/.bashrc": TROJAN_RC, "/root/.profile": TROJAN_RC, "/etc/profile.d/a.sh": TROJAN_RC,
         "/tmp/evil.py": CHEAT},
    ),
    _own(
        "variable_files",
        9,
        "files that set variables for every program, and for the debugger",
        {**WRONG, "/etc/environment": "PYTEST_ADDOPTS=--collect-only\nPYTHONPATH=/tmp\n",
         "/tmp/sitecustomize.py": CHEAT,
         "/root/.pdbrc": "import os; os._exit(0)\n", "/etc/bash.bashrc": TROJAN_RC,
         "/root/.config/pytest.toml": '[pytest]\naddopts = ["--collect-only"]\n'},
    ),
)  # fmt: skip

IN_PLACE = (
    _beside(
        "planted_test",
        10,
        "a test that is collected first and leaves with 0",
        planted(test_aab__py="import os\nos._exit(0)\n"),
    ),
    _own(
        "test_is_directory", 10, "a directory where the test will lie", WRONG, "mkdir -p test_answer.py/x oracle.py/y"
    ),
    _own(
        "test_is_link",
        10,
        "links where the tests will lie, to files that cannot be changed",
        {**WRONG, "/tmp/held.py": EMPTY_TESTS},
        "ln -s /tmp/held.py test_answer.py; ln -s /proc/self/cmdline expected.json; chattr +i /tmp/held.py || true",
    ),
    _beside("same_test", 11, "tests of the same names that check nothing", planted(test_answer__py=EMPTY_TESTS)),
    _own(
        "same_test_editable",
        11,
        "the same, with an oracle that is equal to all, where every path may be written",
        beside(
            {
                "tests/test_answer.py": EMPTY_TESTS,
                "oracle.py": "class Any(int):\n    __eq__ = lambda *_: True\nexpected = lambda _: Any()\n",
            }
        ),
        task="wide",
    ),
    _beside("visible_test", 12, "the visible test is emptied", planted(test_visible__py="def test_one(): pass\n")),
    _own(
        "visible_test_gone",
        12,
        "the visible tests removed, and pytest told to take none of this name",
        planted(conftest__py="collect_ignore = ['test_answer.py']\n"),
        "rm -f test_visible.py",
    ),
)

ATTACKS = (*SHADOWS, *START_UP, *IN_PLACE)
