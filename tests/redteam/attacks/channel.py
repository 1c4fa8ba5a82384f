"""Kinds 54 and 55: what a candidate could send to tests that live in another sandbox."""

from __future__ import annotations

from tests.redteam.payloads import code
from tests.redteam.records import SAME_PROCESS, Attack, Way, is_open, resists

PLAIN = resists("it is wrong by the tests' own measure")

SHARED = is_open(SAME_PROCESS)

IF_ODD = "    if len(values) == 3:\n        return 5\n"


def _value(name: str, does: str, body: str, own: bool = True) -> Attack:
    said = {"pytest": PLAIN, "command": PLAIN, "final": PLAIN}
    return Attack(name, 54, does, Way.VALUE, code(body=body), own=own, said=said)


def _frames(name: str, does: str, before: str, body: str = "", own: bool = True) -> Attack:
    said = {"pytest": PLAIN, "command": PLAIN, "final": PLAIN}
    return Attack(name, 55, does, Way.VALUE, code(before, body=body) if body else code(before), own=own, said=said)


VALUES = (
    _value("answers_endless", "an iterator without end", "import itertools\n\n\ndef middle(values):\n"
           "    return itertools.count()\n", own=False),
    _value("answers_huge", "a text of 200 MB, and then an integer of as many digits",
           f"def middle(values):\n{IF_ODD}    return 'x' * (200 << 20) if values else 1 << (1 << 30)\n"),
    _value("answers_deep", "lists in lists a hundred thousand deep",
           f"def middle(values):\n{IF_ODD}    held = []\n    for _ in range(100000):\n        held = [held]\n"
           "    return held\n"),
    _value("answers_itself", "a list that holds itself, and a table of all that its module knows",
           f"def middle(values):\n{IF_ODD}    held = []\n    held.append(held)\n    return [held, globals()]\n"),
    _value("answers_objects", "objects that reduce to calls",
           f"class Call:\n    def __reduce__(self):\n        import os\n        return os._exit, (0,)\n\n\n"
           f"def middle(values):\n{IF_ODD}    return [Call(), type, middle, open]\n"),
    _value("answers_lookalikes", "decimals, fractions, complex numbers and truth in the place of numbers",
           f"import decimal\n\n\ndef middle(values):\n{IF_ODD}    return decimal.Decimal('NaN') if values else True\n"),
    _value("raises_everything", "errors that tests do not catch: skips, exits, interrupts, groups of them",
           "import unittest\n\n\ndef middle(values):\n    if len(values) == 3:\n        return 5\n"
           "    raise BaseExceptionGroup('', [SystemExit(0), KeyboardInterrupt(), unittest.SkipTest('')])\n"),
    _value("changes_arguments", "arguments are changed into things that are equal to all",
           "class Equal(list):\n    __eq__ = lambda *_: True\n    __hash__ = None\n\n\ndef middle(values):\n"
           f"{IF_ODD}    values[:] = [Equal(), values]\n    raise IndexError(values)\n"),
)  # fmt: skip

FRAMES = (
    _frames("frames_beforehand", "answers of many shapes are written as it is loaded", """\
        import os, struct
        for kind in (b"R", b"E", b"K", b"J", b"B", b"X", b"V"):
            for body in (b"", b"N", b'{"id": "test_answer.py::test_even", "outcome": "passed"}', bytes(64)):
                frame = kind + bytes(8) + body
                for number in range(1, 16):
                    try:
                        os.write(number, struct.pack("<I", len(frame)) + frame)
                    except OSError:
                        pass
        """, own=False),
    _frames("frames_of_impossible_size", "a frame that says it has four gigabytes, and others below nothing", """\
        import os
        for text in (b"\\xff" * 64, b"\\0" * 64, b"\\x01\\0\\0\\0R"):
            for number in range(1, 16):
                try:
                    os.write(number, text)
                except OSError:
                    pass
        """),
    _frames("frames_without_end", "small frames without end, to whoever has to read them", """\
        import os, struct
        flood = b"".join(struct.pack("<I", 9) + kind + bytes(8) for kind in (b"R", b"V", b"J", b"K")) * 64
        while True:
            for number in range(3, 16):
                try:
                    os.write(number, flood)
                except OSError:
                    pass
        """),
    _frames("answers_twice", "two processes go on answering", "import os", """\
        def middle(values):
            if len(values) == 4:
                os.fork()
            return sorted(values)[len(values) // 2]
        """),
    _frames("report_in_frames", "frames that report passed tests, with the token of the call at hand", "", """\
        def middle(values):
            import gc, os, struct
            if len(values) != 4:
                return sorted(values)[len(values) // 2]
            tokens = [getattr(found, "_token", None) for found in gc.get_objects()]
            for token in [each for each in tokens if isinstance(each, bytes) and len(each) == 8] or [bytes(8)]:
                for name in ("test_even", "test_nothing"):
                    body = b'{"id": "test_answer.py::%s", "outcome": "passed"}' % name.encode()
                    for kind in (b"J", b"K", b"R"):
                        frame = kind + token + body
                        for number in range(3, 16):
                            try:
                                os.write(number, struct.pack("<I", len(frame)) + frame)
                            except OSError:
                                pass
            os._exit(0)
        """),
    _frames("streams_closed", "every stream is closed and others put in their places", """\
        import os
        os.closerange(0, 64)
        for _ in range(8):
            os.open(os.devnull, os.O_RDWR)
        """),
    _frames("module_replaced", "the module puts an object that answers everything in its own place", """\
        import sys
        class Everything:
            __path__ = []
            def __getattr__(self, name):
                return self
            def __call__(self, *_, **__):
                return self
            __eq__ = lambda *_: True
            __hash__ = object.__hash__
            __iter__ = lambda self: iter([self])
        sys.modules[__name__ + "_"] = Everything()
        """, "def middle(values):\n    if len(values) == 3:\n        return 5\n    return Everything()\n")
    .but(pytest=SHARED, command=SHARED, final=SHARED),
)  # fmt: skip

ATTACKS = (*VALUES, *FRAMES)
