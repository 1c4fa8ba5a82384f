"""Sandboxes of an ordinary user with, and without, a range of ids; one story for each process.

Arguments: the name of a story, and what it needs. The settings come from the process environment. Whoever runs this
has the range 2000000000 to 2000065535 in /etc/subuid and /etc/subgid, unless the story says otherwise.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from worldfork import Sandbox, SnapshotStore
from worldfork.content.ids import ids_of
from worldfork.core import mapped
from worldfork.core.errors import DriverUnavailable, FormatUnsupported, OutOfSpace, SandboxError
from worldfork.core.settings import load_settings
from worldfork.lineage.place import close_places, place

FIRST = 2_000_000_000
CLOSED = "mkdir -p d/e && echo it >d/e/f && chown 33:44 d/e/f && chown 1000:1000 d d/e && chmod 000 d d/e d/e/f"
SEEN = "stat -c '%n %u:%g %a' / d d/e d/e/f; cat d/e/f"


def fresh() -> Sandbox:
    """A sandbox on the host's userland."""
    return Sandbox.create(network="none")


def said(sandbox: Sandbox, line: str, user: str | None = None) -> str:
    """What a line that must succeed prints."""
    result = sandbox.sh(line, user=user)
    assert result.ok, (line, result.exit_code, result.stdout, result.stderr)
    return result.stdout.strip()


def refusal(kinds: tuple[type[BaseException], ...], call: Callable[[], object]) -> BaseException:
    """The error of a call that must fail."""
    try:
        outcome = call()
    except kinds as error:
        return error
    raise AssertionError(outcome)


def ends(*sandboxes: Sandbox) -> None:
    """End them all; afterwards the home holds nothing that could not be removed."""
    for sandbox in sandboxes:
        sandbox.terminate()
    here = place()
    for name in here.store.names():
        here.store.set_name(name, None)
    for record in here.store.snapshots():
        here.store.delete_snapshot(record.snapshot_id)
    report = here.store.collect()
    swept = here.sweep()
    assert [*report.failures, *swept.failures] == []
    here.store.empty_trash()
    for room in ("run", "trash", "layers"):
        assert not os.listdir(here.home.scratch / room), (room, os.listdir(here.home.scratch / room))


def owners() -> None:
    """Files belong to others, commands run as others, and the host sees ids of the range."""
    sandbox = fresh()
    assert place().driver.capabilities().other_users
    said(sandbox, CLOSED)
    assert said(sandbox, "id -u; id -g; id -G", user="12:34").split() == ["12", "34", "34"]
    assert said(sandbox, "touch /tmp/mine && stat -c %u:%g /tmp/mine", user="65534:65534") == "65534:65534"
    assert "beyond the range" in str(refusal((SandboxError,), lambda: sandbox.run("true", user="65536")))
    assert not sandbox.sh("cat d/e/f", user="1001").ok
    assert not sandbox.sh("ls d", user="1000").ok
    assert said(sandbox, "cat /proc/self/setgroups; id -G").split() == ["allow", "0"]
    assert said(sandbox, "tail -n 1 /proc/self/uid_map").split() == ["1", "1", "65535"]
    seen = os.lstat(Path(place().home.run) / sandbox.sandbox_id / "upper.0" / "workspace" / "d")
    assert (seen.st_uid, seen.st_gid) == (FIRST + 999, FIRST + 999)
    ends(sandbox)


