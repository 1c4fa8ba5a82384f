"""Whether a snapshot, and the ground that it stands on, can be used here as they are."""

from __future__ import annotations

import os

from worldfork.core.errors import ConfigError, DriverUnavailable, FormatUnsupported
from worldfork.core.idmap import covers
from worldfork.records.sandbox import Base
from worldfork.records.snapshot import SnapshotRecord
from worldfork.sandbox.bases import host_base
from worldfork.store.home import Home


def check_form(record: SnapshotRecord, present: str) -> None:
    """Refuse a snapshot whose layers would be read wrongly.

    Args:
        record: the snapshot.
        present: the form of the sandboxes that would stand on it.
    Raises:
        DriverUnavailable: its layers have the other form.
    """
    if record.form != present:
        raise DriverUnavailable(
            f"{record.snapshot_id} was taken as {_who(record.form)}, and this process starts sandboxes as "
            f"{_who(present)}: deleted files would come back",
            remedy=f"restore it as {_who(record.form)}, or build the world again",
        )


def check_driver(record: SnapshotRecord, driver: str) -> None:
    """Refuse a snapshot that a driver cannot start.

    Raises:
        DriverUnavailable: it stands on the host's own userland, which a machine cannot show.
    """
    expect_base(str(record.base.get("kind")), driver)


def expect_base(base: str, driver: str) -> None:
    """Refuse a base that a driver cannot show.

    Args:
        base: as the caller names it, or its kind.
        driver: the driver's name.
    Raises:
        DriverUnavailable: it is the host's own userland, for a machine.
    """
    if driver != "namespace" and base == "host":
        raise DriverUnavailable(
            "a virtual machine cannot show the host's own userland",
            remedy="make a root for machines with `worldfork image build --driver microvm --from debian`, and start "
            "from the `dir:` that it prints",
            driver=driver,
        )


def check_base(record: SnapshotRecord, allow_changed: bool) -> Base:
    """Return the base to restore on.

    Raises:
        FormatUnsupported: the machine's userland is not what the snapshot was taken on.
        ConfigError: the base's directory is gone.
    """
    base = Base.from_json(record.base)
    if base.kind == "dir" and not os.path.isdir(base.path):
        raise ConfigError(f"the base {base.path} of {record.snapshot_id} is gone", remedy="put it back, or build anew")
    if base.kind != "host":
        return base
    present = host_base()
    if present.fingerprint != base.fingerprint and not allow_changed:
        raise FormatUnsupported(
            f"this machine's userland changed since {record.snapshot_id} was taken",
            remedy="build the world again, or restore with allow_changed_base=True",
            expected=base.fingerprint,
            actual=present.fingerprint,
        )
    # A base that came from elsewhere has its fingerprint, and nothing of what is mounted here.
    return present if present.fingerprint != base.fingerprint or not base.binds else base


def check_ids(record: SnapshotRecord, present: str) -> None:
    """Refuse a snapshot whose files would belong to nobody.

    Args:
        record: the snapshot.
        present: the map of the sandboxes that would stand on it.
    Raises:
        FormatUnsupported: it was taken in a sandbox with a range of ids that is not the present one.
    """
    stored = record.facts.get("ids", "")
    if not covers(present, stored):
        raise FormatUnsupported(
            f"{record.snapshot_id} was taken with a range of user ids, and "
            + ("this user has another one now" if present else "sandboxes have none here: its files would be nobody's"),
            remedy="set WORLDFORK_ID_RANGE=auto, and give this user the same range in /etc/subuid and /etc/subgid; "
            "`worldfork doctor` says what is missing",
            expected=stored,
            actual=present,
        )


def check_apart(home: Home, base: Base) -> None:
    """Refuse a base that would show the store, and with it all other sandboxes and their sockets, inside.

    Raises:
        ConfigError: the home or its scratch directory lies below what the base shows.
    """
    shown = [source for source, _ in base.binds] + ([base.path] if base.path else [])
    for own in {home.root, home.scratch}:
        for path in shown:
            if own.is_relative_to(path):
                raise ConfigError(
                    f"{own} lies in {path}, which the base {base.kind!r} shows inside a sandbox",
                    remedy="set WORLDFORK_HOME and WORLDFORK_SCRATCH to directories elsewhere",
                )


def _who(form: str) -> str:
    return "root" if form == "trusted" else "an ordinary user"
