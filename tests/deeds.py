"""What a store does, each with what it does it to: for tests that break it off, or let it fail, at any step."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tests.stores import (
    FORM,
    add_world,
    facts_of,
    home_at,
    make_memory,
    record_of,
    strays,
    tokens_of,
    torn,
    write_world,
)
from tests.unit.store.test_migration import Old

from worldfork.core.errors import NotFound, WorldforkError
from worldfork.core.ids import new_id
from worldfork.exchange.arrival import import_snapshot
from worldfork.exchange.departure import export_snapshot
from worldfork.exchange.exchange import fetch_layer, pull, push
from worldfork.keeping import squash
from worldfork.keeping.check import check
from worldfork.keeping.keep_rules import KeepRules
from worldfork.keeping.prune import prune
from worldfork.keeping.repair import repair
from worldfork.keeping.sealing import seal, seal_all
from worldfork.keeping.sharing import share_equal
from worldfork.keeping.usage import measure_layers
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store.faultpoints import fault
from worldfork.store.leases import Holder
from worldfork.store.store import Store


class Diary:
    """What a process announced before it died. It lies elsewhere than the store, and is never lost."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def say(self, word: str, subject: str) -> None:
        with self.path.open("a") as lines:
            lines.write(f"{word} {subject}\n")
        fault("diary:said")  # from here on it has to be true

    def said(self, word: str) -> list[str]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line.split(" ")[1] for line in lines if line.startswith(f"{word} ")]

    def forget(self, word: str) -> None:
        lines = self.path.read_text().splitlines()
        self.path.write_text("".join(f"{line}\n" for line in lines if not line.startswith(f"{word} ")))


def durable(store: Store, diary: Diary, token: str, *, below: SnapshotRecord | None = None) -> SnapshotRecord:
    record = add_world(store, token, below=below)
    diary.say("ready", record.snapshot_id)
    store.make_durable(record.snapshot_id)
    diary.say("durable", record.snapshot_id)
    return record


def ready(store: Store, diary: Diary, token: str, *, below: SnapshotRecord | None = None) -> SnapshotRecord:
    record = add_world(store, token, below=below)
    diary.say("ready", record.snapshot_id)
    return record


def forget(store: Store, diary: Diary, snapshot_id: str) -> None:
    diary.say("deleting", snapshot_id)
    with suppress(NotFound):
        store.delete_snapshot(snapshot_id)


def nothing(store: Store, diary: Diary) -> None:
    durable(store, diary, "base")


def checkpoint(store: Store, diary: Diary) -> None:
    """What a checkpoint does to the store: an upper that was written to becomes a layer by a rename."""
    base = store.snapshots()[0]
    run = store.home.run / new_id("sb")
    write_world(run / "upper", "top")
    draft = store.begin_layer(form=FORM)
    (run / "upper").rename(draft.path)
    shutil.rmtree(run)
    facts = facts_of(["top", *tokens_of(base)])
    record = SnapshotRecord(**{**vars(record_of((draft.layer_id, *base.layers), form=FORM)), "facts": facts})
    store.publish(record, [draft.layer_id])
    diary.say("ready", record.snapshot_id)
    fd = os.open(store.home.layers, os.O_RDONLY)
    store.make_durable(record.snapshot_id, [fd])
    diary.say("durable", record.snapshot_id)
    store.set_name("main", record.snapshot_id)
    diary.say("named", record.snapshot_id)


def remember(store: Store, diary: Diary) -> None:
    """Snapshots with memory: one that lasts, one that is deleted, one that is given up before it is published."""
    base = store.snapshots()[0]
    for goes in (False, True):
        record = replace(record_of(base.layers, form=FORM), kind="memory", facts=facts_of(tokens_of(base)))
        make_memory(store.begin_memory(record.snapshot_id), record.snapshot_id, 1 << 16)
        fault("memory:made")
        store.publish(record, ())
        diary.say("ready", record.snapshot_id)
        store.make_durable(record.snapshot_id)
        diary.say("durable", record.snapshot_id)
        if goes:
            forget(store, diary, record.snapshot_id)
            store.collect()
    given_up = new_id("sn")
    make_memory(store.begin_memory(given_up), given_up, 1 << 16)
    store.abandon_memory(given_up)


def many_at_once(store: Store, diary: Diary) -> None:
    """Snapshots of all levels, some brought to disk together, a throw-away one never."""
    base = store.snapshots()[0]
    several = [ready(store, diary, f"several-{number}", below=base) for number in range(2)]
    away = add_world(store, "away", below=base, level="volatile")
    assert store.make_all_durable([record.snapshot_id for record in several]) == {}
    for record in several:
        diary.say("durable", record.snapshot_id)
    forget(store, diary, away.snapshot_id)


def layers_alone(store: Store, diary: Diary) -> None:
    """A layer is brought to disk before any snapshot has it, then one takes it."""
    record = add_world(store, "alone", publish=False)
    store.publish(record, record.layers)
    with store.reading(layers=record.layers, purpose="test"):
        store.make_layers_durable(record.layers)
    store.make_durable(record.snapshot_id)
    diary.say("durable", record.snapshot_id)