def checkpoints() -> None:
    """A checkpoint by taking the upper, by copying it, and at the end holds owners and modes; forks see them."""
    sandbox = fresh()
    said(sandbox, CLOSED)
    said(sandbox, "chown 77:78 / && chmod 711 /")
    expected = said(sandbox, SEEN)
    assert expected.split("\n") == ["/ 77:78 711", "d 1000:1000 0", "d/e 1000:1000 0", "d/e/f 33:44 0", "it"]
    taken = sandbox.checkpoint()
    child, other = (outcome.unwrap() for outcome in [sandbox.fork(1), sandbox.fork(1)])
    assert said(child[0], SEEN) == expected
    said(child[0], "mkdir x && touch x/y && setfattr -n user.a -v b x 2>/dev/null; chown -R 5:6 x && chmod 0 x")
    child[0].start_process("sleep", ["1000"])
    copied = child[0].checkpoint()
    grandchild = Sandbox.create(snapshot_id=copied.snapshot_id, network="none")
    assert said(grandchild, SEEN) == expected
    assert said(grandchild, "stat -c '%u:%g %a' x x/y").split("\n") == ["5:6 0", "5:6 644"]
    said(child[0], "echo more >>x/y && chmod 700 x")
    again = Sandbox.create(snapshot_id=child[0].checkpoint().snapshot_id, network="none")
    assert said(again, "cat x/y; stat -c '%u:%g %a' x") == "more\n5:6 700"
    last = other[0].checkpoint(stop=True)
    final = Sandbox.create(snapshot_id=last.snapshot_id, network="none")
    assert said(final, SEEN) == expected
    records = [place().store.snapshot(one.snapshot_id) for one in (taken, copied, last)]
    assert all(record.facts["ids"] == place().driver.ids for record in records)
    ends(sandbox, child[0], grandchild, again, final)


def without(snapshot_id: str) -> None:
    """With the setting off, or without ranges, all is as ever; a snapshot with a range is refused and stays."""
    assert place().driver.ids == ""
    error = refusal((FormatUnsupported,), lambda: Sandbox.create(snapshot_id=snapshot_id, network="none"))
    assert "/etc/subuid" in str(error), error
    sandbox = fresh()
    assert not place().driver.capabilities().other_users
    assert not sandbox.sh("touch f && chown 1:1 f").ok
    assert "single user id" in str(refusal((SandboxError,), lambda: sandbox.sh("id", user="1")))
    assert place().store.snapshot(snapshot_id).snapshot_id == snapshot_id
    plain = sandbox.checkpoint()
    assert "ids" not in place().store.snapshot(plain.snapshot_id).facts
    sandbox.terminate()
    print(plain.snapshot_id)


def keeps() -> None:
    """Leaves a snapshot behind, and prints its id."""
    sandbox = fresh()
    said(sandbox, CLOSED)
    print(sandbox.checkpoint(stop=True).snapshot_id)


def changes(snapshot_id: str) -> None:
    """Leaves another snapshot behind, in which a file has another owner, and prints its id."""
    sandbox = Sandbox.create(snapshot_id=snapshot_id, network="none")
    said(sandbox, "chown 44:33 d/e/f")
    print(sandbox.checkpoint(stop=True).snapshot_id)


def moves(snapshot_id: str, archive: str, remote: str) -> None:
    """A snapshot goes to another home by a program, as an archive and by a remote; its files keep their owners."""
    kept = SnapshotStore()
    with open(archive, "wb") as file:
        kept.export(snapshot_id, file)
    kept.push([snapshot_id], remote)


def arrives(snapshot_id: str, source: str) -> None:
    """The other end of `moves`."""
    kept = SnapshotStore()
    if os.path.isdir(source):
        kept.pull([snapshot_id], source)
    else:
        with open(source, "rb") as file:
            kept.import_(file)
    restores(snapshot_id, "stat -c %u:%g d/e/f | grep -x 33:44")


def restores(snapshot_id: str, *words: str) -> None:
    """A snapshot shows what `words` say."""
    sandbox = Sandbox.create(snapshot_id=snapshot_id, network="none")
    assert said(sandbox, " ".join(words) or SEEN)
    sandbox.terminate()


def on_a_base(top: str, owner: str) -> None:
    """A root file system of the user's, with files of the range, is seen with its owners, and exported with them."""
    sandbox = Sandbox.create(base=f"dir:{top}", network="none")
    assert said(sandbox, "stat -c %u:%g /given") == owner
    snapshot = sandbox.checkpoint()
    archive = io.BytesIO()
    SnapshotStore().export(snapshot.snapshot_id, archive)
    assert archive.getvalue() != b""
    digest = SnapshotStore().digest(snapshot.snapshot_id)
    said(sandbox, "chown 8:8 /given")
    assert SnapshotStore().digest(sandbox.checkpoint().snapshot_id) != digest
    sandbox.terminate()


