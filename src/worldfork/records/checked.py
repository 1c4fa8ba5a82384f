"""Values that come from outside, looked at before they become part of a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import PurePosixPath
from typing import Any

from worldfork.core.errors import ConfigError


def checked_text(name: str, value: object, where: str = "") -> str:
    """Return `value` if it is text that a file or an argument can hold.

    Raises:
        ConfigError: it is not; `field` is `name`.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{name}{where} is {type(value).__name__}, not text", field=name)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair; no file or argument can hold it.
        raise ConfigError(f"{name}{where} holds a lone surrogate", field=name) from None
    return value


def check_path(name: str, path: object) -> str:
    """Return `path` if it is a relative path in normal form that stays inside the task's directory.

    Raises:
        ConfigError: it is not; `field` is `name`.
    """
    text = checked_text(name, path)
    pure = PurePosixPath(text)
    if not text or pure.is_absolute() or ".." in pure.parts or str(pure) != text or text == "." or "\0" in text:
        raise ConfigError(f"{name}: {path!r} is not a plain relative path", field=name)
    return text


def checked_files(name: str, value: object) -> dict[str, str]:
    """Return a mapping of plain relative paths to texts.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is not an object of path -> text", field=name)
    for path, text in value.items():
        check_path(name, path)
        checked_text(name, text, where=f"[{path!r}]")
    return dict(value)


def checked_strings(name: str, value: object) -> tuple[str, ...]:
    """Return a tuple of texts without zero bytes.

    Raises:
        ConfigError: it is no list of such.
    """
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} is not a list of text", field=name)
    for each in value:
        if "\0" in checked_text(name, each):
            raise ConfigError(f"{name} holds a zero byte", field=name)
    return tuple(value)


def checked_variables(name: str, value: object) -> dict[str, str]:
    """Return a mapping of names of variables to their values.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is not an object of name -> value", field=name)
    for key, text in value.items():
        pair = checked_text(name, key) + checked_text(name, text)
        if not key or "=" in key or "\0" in pair:
            raise ConfigError(f"{name}: {key!r} cannot be a variable", field=name)
    return dict(value)


def checked_seconds(name: str, value: object) -> float:
    """Return a finite number above 0.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} is {value!r}, not a number of seconds above 0", field=name)
    return float(value)


def refuse_unknown(name: str, data: object, kind: Any) -> dict[str, Any]:
    """Return the fields of a JSON object, all of which the dataclass `kind` knows.

    Raises:
        ConfigError: it is no object, or has a field that is unknown.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{name} is not an object", field=name)
    unknown = sorted(set(map(str, data)) - {each.name for each in fields(kind)})
    if unknown:
        raise ConfigError(f"{name} has no field {unknown[0]!r}", field=f"{name}.{unknown[0]}")
    return dict(data)
