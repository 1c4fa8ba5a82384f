"""Try every attack before every verifier, and write the matrix into docs/reward.md.

    python -m tests.redteam.matrix [--check] [NAME...]

`--check` writes nothing. Ends with 1 if a claim was wrong.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.redteam.corpus import ATTACKS
from tests.redteam.judges import Judge, Plain, judges
from tests.redteam.kinds import GROUPS, KINDS, NOT_APPLICABLE
from tests.redteam.records import PLAIN, VERIFIERS, Attack, Verdict
from tests.redteam.running import Arena, Tried
from tests.redteam.tasks import TASKS

from worldfork.rollout.starts import StartingStates

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reward.md"
BEGIN = "<!-- matrix: made by `python -m tests.redteam.matrix` -->"
END = "<!-- end of the matrix -->"

Rows = Mapping[str, Mapping[str, Tried]]
"""Name of an attack -> verifier -> what came of it."""


async def try_all(attacks: Sequence[Attack]) -> Rows:
    """Run the attacks one after the other."""
    rows: dict[str, dict[str, Tried]] = {}
    with tempfile.TemporaryDirectory() as directory:
        by_name = judges(Path(directory)) | {PLAIN: Judge(Plain())}
        arena = Arena(await StartingStates.open(), by_name)
        for task in TASKS:
            right = await arena.right(task)
            if set(right.values()) != {1.0}:
                raise SystemExit(f"the correct solution of {task} is worth {right}")
        for attack in attacks:
            print(attack.number, attack.name, flush=True)
            tried = await arena.attack(attack)
            rows[attack.name] = {each.verifier: each for each in tried}
            for each in tried:
                if not each.held or each.broken:
                    print("CLAIM BROKEN" if each.broken else "wins", each, flush=True)
    return rows


def cell(attack: Attack, verifier: str, tried: Tried | None) -> str:
    """Return one cell."""
    claim = attack.claim(verifier)
    if verifier == PLAIN and tried is not None:
        return "wins" if tried.reward == 1.0 else ""
    if claim.verdict is Verdict.NOT or tried is None:
        return ""
    if claim.verdict is Verdict.RESISTS:
        return "**broken**" if tried.broken else "holds"
    return "open, held" if tried.held else f"**wins** {tried.reward:.2f}" if tried.reward is not None else "**voids**"


def page_part(rows: Rows) -> str:
    """Return the part of the page that a run makes."""
    shown = [name for name in (*VERIFIERS, PLAIN) if any(name in row for row in rows.values())]
    lines = [BEGIN, "", *_sums(rows, shown), ""]
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


def _sums(rows: Rows, shown: Iterable[str]) -> Iterable[str]:
    yield "| | " + " | ".join(shown) + " |"
    yield "| --- |" + " ---: |" * len(list(shown))
    tried = {name: [row[name] for row in rows.values() if name in row] for name in shown}
    claimed = {
        name: [each for each in of if each.attack.claim(name).verdict is Verdict.RESISTS] for name, of in tried.items()
    }
    for title, count in (
        ("attacks tried", {name: len(of) for name, of in tried.items()}),
        ("resisted by its own claim", {name: len(of) for name, of in claimed.items()}),
        ("of these broken", {name: sum(each.broken for each in of) for name, of in claimed.items()}),
        ("attacks that win", {name: sum(not each.held for each in of) for name, of in tried.items()}),
    ):
        yield f"| {title} | " + " | ".join(str(count[name]) for name in shown) + " |"


def write(rows: Rows) -> None:
    """Put the matrix in the place of the page's last one."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + page_part(rows) + after, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments name, and write the page after a run of everything."""
    names = [each for each in arguments if not each.startswith("-")]
    chosen = [attack for attack in ATTACKS if not names or attack.name in names]
    rows = asyncio.run(try_all(chosen))
    if "--check" not in arguments and not names:
        write(rows)
    broken = [each for row in rows.values() for each in row.values() if each.broken]
    print(f"{len(chosen)} attacks, {sum(map(len, rows.values()))} gradings, {len(broken)} claims broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
