"""Try every attack before every verifier, and write the matrix into docs/reward.md.

    python -m tests.redteam.matrix [--check] [--keep=FILE] [NAME_OR_NUMBER...]

Without a name or the number of a kind: all of them. `--check` leaves the page as it is. `--keep` adds what comes of
each attack to a file, and without a name takes from there what it holds already: a run can be gone on with, and a part
of it done again. Ends with 1 if a claim was wrong.
"""

from __future__ import annotations

import asyncio
import json
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


async def try_all(attacks: Sequence[Attack], keep: Path | None = None) -> Made:
    """Try the attacks before every verifier, with the correct solution beside each kind of them."""

    def tell(attack: Attack, tried: list[Tried]) -> None:
        print(f"{attack.number} {attack.name} {arena.seconds[attack.name]:.1f} s", flush=True)
        for each in tried:
            if each.broken or (not each.held and each.verifier != PLAIN):
                print("  CLAIM BROKEN" if each.broken else "  wins", each, flush=True)
        if keep is not None:
            beside = next((each for each in campaign.honest if each.beside is attack), None)
            add_kept(keep, attack, tried, beside, arena.seconds[attack.name])

    with tempfile.TemporaryDirectory() as directory:
        by_name = judges(Path(directory)) | {PLAIN: Judge(Plain())}
        arena = Arena(await StartingStates.open(), by_name)
        campaign = Campaign(arena, lambda attack: by_name, lambda attack: VERIFIERS, tell)
        await campaign.run(attacks)
    rows = {name: {each.verifier: each for each in tried} for name, tried in campaign.tried.items()}
    return Made(rows, campaign.honest, campaign.broken, arena.seconds)


def add_kept(keep: Path, attack: Attack, tried: Sequence[Tried], honest: Honest | None, took_s: float) -> None:
    """Add to a file what came of one attack."""
    rows = {each.verifier: (each.reward, each.alone, each.note) for each in tried}
    beside = None if honest is None else [dict(honest.rewards), dict(honest.notes)]
    line = {"name": attack.name, "tried": rows, "honest": beside, "took_s": took_s}
    with keep.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_kept(keep: Path) -> Made:
    """Read such a file; the last line of an attack counts."""
    known = {attack.name: attack for attack in ATTACKS}
    text = keep.read_text(encoding="utf-8") if keep.exists() else ""
    lines = {line["name"]: line for line in map(json.loads, text.splitlines()) if line["name"] in known}
    rows = {
        name: {verifier: Tried(known[name], verifier, *told) for verifier, told in line["tried"].items()}
        for name, line in lines.items()
    }
    honest = [Honest(known[name], *line["honest"]) for name, line in lines.items() if line["honest"]]
    broken = [str(each) for row in rows.values() for each in row.values() if each.broken]
    broken += [str(each) for each in honest if each.suffers]
    return Made(rows, honest, broken, {name: line["took_s"] for name, line in lines.items()})


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
    keep = next((Path(each.partition("=")[2]) for each in arguments if each.startswith("--keep=")), None)
    chosen = [attack for attack in ATTACKS if not names or attack.name in names or str(attack.number) in names]
    began_s = time.monotonic()
    done = read_kept(keep).rows if keep is not None and not names else {}
    made = asyncio.run(try_all([attack for attack in chosen if attack.name not in done], keep))
    if keep is not None:
        made = read_kept(keep)
    if "--check" not in arguments and made.rows.keys() == {attack.name for attack in ATTACKS}:
        write(made)
    for line in made.broken:
        print("BROKEN", line)
    longest = sorted(made.seconds.items(), key=lambda item: -item[1])[:10]
    print("longest:", ", ".join(f"{name} {seconds:.0f} s" for name, seconds in longest))
    gradings = sum(map(len, made.rows.values())) + sum(len(each.rewards) for each in made.honest)
    took_s = time.monotonic() - began_s
    print(f"{len(made.rows)} attacks, {gradings} gradings in {took_s:.0f} s, {len(made.broken)} claims broken")
    return 1 if made.broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
