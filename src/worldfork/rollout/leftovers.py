"""States at the end of rollouts: whose they are, which of them stay, and what dead processes left of them.

A state's label says which process took it, and which book will name it if it is to stay: the journal of a run, or the
ledger of an open rollout. From its first moment on a state is so in somebody's book: that process lets go of it or
gives it the label of one that stays, and if it dies before that, another process does so by the book.
"""

from __future__ import annotations

import contextlib
import logging
import os
import urllib.parse
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from worldfork.core.errors import NotFound, WorldforkError
from worldfork.core.ids import is_id
from worldfork.lineage.place import Place, place
from worldfork.lineage.snapshots import wait_durable
from worldfork.records.snapshot import SnapshotRecord
from worldfork.rollout.journal import read_journal, run_of
from worldfork.rollout.ledger import Ledger
from worldfork.store.faultpoints import fault

_LABEL = "end of a rollout of "
_FOR = " for "
_OF = " of "
_UNKNOWN = "unknown"
"""A run that no journal is of: what is labelled so stays undecided."""
_log = logging.getLogger("worldfork")
_swept: weakref.WeakSet[Place] = weakref.WeakSet()


def end_label(book: Path | None = None) -> str:
    """Return the label of a state that this process has to decide about.

    Args:
        book: what names the state if it is to stay: a journal, or the directory of an open rollout's ledger. Without
            one the state goes with this process.
    """
    label = f"{_LABEL}{place().store.owner_id}"
    if book is None:
        return label
    run_id = _run_of(book)
    return f"{label}{_FOR}{_quoted(book)}" + (f"{_OF}{run_id}" if run_id else "")


def _run_of(book: Path) -> str:
    """Return whose book lies there: directories are moved and made anew. A ledger's name says so already."""
    if is_id("sb", book.name):
        return ""
    with contextlib.suppress(WorldforkError):
        return run_of(book) or _UNKNOWN
    return _UNKNOWN


def _quoted(book: Path) -> str:
    return urllib.parse.quote_from_bytes(os.fsencode(book.absolute()))


def _parts(label: str | None) -> tuple[str, str, str]:
    """Return who took a state, which book decides about it, quoted, and of which run; each empty where not said."""
    if not label or not label.startswith(_LABEL):
        return "", "", ""
    owner_id, _, book = label.removeprefix(_LABEL).partition(_FOR)
    book, _, run_id = book.partition(_OF)
    return owner_id, book, run_id


def kept_label(sandbox_id: str | None) -> str:
    """Return the label of a state that stays until somebody deletes it."""
    return f"end of {sandbox_id}"


async def settle(states: Mapping[str, str | None]) -> None:
    """Let states stay, by snapshot id with their sandboxes' ids; what cannot be written now is settled by the book."""
    if states:
        fault("rollout:settle")
        here = place()
        with contextlib.suppress(WorldforkError):
            labels = {snapshot_id: kept_label(sandbox_id) for snapshot_id, sandbox_id in states.items()}
            await here.work(lambda: here.store.set_labels(labels))


async def take_over(snapshot_ids: Iterable[str], book: Path | None) -> None:
    """Let this process decide about states that a former one kept.

    Raises:
        StoreError: that could not be written down.
    """
    labels = dict.fromkeys(snapshot_ids, end_label(book))
    if labels:
        here = place()
        await here.work(lambda: here.store.set_labels(labels))


async def let_go(snapshot_ids: Sequence[str]) -> None:
    """Delete states that nothing names. One that cannot go now, since somebody stands on it, goes with this process."""
    if not snapshot_ids:
        return
    fault("rollout:let_go")
    here = place()
    for snapshot_id in snapshot_ids:
        with contextlib.suppress(WorldforkError):
            await here.work(lambda gone=snapshot_id: here.store.delete_snapshot(gone))  # type: ignore[misc]
    here.collect_soon()


async def wait_lasting(snapshot_id: str) -> None:
    """Return when a state survives a crash of the machine, so that it may be named.

    Raises:
        StoreError, OutOfSpace, NotFound: it does not.
    """
    here = place()
    under_way = here.durability(snapshot_id)
    if under_way is not None:
        await wait_durable(under_way)
    elif (await here.work(lambda: here.store.snapshot(snapshot_id))).state != "durable":
        await here.work(lambda: here.store.make_durable(snapshot_id))
    fault("rollout:lasting")


def ends_of(book: Path) -> list[SnapshotRecord]:
    """Return the states that a book has to decide about, whichever process took them. Blocking."""
    return [record for record in place().store.snapshots() if _parts(record.label)[1] == _quoted(book)]


async def sweep_once(here: Place) -> None:
    """Do as `sweep_ends`, the first time that this process asks for a place."""
    if here not in _swept:
        _swept.add(here)
        await here.work(lambda: sweep_ends(here))


def sweep_ends(here: Place) -> list[str]:
    """Decide about the states of processes that died before they did so; return the ids of those that went."""
    gone, staying, was = list[str](), dict[str, str](), dict[str, str]()
    books: dict[tuple[str, str], set[str] | None] = {}
    for record in here.store.snapshots():
        label = record.label or ""
        owner_id, book, run_id = _parts(label)
        if not owner_id:
            continue
        with contextlib.suppress(WorldforkError):
            if here.store.is_alive(owner_id):
                continue
            if book and (book, run_id) not in books:
                books[book, run_id] = _named_in(Path(os.fsdecode(urllib.parse.unquote_to_bytes(book))), run_id)
            named = books[book, run_id] if book else set()
            if named is None:
                continue
            if record.snapshot_id in named:
                staying[record.snapshot_id], was[record.snapshot_id] = kept_label(record.sandbox_id), label
            else:
                _delete(here, record)
                gone.append(record.snapshot_id)
    with contextlib.suppress(WorldforkError):
        # Not where a run that is gone on with has taken it over meanwhile.
        here.store.set_labels(staying, instead_of=was)
    if gone:
        here.collect_soon()
    return gone


def _delete(here: Place, record: SnapshotRecord) -> None:
    with contextlib.suppress(NotFound):
        here.store.delete_snapshot(record.snapshot_id)


def _named_in(book: Path, run_id: str) -> set[str] | None:
    """Return the states that a book names; None where nobody can tell now, or it is not closed yet.

    Args:
        book: where it was.
        run_id: the run whose journal it has to be; empty where that is not known.
    """
    try:
        if is_id("sb", book.name):
            return Ledger(book.parent, book.name).states()
        if run_id and run_of(book) != run_id:
            _log.warning("states at the end of rollouts stay undecided: the run of %s is not there any more", book)
            return None
        return {each.final_snapshot_id for each in read_journal(book) if each.final_snapshot_id is not None}
    except (WorldforkError, OSError) as error:
        # A disk that is not there now is no reason to throw away what somebody wanted to keep.
        _log.warning("states at the end of rollouts stay undecided: %s", error)
        return None
