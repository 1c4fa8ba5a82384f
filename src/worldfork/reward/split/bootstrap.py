"""The first lines of both programs: it reads the rest from its input and leaves no trace of it among the modules."""

import marshal
import os
import sys
import types


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            os._exit(3)
        data += part
    return data


def main() -> None:
    """Read modules, the last of which is run: a magic number and a count, then of each its name, code and text.

    The code is used where this Python is of the version that made it.
    """
    # Nothing of the working directory is imported by chance.
    sys.path[:] = [each for each in sys.path if each not in ("", ".")]
    magic = _read(int.from_bytes(_read(4), "little"))
    count = int.from_bytes(_read(4), "little")
    parts = [_read(int.from_bytes(_read(4), "little")) for _ in range(3 * count)]
    is_same = magic == sys.modules["_frozen_importlib_external"].MAGIC_NUMBER
    before = set(sys.modules)
    for place in range(0, len(parts), 3):
        name, code, text = parts[place].decode(), parts[place + 1], parts[place + 2]
        above, _, last = name.rpartition(".")
        for depth in range(above.count(".") + 1):
            package = ".".join(above.split(".")[: depth + 1])
            sys.modules.setdefault(package, types.ModuleType(package))
        made = sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[above], last, made)
        exec(marshal.loads(code) if is_same else compile(text, f"<{name}>", "exec"), vars(made))
    for name in set(sys.modules) - before:
        if name.startswith("worldfork"):
            del sys.modules[name]
    made.main()


main()