def some_to_delete(store: Store, diary: Diary) -> None:
    base = durable(store, diary, "base")
    middle = durable(store, diary, "middle", below=base)
    durable(store, diary, "top", below=middle)
    durable(store, diary, "other")
    store.set_name("kept", middle.snapshot_id)


def delete_and_collect(store: Store, diary: Diary) -> None:
    for record in store.snapshots():
        if tokens_of(record)[0] in ("base", "other"):
            forget(store, diary, record.snapshot_id)
    assert store.collect().failures == []
    late = ready(store, diary, "late")
    forget(store, diary, late.snapshot_id)
    assert store.collect().failures == []


def pruning(store: Store, diary: Diary) -> None:
    for record in store.snapshots():
        if tokens_of(record)[0] not in ("middle", "base"):
            diary.say("deleting", record.snapshot_id)
    report = prune(store, KeepRules(names=("kept",), ancestors=True), measure=True)
    assert report.failures == []


def sealing(store: Store, diary: Diary) -> None:
    newer = ready(store, diary, "newer")
    assert seal_all(store).failures == []
    with store.reading(snapshot_id=newer.snapshot_id, purpose="test") as lease:
        assert lease.claim([*lease.layers, new_id("ly")]) == set(lease.layers)
        for layer_id in lease.layers:
            seal(store, layer_id)


def twins(store: Store, diary: Diary) -> None:
    """Four snapshots on two pairs of equal layers."""
    for number in range(2):
        base = add_world(store, "base")
        for path in sorted((store.layer_path(base.layers[0])).rglob("*")):
            os.utime(path, ns=(0, 0), follow_symlinks=False)
        os.utime(store.layer_path(base.layers[0]), ns=(0, 0))
        store.make_durable(base.snapshot_id)
        diary.say("durable", base.snapshot_id)
        durable(store, diary, f"top-{number}", below=base)
    assert seal_all(store).failures == []


def sharing(store: Store, diary: Diary) -> None:
    assert share_equal(store).failures == []
    assert store.collect().failures == []


def a_mess(store: Store, diary: Diary) -> None:
    """Everything that a sweep finds to do, made by a process that is dead by then."""
    keep, gone = durable(store, diary, "keep"), ready(store, diary, "gone")
    store.hold([Holder(new_id("sb"), snapshot_id=keep.snapshot_id), Holder(new_id("sb"), layers=gone.layers)])
    store.begin_layer(form=FORM).path.mkdir()
    forget(store, diary, gone.snapshot_id)
    (store.home.layers / new_id("ly")).mkdir()
    (store.home.trash / "old" / "er").mkdir(parents=True)


def deep(store: Store, diary: Diary) -> None:
    """A chain that is deep by the measure of `squashing`."""
    record = None
    for number in range(6):
        record = durable(store, diary, f"deep-{number}", below=record)
    measure_layers(store)


def squashing(store: Store, diary: Diary) -> None:
    squash.DEEP, squash._FIRST, squash._FURTHER = 3, 2, 2  # in a process of its own
    report = squash.squash_deep(store)
    assert report.failures == [], report
    assert len(store.snapshots()[-1].layers) < 6


def elsewhere(store: Store, diary: Diary) -> None:
    """Another home with a snapshot of three layers, of which this one has the lowest; it was exported and pushed."""
    place = store.home.root.parent
    with closing(Store.open(home_at(place / "elsewhere"))) as other:
        base = add_world(other, "base")
        top = add_world(other, "top", below=add_world(other, "middle", below=base))
        for record, name in ((base, "base"), (top, "top")):
            with open(place / name, "wb", buffering=0) as sink:
                export_snapshot(other, record.snapshot_id, sink)
        push(other, [base.snapshot_id, top.snapshot_id], str(place / "remote"))
    (place / "name").write_text(top.snapshot_id)
    with open(place / "base", "rb", buffering=0) as source:
        diary.say("durable", import_snapshot(store, source, FORM).snapshot_id)


def importing(store: Store, diary: Diary) -> None:
    with open(store.home.root.parent / "top", "rb", buffering=0) as source:
        diary.say("durable", import_snapshot(store, source, FORM).snapshot_id)


def pulling(store: Store, diary: Diary) -> None:
    place = store.home.root.parent
    [record] = pull(store, [(place / "name").read_text()], str(place / "remote"), FORM)
    diary.say("durable", record.snapshot_id)


def two(store: Store, diary: Diary) -> None:
    durable(store, diary, "top", below=durable(store, diary, "base"))


def leaving(store: Store, diary: Diary) -> None:
    """Export and push, and fetch it back from there."""
    place, record = store.home.root.parent, store.snapshots()[-1]
    with open(place / "out", "wb", buffering=0) as sink:
        export_snapshot(store, record.snapshot_id, sink)
    push(store, [record.snapshot_id], str(place / "remote-out"))
    with closing(Store.open(home_at(Path(tempfile.mkdtemp(dir=place)) / "home"))) as other:
        [arrived] = pull(other, [record.snapshot_id], str(place / "remote-out"), FORM)
        assert torn(other, arrived) == []
        with open(place / "out", "rb", buffering=0) as source:
            assert import_snapshot(other, source, FORM) == arrived


