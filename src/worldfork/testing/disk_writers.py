"""Hazards of the disk while somebody writes: killed writers, snapshots and ends under load, calls that fail."""

from __future__ import annotations

import asyncio

from worldfork.testing.checks import Wrong, check, expect
from worldfork.testing.trial import Trial

FILES_N = 40
"""Files of the round of writes; at any instant each holds the same count as the next or one more."""
SNAPSHOTS_N = 7
"""Snapshots under writes; before the last one the writer is killed."""

_ROUNDS = f"""
i=0
while :; do
  i=$((i+1)); n=0
  while [ $n -lt {FILES_N} ]; do echo $i > r/.new; mv r/.new r/$n; n=$((n+1)); done
  touch going
done
"""
_RECORDS = """
i=0
while :; do
  i=$((i+1)); seq $i $((i+20000)) > w/.new; sync w/.new; mv w/.new w/$i
  sha256sum < w/$i > w/sum.new; sync w/sum.new; mv w/sum.new w/$i.sum
  touch going
done
"""
_VERIFY = """
for f in w/*.sum; do
  [ "$(sha256sum < ${f%.sum})" = "$(cat $f)" ] || echo ${f%.sum}
done
"""


@check(
    4, "a snapshot under writes, or after its writer was killed, is one instant", "forkd#296, smolvm#1097, #1196",
    needs=("processes",), limit_s=90,
)  # fmt: skip
async def _one_instant(trial: Trial) -> None:
    box = await trial.create()
    # Ballast makes a copy that freezes nothing take long enough to be seen.
    await box.sh("mkdir r b; n=0; while [ $n -lt 300 ]; do seq 1 2000 > b/$n; n=$((n+1)); done")
    await box.background(f"exec sh -c 'echo $$ > pid; {_ROUNDS}'", "going")
    for turn in range(SNAPSHOTS_N):
        if turn == SNAPSHOTS_N - 1:
            await box.sh("kill -9 $(cat pid); sleep 0.1")
        child = await trial.child_of(box)
        text = await child.sh(f"n=0; while [ $n -lt {FILES_N} ]; do cat r/$n; n=$((n+1)); done")
        counts = [int(word) for word in text.split()]
        # In a fork with memory the writer goes on, so what is read there is no single instant.
        if not trial.memory or turn == SNAPSHOTS_N - 1:
            torn = len(counts) != FILES_N or counts != sorted(counts, reverse=True) or counts[0] - counts[-1] > 1
            expect(not torn, f"snapshot {turn + 1} mixes instants: files written in turn hold {counts}")
        await trial.end(child)


@check(10, "a snapshot under heavy writes keeps what was synced, even if the source ends at once",
       "boxlite PR1240", needs=("processes",), limit_s=90)  # fmt: skip
async def _ended_under_writes(trial: Trial) -> None:
    for turn in range(2):
        box = await trial.create()
        await box.sh("mkdir w")
        await box.background(_RECORDS, "going", wait_s=20)
        await asyncio.sleep(0.3)
        kept = set((await box.sh("ls w | grep 'sum$'")).split())
        snapshot = await trial.snapshot(box)
        await trial.end(box)
        child = await trial.one(snapshot)
        missing = kept - set((await child.sh("ls w")).split())
        expect(
            not missing, f"round {turn + 1}: {len(missing)} of {len(kept)} synced files are gone: {sorted(missing)[:3]}"
        )
        damaged = (await child.sh(_VERIFY)).split()
        expect(not damaged, f"round {turn + 1}: files differ from what was synced: {damaged[:3]}")
        await trial.end(child)


@check(
    6, "the source answers after snapshots and forks that failed, and can be forked again", "mitos PR763, smolvm PR888"
)
async def _after_failures(trial: Trial) -> None:
    box = await trial.create()
    await box.sh("seq 1 200000 > some")
    for delay_s in (0.0, 0.001, 0.003, 0.01, 0.03, 0.1):
        attempt = asyncio.ensure_future(trial.snapshot(box))
        await asyncio.wait({attempt}, timeout=delay_s)
        attempt.cancel()
        await asyncio.wait({attempt})
        if not attempt.cancelled():
            attempt.result()
        await _answers(box.sh("echo $((1 + 1))"), f"a snapshot that was called off after {delay_s} s")
    try:
        extra = await trial.fork("no-such-snapshot")
    except Exception:
        extra = []
    expect(not extra, f"a fork of a snapshot that does not exist gave {[each.called for each in extra]}")
    await _answers(box.sh("echo $((1 + 1))"), "a fork that failed")
    for turn in range(3):
        await box.write("turn", str(turn))
        child = await trial.child_of(box)
        found = await child.read("turn")
        expect(found == str(turn), f"fork {turn + 1} of the same source holds {found!r} instead of {turn}")
        await _answers(box.sh("echo $((1 + 1))"), f"fork {turn + 1}")


async def _answers(call: object, after: str) -> None:
    try:
        async with asyncio.timeout(10):
            found = await call  # type: ignore[misc]
    except TimeoutError:
        raise Wrong(f"the source does not answer after {after}") from None
    except Wrong as error:
        raise Wrong(f"after {after}: {error}") from None
    expect(found == "2", f"after {after} the source answers {found!r}")
