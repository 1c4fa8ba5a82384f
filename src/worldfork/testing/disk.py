"""Hazards of the disk: what a snapshot holds of it, and who else may write there."""

from __future__ import annotations

import statistics
import time

from worldfork.testing.checks import check, expect
from worldfork.testing.elsewhere import FILE
from worldfork.testing.trial import Box, Trial, gather


@check(1, "files are there after every one of ten resumes", "e2b-dev/E2B#884")
async def _files_after_resumes(trial: Trial) -> None:
    box = await trial.create()
    for turn in range(1, 11):
        await box.write(f"turn-{turn}", f"written in turn {turn}")
        snapshot = await trial.snapshot(box)
        await trial.end(box)
        box = await trial.one(snapshot)
        for earlier in range(1, turn + 1):
            found = await box.read(f"turn-{earlier}")
            expect(
                found == f"written in turn {earlier}", f"after resume {turn} the file of turn {earlier} is {found!r}"
            )


@check(2, "one snapshot can be resumed again and again, by another process too", "e2b-dev/E2B#736, #582")
async def _resumed_again(trial: Trial) -> None:
    box = await trial.create()
    await box.write(FILE, "as it was")
    snapshot = await trial.snapshot(box)
    await trial.end(box)
    for turn in range(1, 6):
        box = await trial.one(snapshot)
        found = await box.read(FILE)
        expect(found == "as it was", f"at resume {turn} the file holds {found!r}")
        await box.write(FILE, f"changed in resume {turn}")
        await trial.end(box)
    if trial.named and trial.adapter.abilities.detached:
        found = await trial.elsewhere("read", snapshot)
        expect(found == "as it was", f"in another process the file holds {found!r}")


@check(3, "eight siblings do not see each other's writes, nor does the snapshot", "forkd#317, #320")
async def _siblings_apart(trial: Trial) -> None:
    box = await trial.create()
    await box.write("same", "the source's")
    await box.write("base", "x" * 200_000)
    snapshot = await trial.snapshot(box)
    before = await (await trial.one(snapshot)).sh("cat * | sha256sum")
    children = await trial.fork(snapshot, 8)
    line = (
        "echo {0} > same; echo {0} > own-{0}; printf {0} | dd of=base conv=notrunc 2>/dev/null; sync same base own-{0}"
    )
    await gather(*(child.sh(line.format(index)) for index, child in enumerate(children)))
    for index, child in enumerate(children):
        found = await child.sh("cat same; ls -d own-*; head -c 1 base")
        expected = f"{index}\nown-{index}\n{index}"
        expect(found == expected, f"fork {index} should see {expected!r}, and sees {found!r}")
    expect(await box.read("same") == "the source's", "the source sees what a fork wrote")
    after = await (await trial.one(snapshot)).sh("cat * | sha256sum")
    expect(after == before, "the snapshot's bytes changed after its forks wrote")


@check(5, "a fork has what the source wrote after its own start, at every depth", "mitos#596, PR611")
async def _late_writes(trial: Trial) -> None:
    box = await trial.create()
    for depth in range(3):
        await box.write(f"depth-{depth}", f"at depth {depth}")
        await box.sh("mkdir -p d/e; mv d/e d/f; echo again >> log")
        box = await trial.child_of(box)
        # The page cache and the disk may be two truths; where it may be emptied, the disk has to answer.
        await box.sh("sync; echo 3 > /proc/sys/vm/drop_caches 2>/dev/null || true")
        for earlier in range(depth + 1):
            found = await box.read(f"depth-{earlier}")
            expect(found == f"at depth {earlier}", f"at depth {depth + 1} the file of depth {earlier} is {found!r}")
        count = await box.sh("wc -l < log; ls d")
        expect(
            count.split() == [str(depth + 1), "f"], f"at depth {depth + 1} a log of {depth + 1} lines reads {count!r}"
        )
        await box.sh("rm -r d")


@check(8, "forks outlive their source, and its later writes do not reach them", "hypeman PR298")
async def _source_deleted(trial: Trial) -> None:
    box = await trial.create()
    total = await box.sh("seq 1 1500000 > cold; sha256sum < cold")
    snapshot = await trial.snapshot(box)
    children = await trial.fork(snapshot, 3)
    await box.sh("printf overwritten | dd of=cold conv=notrunc 2>/dev/null; sync cold")
    first = await children[0].sh("sha256sum < cold")
    expect(first == total, "a fork reads what the source wrote after the snapshot")
    await trial.end(box)
    # It may be refused while forks live; what must not be is that it works and harms them.
    gone = await trial.delete(snapshot)
    for child in children[1:]:
        found = await child.sh("sha256sum < cold")
        expect(found == total, f"a file read after the source ended differs{' (snapshot deleted too)' if gone else ''}")


@check(9, "a snapshot outlives its sandbox, for a process that begins later", "boxlite PR330", needs=("detached",))
async def _for_a_later_process(trial: Trial) -> None:
    box = await trial.create()
    await box.write(FILE, "kept")
    snapshot = await trial.adapter.snapshot(box.called, memory=False)
    trial.keep(snapshot)
    await trial.end(box)
    for turn in (1, 2):
        found = await trial.elsewhere("read", snapshot)
        expect(found == "kept", f"process {turn} after it reads {found!r}")


