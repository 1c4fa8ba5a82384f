"""Checkpoints that are kept only if a command passes in a fresh fork of them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest
from tests.conformance.conftest import Sandboxes

from worldfork import Sandbox, SnapshotStatus
from worldfork.core.errors import CommandFailed, ConfigError
from worldfork.lineage import verifying
from worldfork.lineage.live import Live
from worldfork.lineage.place import Place, place
from worldfork.records.snapshot import SnapshotRecord


def ids() -> set[str]:
    return {snapshot.snapshot_id for snapshot in Sandbox.list_all_snapshots()}


@pytest.mark.behaviour("checkpoint-21")
def test_a_snapshot_whose_command_passes_is_kept(sandboxes: Sandboxes, box: Sandbox) -> None:
    box.write_file("/srv/world", "right\n")
    before = ids()
    snapshot = box.checkpoint(verify=["grep", "-q", "right", "/srv/world"], label="good", wait_until="completed")
    assert ids() - before == {snapshot.snapshot_id}
    assert (snapshot.label, snapshot.status, snapshot.level) == ("good", SnapshotStatus.COMPLETED, "local")
    assert sandboxes.restore(snapshot).read_file("/srv/world") == b"right\n"
    # The next one stands on it, and a line for the shell does too.
    box.write_file("/srv/more", "more\n")
    after = box.checkpoint(verify="cd /srv && cat world more | wc -l | grep -q 2")
    assert after.parent_id == snapshot.snapshot_id
    assert box.run("cat", ["/srv/more"]).stdout == "more\n"


@pytest.mark.behaviour("checkpoint-21")
def test_a_snapshot_whose_command_does_not_pass_is_not(box: Sandbox) -> None:
    box.write_file("/srv/world", "wrong\n")
    first = box.checkpoint()
    before = ids()
    live = {one.sandbox_id for one in Sandbox.list()}
    box.write_file("/srv/world", "worse\n")
    with pytest.raises(CommandFailed) as caught:
        box.checkpoint(verify="echo this is why >&2; exit 3", label="bad")
    assert caught.value.result.exit_code == 3
    assert "this is why" in str(caught.value)
    assert ids() == before
    assert {one.sandbox_id for one in Sandbox.list()} == live
    assert box.read_file("/srv/world") == b"worse\n"
    assert box.checkpoint().parent_id == first.snapshot_id
    with pytest.raises(CommandFailed):
        box.checkpoint(verify=["/no/such/program"])


@pytest.mark.behaviour("checkpoint-21")
def test_the_command_runs_in_a_fork_that_nobody_keeps(box: Sandbox) -> None:
    box.write_file("/srv/world", "right\n")
    box.start_process("sleep", ["100"])
    spoil = "rm /srv/world; echo x > /srv/spoiled; pgrep sleep && exit 1; exit 0"
    snapshot = box.checkpoint(verify=spoil)
    assert [each.is_dir for each in box.list_directory("/srv").entries] == [False]
    [child] = snapshot.fork(1).unwrap()
    with child:
        assert child.read_file("/srv/world") == b"right\n"


@pytest.mark.behaviour("checkpoint-21")
def test_stop_ends_only_what_was_verified(box: Sandbox) -> None:
    box.write_file("/srv/world", "wrong\n")
    with pytest.raises(CommandFailed):
        box.checkpoint(stop=True, verify=["grep", "-q", "right", "/srv/world"])
    assert box.read_file("/srv/world") == b"wrong\n"
    box.write_file("/srv/world", "right\n")
    snapshot = box.checkpoint(stop=True, verify=["grep", "-q", "right", "/srv/world"])
    assert box.status == "terminated"
    assert snapshot.snapshot_id in ids()


@pytest.mark.behaviour("checkpoint-21")
def test_a_command_that_takes_too_long_leaves_nothing(box: Sandbox) -> None:
    box.write_file("/srv/world", "right\n")
    before = ids()
    with pytest.raises(TimeoutError):
        box.checkpoint(verify=["sleep", "100"], timeout=1)
    assert ids() == before
    assert {one.sandbox_id for one in Sandbox.list()} >= {box.sandbox_id}
    assert box.read_file("/srv/world") == b"right\n"


@pytest.mark.behaviour("checkpoint-21")
def test_until_it_has_passed_there_is_only_a_throw_away(box: Sandbox, sandboxes: Sandboxes) -> None:
    box.write_file("/srv/world", "right\n")
    before = ids()
    taking = threading.Thread(target=lambda: box.checkpoint(verify=["sleep", "2"], label="good"))
    taking.start()
    seen: set[tuple[str | None, str]] = set()
    while taking.is_alive():
        for record in place().store.snapshots():
            if record.snapshot_id not in before:
                seen.add((record.label, record.level))
        taking.join(0.05)
    assert ("not verified", "volatile") in seen
    assert seen <= {("not verified", "volatile"), ("good", "local")}
    labels = [snapshot.label for snapshot in Sandbox.list_all_snapshots() if snapshot.snapshot_id not in before]
    assert labels == ["good"]


@pytest.mark.behaviour("checkpoint-21")
@pytest.mark.parametrize("verify", [[], "", [""], ["true", 1], 7])
def test_what_is_no_command_takes_nothing(box: Sandbox, verify: object) -> None:
    before = ids()
    with pytest.raises(ConfigError):
        box.checkpoint(verify=verify)  # type: ignore[arg-type]
    assert ids() == before


@pytest.mark.behaviour("checkpoint-21")
def test_a_caller_that_gives_up_as_the_candidate_goes_leaves_no_descriptor(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def given_up(live: Live, candidate: SnapshotRecord, kept: str | None) -> None:
        await forget(live, candidate, kept)
        raise asyncio.CancelledError

    def make_durable(self: Place, snapshot_id: str, sync_fd: int | None, level: str = "local") -> Future[None]:
        asked.append(snapshot_id)
        return durable(self, snapshot_id, sync_fd, level)

    forget, durable = verifying._forget, Place.make_durable
    monkeypatch.setattr(verifying, "_forget", given_up)
    monkeypatch.setattr(Place, "make_durable", make_durable)
    with pytest.raises(BaseException):  # noqa: B017 - however the door tells of it
        box.checkpoint(verify="true", label="late")
    [late] = [each.snapshot_id for each in Sandbox.list_all_snapshots() if each.label == "late"]
    assert late in asked