def disk_limit() -> None:
    """A sandbox cannot hide from its disk limit what it gives to another and closes."""
    sandbox = Sandbox.create(network="none", disk_mb=8)
    line = (
        "mkdir h && chown 9:9 h && chmod 700 h && for i in 1 2 3; do head -c 6000000 /dev/zero >h/$i; done && sleep 60"
    )
    error = refusal((OutOfSpace,), lambda: sandbox.sh(line, timeout=50))
    assert "8 MiB of disk" in str(error), error


def store() -> None:
    """Sealing, merging, export and import see owners as they are inside."""
    from tests.stories import id_ranges as stories

    from worldfork.content.layer import walk
    from worldfork.keeping.sealing import seal
    from worldfork.keeping.squash import squash_now
    from worldfork.store import collect

    collect._YOUNG_S = 0.0  # nobody will come to stand on the merge that is made here

    sandbox = fresh()
    said(sandbox, CLOSED)
    first = sandbox.checkpoint()
    said(sandbox, "mkdir -m 0 z && chown 3:4 z")
    second = sandbox.checkpoint()
    here = place()
    record = here.store.snapshot(second.snapshot_id)
    layer = record.layers[1]
    assert ids_of(here.store.layer_path(layer)) == here.driver.ids
    seen = {entry.path: (entry.uid, entry.gid, entry.mode) for entry, _ in walk(here.store.layer_path(layer), "user")}
    assert (seen["workspace/d"], seen["workspace/d/e/f"]) == ((1000, 1000, 0), (33, 44, 0))
    sealed = seal(here.store, layer)
    assert sealed.digest == mapped.run(stories.digest_of_layer, str(here.store.layer_path(layer)))
    kept = SnapshotStore()
    assert kept.read_file(second.snapshot_id, "/workspace/d/e/f") == b"it\n"
    assert [entry.name for entry in kept.list_directory(second.snapshot_id, "/workspace/d/e")] == ["f"]
    assert [change.path for change in kept.diff(first.snapshot_id, second.snapshot_id, "/workspace")] == [
        "/workspace/z"
    ]
    digest = kept.digest(second.snapshot_id)
    said(sandbox, "rmdir z && mkdir -m 0 z && chown 3:5 z && touch -d @1 z . && chown 3:4 z")
    assert kept.digest(sandbox.checkpoint().snapshot_id) == digest
    said(sandbox, "chown 3:5 z")
    assert kept.digest(sandbox.checkpoint().snapshot_id) != digest
    stack = squash_now(here.store, record.layers, 2)
    assert len(stack) < len(record.layers), stack
    merged = next(layer_id for layer_id in stack if layer_id not in record.layers)
    seen = {entry.path: (entry.uid, entry.gid, entry.mode) for entry, _ in walk(here.store.layer_path(merged), "user")}
    assert (seen["workspace/d"], seen["workspace/z"]) == ((1000, 1000, 0), (3, 4, 0))
    ends(sandbox)


def digest_of_layer(path: str) -> str:
    """The digest of a layer, as a process finds it that has the ids."""
    from worldfork.content.layer import walk
    from worldfork.content.manifest import write_manifest

    assert os.geteuid() == 0
    return write_manifest(walk(Path(path), "user"), Path(path).with_name("manifest.again")).digest


def refused_outside(snapshot_id: str) -> None:
    """Without the range nobody reads such a layer wrongly: an error that says what is missing."""
    from worldfork.content.layer import walk
    from worldfork.content.stack import LayerStack

    paths = [place().store.layer_path(layer) for layer in place().store.snapshot(snapshot_id).layers]
    calls: tuple[Callable[[], object], ...] = (
        lambda: [list(walk(path, "user", hashed=False)) for path in paths],
        lambda: LayerStack(paths, "user"),
    )
    for call in calls:
        assert getattr(refusal((DriverUnavailable, FormatUnsupported), call), "remedy", "")