def damaged(store: Store, diary: Diary) -> None:
    """Three layers, each damaged in another way, of which there is a copy elsewhere."""
    top = durable(store, diary, "top", below=durable(store, diary, "middle", below=durable(store, diary, "base")))
    push(store, [top.snapshot_id], str(store.home.root.parent / "remote"))
    first, second, third = (store.layer_path(layer_id) for layer_id in top.layers)
    (first / "file").write_bytes(b"pot")
    shutil.rmtree(second)
    third.with_name("manifest").unlink()


def repairing(store: Store, diary: Diary) -> None:
    remote = str(store.home.root.parent / "remote")
    done = repair(store, check(store), partial(fetch_layer, remote))
    assert done.left == [], done


def of_format_1(store: Store, diary: Diary) -> None:
    store.close()
    shutil.rmtree(store.home.root)
    old = Old(home_at(store.home.root))
    diary.say("durable", old.durable)
    diary.say("ready", old.ready)


def upgrading(store: Store, diary: Diary) -> None:
    assert store.layers_known()


def sweeping(store: Store, diary: Diary) -> None:
    draft = store.begin_layer(form=FORM)
    draft.path.mkdir()
    store.abandon_layer(draft.layer_id)
    assert store.sweep(grace_s=0).failures == []
    assert store.collect().failures == []


@dataclass(frozen=True)
class Work:
    """Something that a store does, and what it does it to."""

    prepare: Callable[[Store, Diary], None]
    do: Callable[[Store, Diary], None]
    least: int
    """Named steps that it has at least: fewer, and the test looks at less than it did."""
    verbs: tuple[str, ...]
    heals: bool = False
    """What it is done to is damaged."""
    known: bool = False
    """It takes the same ways to the disk as another work: fewer crashes are tried."""
    at_once: bool = False
    """After a crash it is done again before anything is swept or collected."""


WORKS = {
    "checkpoint": Work(nothing, checkpoint, 12, ("begin_layer", "publish", "make_durable", "set_name")),
    "memory": Work(nothing, remember, 20, ("publish", "make_durable", "delete_snapshot", "collect")),
    "many at once": Work(nothing, many_at_once, 20, ("publish", "make_durable", "delete_snapshot")),
    "layers alone": Work(nothing, layers_alone, 10, ("reading", "make_layers_durable")),
    "delete and collect": Work(some_to_delete, delete_and_collect, 12, ("delete_snapshot", "collect", "discard")),
    "prune": Work(some_to_delete, pruning, 9, ("prune", "measure", "collect")),
    "seal": Work(nothing, sealing, 12, ("seal", "reading", "claim")),
    "share": Work(twins, sharing, 6, ("rewrite", "share_equal", "collect")),
    "squash": Work(deep, squashing, 20, ("squash", "merge", "make_layers_durable", "rewrite"), at_once=True),
    "import": Work(elsewhere, importing, 20, ("import", "begin_layer", "claim", "publish"), at_once=True),
    "pull": Work(elsewhere, pulling, 20, ("pull", "import", "begin_layer", "publish"), known=True, at_once=True),
    "export and push": Work(two, leaving, 20, ("export", "push", "seal", "set_exported"), known=True),
    "repair": Work(damaged, repairing, 15, ("repair", "rewrite", "make_layers_durable"), heals=True),
    "upgrade": Work(of_format_1, upgrading, 10, ("upgrade",)),
    "sweep": Work(a_mess, sweeping, 8, ("sweep", "discard", "abandon_layer", "trash")),
}


def attempt(
    work: Work,
    home: Path,
    diary: Diary,
    trouble: AbstractContextManager[object],
    expect_told: Callable[[WorldforkError], object],
) -> str:
    """Do a work while there is trouble; return what came of it. Only errors of the house may come out."""
    with closing(Store.open(home_at(home))) as store, trouble:
        try:
            work.do(store, diary)
        except WorldforkError as error:
            expect_told(error)
            return type(error).__name__
        except AssertionError as error:
            # What a report says has failed is told, too.
            if traceback.extract_tb(error.__traceback__)[-1].filename != __file__:
                raise
            return "reported"
    return "done"


def expect_order_after(home: Path, diary: Diary, *, heals: bool) -> None:
    """What was announced is there and whole, all else can be cleared away, and in the end all of it.

    Args:
        heals: the store may be damaged still.
    """
    with closing(Store.open(home_at(home))) as store:
        if not heals:
            assert check(store, read_data=True).findings == []
        assert store.sweep(grace_s=0).failures == []
        assert store.collect().failures == []
        there = {record.snapshot_id: record for record in store.snapshots()}
        for snapshot_id in set(diary.said("ready") + diary.said("durable")) - set(diary.said("deleting")):
            assert snapshot_id in there
        if heals:
            return
        for record in there.values():
            assert torn(store, record) == []
        seal_all(store)
        assert check(store, read_data=True).findings == []
        assert strays(store) == []
        for snapshot_id in there:
            store.delete_snapshot(snapshot_id)
        assert store.collect().failures == []
        assert os.listdir(store.home.layers) == []
