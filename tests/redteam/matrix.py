"""Try every attack before every verifier, and write the matrix into docs/reward.md.

    python -m tests.redteam.matrix [--check] [NAME_OR_NUMBER...]

Without a name or the number of a kind: all of them. `--check` writes nothing. Ends with 1 if a claim was wrong.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.redteam.corpus import ATTACKS
from tests.redteam.judges import Judge, Plain, judges
from tests.redteam.kinds import GROUPS, KINDS, NOT_APPLICABLE
from tests.redteam.records import PLAIN, VERIFIERS, Attack, Verdict
from tests.redteam.running import Arena, Campaign, Honest, Tried

from worldfork.rollout.starts import StartingStates

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reward.md"
BEGIN = "<!-- matrix: made by `python -m tests.redteam.matrix` -->"
END = "<!-- end of the matrix -->"

Rows = Mapping[str, Mapping[str, Tried]]
"""Name of an attack -> verifier -> what came of it."""


@dataclass(frozen=True)
class Made:
    """What a run found."""

    rows: Rows
    honest: Sequence[Honest]
    broken: Sequence[str]
    seconds: Mapping[str, float]


async def try_all(attacks: Sequence[Attack]) -> Made:
    """Try the attacks before every verifier, with the correct solution beside each kind of them."""

    def tell(attack: Attack, tried: list[Tried]) -> None:
        print(f"{attack.number} {attack.name} {arena.seconds[attack.name]:.1f} s", flush=True)
        for each in tried:
            if each.broken or (not each.held and each.verifier != PLAIN):
                print("  CLAIM BROKEN" if each.broken else "  wins", each, flush=True)

    with tempfile.TemporaryDirectory() as directory:
        by_name = judges(Path(directory)) | {PLAIN: Judge(Plain())}
        arena = Arena(await StartingStates.open(), by_name)
        campaign = Campaign(arena, lambda attack: by_name, lambda attack: VERIFIERS, tell)
        await campaign.run(attacks)
    rows = {name: {each.verifier: each for each in tried} for name, tried in campaign.tried.items()}
    return Made(rows, campaign.honest, campaign.broken, arena.seconds)


def cell(attack: Attack, verifier: str, tried: Tried | None) -> str:
    """Return one cell."""
    claim = attack.claim(verifier)
    if verifier == PLAIN and tried is not None:
        return "wins" if tried.reward == 1.0 else ""
    if claim.verdict is Verdict.NOT or tried is None:
        return ""
    if tried.reward is None:
        return "**voids**"
    if claim.verdict is Verdict.RESISTS:
        return "**broken**" if tried.overpaid else "holds"
    return "open, held" if tried.held else f"**wins** {tried.reward:.2f}"


def page_part(made: Made) -> str:
    """Return the part of the page that a run makes."""
    rows = made.rows
    shown = [name for name in (*VERIFIERS, PLAIN) if any(name in row for row in rows.values())]
    lines = [BEGIN, "", _size(), "", *_sums(made, shown), ""]
    for group, (first, last) in GROUPS.items():
        lines += [f"### {group}", "", f"| | attack | {' | '.join(shown)} |", f"| --- | --- |{' --- |' * len(shown)}"]
        for number in range(first, last + 1):
            if number in NOT_APPLICABLE:
                lines.append(f"| {number} | {KINDS[number]}: does not apply, see below |{' |' * len(shown)}")
            lines += [
                f"| {number} | {_label(attack)} | "
                + " | ".join(cell(attack, name, rows.get(attack.name, {}).get(name)) for name in shown)
                + " |"
                for attack in ATTACKS
                if attack.number == number
            ]
        lines.append("")
    lines += [f"Kind {number}, {KINDS[number]}: {why}\n" for number, why in NOT_APPLICABLE.items()]
    return "\n".join([*lines, END])


def _label(attack: Attack) -> str:
    mark = " †" if attack.own else ""
    return f"`{attack.name}`{mark} {attack.does}"


def _size() -> str:
    own = sum(attack.own for attack in ATTACKS)
    return f"{len(ATTACKS)} attacks of {len({attack.number for attack in ATTACKS})} kinds, {own} of them our own."


def _sums(made: Made, shown: Sequence[str]) -> Iterable[str]:
    """What each verifier swears, how often that was put to the test, and how often it was not so."""
    yield "| | " + " | ".join(shown) + " |"
    yield "| --- |" + " ---: |" * len(shown)
    tried = {name: [row[name] for row in made.rows.values() if name in row] for name in shown}

    def count(wanted: Callable[[Tried], bool]) -> Mapping[str, object]:
        return {name: sum(map(wanted, of)) for name, of in tried.items()}

    beside = {name: [each.rewards[name] for each in made.honest if name in each.rewards] for name in shown}
    for title, counts in (
        ("attacks tried", count(lambda each: True)),
        ("sworn: never more than the same wrong code", count(_is_sworn)),
        ("of these broken", count(lambda each: each.overpaid)),
        ("sworn: never without a score", count(lambda each: each.attack.never_none(each.verifier))),
        ("of these broken", count(lambda each: each.void)),
        ("attacks that win", count(lambda each: not each.held)),
        (
            "kinds beside which the correct solution was worth 1.0",
            {name: f"{of.count(1.0)} of {len(of)}" if of else "" for name, of in beside.items()},
        ),
    ):
        yield f"| {title} | " + " | ".join(str(counts[name]) for name in shown) + " |"


def _is_sworn(each: Tried) -> bool:
    return each.attack.claim(each.verifier).verdict is Verdict.RESISTS


def write(made: Made) -> None:
    """Put the matrix in the place of the page's last one."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + page_part(made) + after, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments name, and write the page after a run of everything."""
    names = [each for each in arguments if not each.startswith("-")]
    chosen = [attack for attack in ATTACKS if not names or attack.name in names or str(attack.number) in names]
    began_s = time.monotonic()
    made = asyncio.run(try_all(chosen))
    if "--check" not in arguments and not names:
        write(made)
    for line in made.broken:
        print("BROKEN", line)
    longest = sorted(made.seconds.items(), key=lambda item: -item[1])[:10]
    print("longest:", ", ".join(f"{name} {seconds:.0f} s" for name, seconds in longest))
    gradings = sum(map(len, made.rows.values())) + sum(len(each.rewards) for each in made.honest)
    took_s = time.monotonic() - began_s
    print(f"{len(chosen)} attacks, {gradings} gradings in {took_s:.0f} s, {len(made.broken)} claims broken")
    return 1 if made.broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