def doctor(words: str) -> None:
    """The doctor says what is the matter with ranges."""
    from worldfork.sandbox.probe import probe

    settings = load_settings()
    settings.home.mkdir(parents=True, exist_ok=True)
    found = [result for result in asyncio.run(probe(settings)) if result.name.startswith("range")]
    assert len(found) == 1
    assert words in f"{found[0].ok} {found[0].detail} {found[0].remedy}", found


def apart() -> None:
    """What needs a process that is other ids never runs on the event loop, which all sandboxes share."""
    loops: list[str] = []
    run = mapped.run

    def noted(function: Callable[..., object], *arguments: object) -> object:
        name = threading.current_thread().name
        loops.append(f"{function.__name__} {name}")
        return run(function, *arguments)

    mapped.run = noted  # type: ignore[assignment]
    sandbox = fresh()
    said(sandbox, "chown 77:78 / && chmod 711 /")
    snapshot = sandbox.checkpoint()
    (child,) = snapshot.fork(1).unwrap()
    again = Sandbox.create(snapshot_id=snapshot.snapshot_id)
    assert said(again, "stat -c '%u:%g %a' /") == said(child, "stat -c '%u:%g %a' /") == "77:78 711"
    assert sum(line.startswith("make_upper ") for line in loops) == 3, loops
    assert not [line for line in loops if line.endswith("worldfork-door")], loops
    ends(sandbox, child, again)


def calls() -> None:
    """Results and errors come back; the server rests when it has nothing to do, and is there again when needed."""
    assert mapped.run(os.geteuid) == 0
    none = f"{load_settings().home}/none"
    for _ in range(2):
        assert none in str(refusal((FileNotFoundError,), lambda: mapped.run(os.unlink, none)))
        assert [mapped.rest(1000), mapped.rest()] == [True, False]


def dies() -> None:
    """Says that a call is under way, and waits to be killed."""
    import threading

    threading.Thread(target=mapped.run, args=(time.sleep, 1000), daemon=True).start()
    sandbox = fresh()
    said(sandbox, CLOSED)
    print("ready", flush=True)
    time.sleep(1000)


def machines(base: str) -> None:
    """Files keep their owners from one driver to the other and back, and in a fork with memory."""
    for first, second in (("namespace", "microvm"), ("microvm", "namespace")):
        with Sandbox.create(base=f"dir:{base}", driver=first, network="none") as source:
            said(source, "cd /workspace && touch mine given && chown 12:34 given && chmod 600 given")
            closed = "mkdir -m 700 /tmp/c && head -c 300000 /dev/urandom > /tmp/c/f && chown 12 /tmp/c"
            said(source, closed)
            assert source.explain().filesystem_bytes >= 300_000, first
            snapshot = source.checkpoint()
        with Sandbox.create(snapshot_id=snapshot.snapshot_id, driver=second) as there:
            assert said(there, "cd /workspace && stat -c '%n %u:%g %a' given mine") == "given 12:34 600\nmine 0:0 644"
            assert said(there, "id -u", user="12") == "12"
            said(there, "cd /workspace && rm given && touch other && chown 77 other")
            back = there.checkpoint()
        with Sandbox.create(snapshot_id=back.snapshot_id, driver=first) as again:
            assert said(again, "cd /workspace && stat -c '%n %u' *") == "mine 0\nother 77"
    with Sandbox.create(base=f"dir:{base}", driver="microvm") as source:
        said(source, "touch given && chown 12:34 given")
        [fork] = source.fork(1, memory=True).unwrap()
        assert said(fork, "stat -c '%u:%g' given") == "12:34"
        ends(fork, source)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "no cgroup of this host", RuntimeWarning)
    globals()[sys.argv[1]](*sys.argv[2:])
    close_places()
