"""Words of others made safe for a page, and numbers made short for people."""

from __future__ import annotations

import html
import re

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def escaped(text: object) -> str:
    """Return text for any place of a page, an attribute too; characters that do not show are spelled out."""
    plain = str(text).replace("\r\n", "\n")
    return html.escape(_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", plain), quote=True)


def seconds(duration_s: float | None) -> str:
    """Return a duration in the unit that suits it."""
    if duration_s is None:
        return "-"
    if duration_s < 0.9995:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 100:
        return f"{duration_s:.1f} s"
    if duration_s < 6000:
        return f"{duration_s / 60:.1f} min"
    return f"{duration_s / 3600:.1f} h"


def number(value: float | None, digits: int = 3) -> str:
    """Return a reward or a share; a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"
