"""What the checks found, as rows of a table and as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from worldfork.testing.checks import Finding, Outcome

COLUMNS = ("", "result", "check", "seen elsewhere", "detail")


def row(finding: Finding) -> tuple[str, ...]:
    """Return a finding as the cells of `COLUMNS`."""
    return (str(finding.number), finding.outcome.value, finding.title, finding.source, finding.detail)


def summary(findings: Sequence[Finding]) -> str:
    """Return one sentence on all of them."""
    count = {one: sum(each.outcome is one for each in findings) for one in Outcome}
    parts = [f"{count[Outcome.PASS]} passed", f"{count[Outcome.FAIL]} failed"]
    parts.append(f"{count[Outcome.NOT_APPLICABLE]} do not apply")
    checks = "1 check" if len(findings) == 1 else f"{len(findings)} checks"
    return f"{checks} in {sum(each.took_s for each in findings):.0f} s: {', '.join(parts)}"


def shape(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return findings as data. Programs read them: keys are added, never renamed or dropped."""
    return [{**asdict(each), "outcome": each.outcome.value} for each in findings]


def failed(findings: Iterable[Finding]) -> bool:
    """Whether any check failed."""
    return any(each.outcome is Outcome.FAIL for each in findings)