@check(14, "a snapshot is found by a process that did not take it", "agentscope-java#1806", needs=("detached",))
async def _found_by_its_name(trial: Trial) -> None:
    for text in ("of the first", "of the second"):
        snapshot = trial.keep(await trial.elsewhere("make", text))
        found = await (await trial.one(snapshot)).read(FILE)
        expect(found == text, f"what another process stored as {text!r} is {found!r}")


@check(12, "a name used again has nothing of its former owner", "smolvm#40, #201, #949")
async def _name_again(trial: Trial) -> None:
    for turn in range(3):
        box = await trial.create("fork-check-again")
        found = await box.sh("ls -A")
        expect(not found, f"sandbox {turn + 1} of the same name begins with {found!r}")
        await box.write(f"left-{turn}", "x" * 1000)
        await trial.end(box)
    if trial.adapter.abilities.limits:
        for size_mb, fits in ((16, False), (64, True), (16, False)):
            box = await trial.create("fork-check-again", disk_mb=size_mb)
            held = await _fits(box, 32)
            expect(held == fits, f"32 MiB {'fit' if held else 'do not fit'} into a disk of {size_mb} MiB")
            await trial.end(box)


async def _fits(box: Box, size_mb: int) -> bool:
    # Who writes too much may be refused, killed, or lose its whole sandbox.
    try:
        line = f"dd if=/dev/urandom of={FILE} bs=1M count={size_mb} 2>/dev/null && sync {FILE} && sleep 1.5"
        await box.sh(f"{line} && test $(wc -c < {FILE}) = {size_mb << 20}")
    except Exception:
        return False
    return True


@check(15, "what is sent in arrives whole, whatever its size", "OpenSandbox#1016", limit_s=90)
async def _whole_uploads(trial: Trial) -> None:
    box = await trial.create()
    sizes = (0, 1, 18 << 10, (64 << 10) - 1, 64 << 10, 128 << 10, (128 << 10) + 1, 1 << 20, 24 << 20)
    for size_bytes in sizes:
        content = (b"%015d\n" * (size_bytes // 16 + 1) % tuple(range(size_bytes // 16 + 1)))[:size_bytes]
        ran = await box.run(["sh", "-c", "cat > /var/tmp/sent && wc -c < /var/tmp/sent && cat /var/tmp/sent"], content)
        head, _, back = ran.stdout.partition(b"\n")
        expect(ran.exit_code == 0, f"sending {size_bytes} bytes ended with {ran.exit_code}")
        expect(int(head or 0) == size_bytes, f"of {size_bytes} bytes {head.decode()} arrived")
        expect(back == content, f"{size_bytes} bytes came back as {len(back)}, or with other content")


@check(
    16, "a fork of the golden snapshot shows nothing of those who used it", "agent-sandbox PR1522, agent-substrate#1449"
)
async def _golden_stays(trial: Trial) -> None:
    box = await trial.create()
    await box.write("golden", "golden")
    look = "ls -A . /tmp /root 2>/dev/null | sort; env | grep FORK_CHECK || true; cat golden"
    golden = await trial.snapshot(box)
    before = await (await trial.one(golden)).sh(look)
    for worker in [box, *await trial.fork(golden, 2)]:
        use = "echo task > task; echo used > golden; echo secret > /tmp/fork-check-task; echo ls >> ~/.bash_history"
        await worker.sh(f"{use} 2>/dev/null || true", env={"FORK_CHECK": "task"})
        await trial.snapshot(worker)
    after = await (await trial.one(golden)).sh(look)
    expect(after == before, f"a fork of the golden snapshot shows {after!r} after it was used, {before!r} before")
    fresh = await (await trial.create()).sh("ls -A . /tmp/fork-check-task 2>/dev/null || true")
    expect("task" not in fresh, f"a fresh sandbox shows {fresh!r}")


@check(17, "a fork of a fork of a fork takes no longer than the first", "fcvm#662", limit_s=120)
async def _deep_forks(trial: Trial) -> None:
    box = await trial.create()
    took_s = []
    for depth in range(10):
        await box.write(f"depth-{depth}", str(depth))
        start_s = time.monotonic()
        child = await trial.child_of(box)
        seen = await child.sh("ls -d depth-* | wc -l")
        took_s.append(time.monotonic() - start_s)
        expect(seen == str(depth + 1), f"at depth {depth + 1} there are {seen} of {depth + 1} files")
        await trial.end(box)
        box = child
    first, last = statistics.median(took_s[:3]), statistics.median(took_s[-3:])
    # A busy machine may double anything; paging over paging multiplied it by hundreds.
    expect(last < 4 * first + 0.5, f"the first forks took {first:.2f} s, those at depth 8 to 10 {last:.2f} s")


@check(18, "the last writes are in a snapshot without any sync", "microsandbox changelog")
async def _unsynced_writes(trial: Trial) -> None:
    for turn in range(3):
        box = await trial.create()
        line = "i=0; while [ $i -lt 200 ]; do i=$((i+1)); echo $i > f$i; echo $i >> log; done"
        total = await box.sh(f"seq 1 {10**6 + turn} > big; {line}; cat big log f* | sha256sum")
        child = await trial.child_of(box)
        found = await child.sh("cat big log f* | sha256sum")
        expect(found == total, f"round {turn + 1}: a fork taken at once lacks some of the last writes")
        await gather(trial.end(box), trial.end(child))
