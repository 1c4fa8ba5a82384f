"""Restores: what a new sandbox takes over from a snapshot, and how long a snapshot lives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conformance.conftest import Elsewhere, Sandboxes, finish
from tests.conformance.inside import python, shell, told
from tests.roots import make_small_root

from worldfork import ConfigError, NotFound, Sandbox
from worldfork.core.errors import DriverUnavailable, FormatUnsupported, Locked
from worldfork.lineage.place import place
from worldfork.sandbox.driver import Capabilities

Needs = Callable[[str], None]


@pytest.mark.behaviour("restore-2")
def test_a_restore_never_changes_its_snapshot(sandboxes: Sandboxes, box: Sandbox) -> None:
    shell(box, "echo 1 > /srv/f; mkdir /srv/d; echo 2 > /srv/d/g")
    snapshot = box.checkpoint()
    one = sandboxes.restore(snapshot)
    shell(one, "echo changed > /srv/f; rm -r /srv/d; touch /srv/new; rm /etc/passwd; chmod 700 /srv")
    two = sandboxes.restore(snapshot)
    assert shell(two, "cat /srv/f /srv/d/g; ls /srv; stat -c %a /srv; [ -e /etc/passwd ] && echo there").split() == [
        "1", "2", "d", "f", "755", "there",
    ]  # fmt: skip
    assert shell(one, "cat /srv/f") == "changed"


@pytest.mark.behaviour("restore-3")
def test_a_snapshot_that_is_not_there(driver: str) -> None:
    for name in ("sn-aaaaaaaaaaaaaaaa", "sn-nonsense", "../../etc"):
        with pytest.raises((NotFound, ConfigError)):
            Sandbox.create(driver=driver, snapshot_id=name)
        with pytest.raises((NotFound, ConfigError)):
            Sandbox.get_snapshot(name)
        with pytest.raises((NotFound, ConfigError)):
            Sandbox.delete_snapshot(name)
        with pytest.raises((NotFound, ConfigError)):
            Sandbox.fork_snapshot(name, 2)
    with pytest.raises(LookupError):
        Sandbox.create(driver=driver, snapshot_id="sn-aaaaaaaaaaaaaaaa")


@pytest.mark.behaviour("restore-3")
def test_a_snapshot_brings_its_own_base(box: Sandbox, driver: str) -> None:
    snapshot = box.checkpoint()
    for wrong in ({"base": "host"}, {"image": "host"}):
        with pytest.raises(ConfigError):
            Sandbox.create(driver=driver, snapshot_id=snapshot.snapshot_id, **wrong)


@pytest.mark.behaviour("restore-4")
def test_variables_user_and_directory_come_along(sandboxes: Sandboxes) -> None:
    box = sandboxes.create(env={"A": "1", "B": "2"}, working_dir="/srv")
    box.write_file("f", b"x")
    snapshot = box.checkpoint()
    look = "import json, os; print(json.dumps([os.environ.get('A'), os.environ.get('B'), os.getcwd()]))"
    assert told(sandboxes.restore(snapshot), look) == ["1", "2", "/srv"]
    assert sandboxes.restore(snapshot).read_file("f") == b"x"
    assert told(sandboxes.restore(snapshot, env={"B": "3"}, working_dir="/"), look) == ["1", "3", "/"]
    # And from there to the next.
    again = sandboxes.restore(sandboxes.restore(snapshot, env={"B": "3"}).checkpoint())
    assert told(again, look) == ["1", "3", "/srv"]


@pytest.mark.behaviour("restore-4")
def test_the_user_comes_along(sandboxes: Sandboxes, needs: Needs) -> None:
    needs("other_users")
    snapshot = sandboxes.create(user="1234:55").checkpoint()
    assert shell(sandboxes.restore(snapshot), "echo $(id -u):$(id -g)") == "1234:55"
    assert shell(sandboxes.restore(snapshot, user="0"), "id -u") == "0"


@pytest.mark.behaviour("restore-5")
def test_the_network_never_comes_along(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://user:secret@proxy.invalid:1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@index.invalid/simple")
    box = sandboxes.create(network="host", env={"MINE": "1"})
    shell(box, "env > /srv/seen")
    assert b"secret" in box.read_file("/srv/seen")
    shell(box, "rm /srv/seen")
    snapshot = box.checkpoint()
    for restored in (
        sandboxes.keep(Sandbox.create(snapshot_id=snapshot.snapshot_id, driver=sandboxes.driver)),
        *sandboxes.fork(snapshot, 2),
        *sandboxes.fork(box, 1),
    ):
        assert restored.info().network == "none"
        seen = shell(restored, "env; cat /etc/resolv.conf; tail -n +3 /proc/net/dev | cut -d: -f1")
        assert "secret" not in seen
        assert "MINE=1" in seen
        assert seen.split()[-1] == "lo"
    assert "secret" not in json.dumps(place().store.snapshot(snapshot.snapshot_id).facts)
    on = sandboxes.restore(snapshot, network="host")
    assert (on.info().network, "secret" in shell(on, "env")) == ("host", True)


@pytest.mark.behaviour("restore-6")
def test_limits_come_along(sandboxes: Sandboxes) -> None:
    snapshot = sandboxes.create(cpus=0.5, memory_mb=200, disk_mb=300, pids=50).checkpoint()
    limits = sandboxes.restore(snapshot).info().limits
    assert (limits.cpus, limits.memory_mb, limits.disk_mb, limits.pids) == (0.5, 200, 300, 50)
    limits = sandboxes.fork(snapshot)[0].info().limits
    assert (limits.cpus, limits.memory_mb, limits.disk_mb, limits.pids) == (0.5, 200, 300, 50)
    changed = sandboxes.restore(snapshot, memory_mb=100, pids=60).info().limits
    assert (changed.cpus, changed.memory_mb, changed.disk_mb, changed.pids) == (0.5, 100, 300, 60)


@pytest.mark.behaviour("restore-7")
def test_a_snapshot_in_use_is_not_deleted(sandboxes: Sandboxes, box: Sandbox) -> None:
    box.write_file("/srv/f", b"1")
    snapshot = box.checkpoint()
    one, two = sandboxes.fork(snapshot, 2)
    with pytest.raises(Locked) as refused:
        Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert sorted(refused.value.holders) == sorted([one.sandbox_id, two.sandbox_id])
    one.terminate()
    with pytest.raises(Locked) as refused:
        Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert refused.value.holders == [two.sandbox_id]
    assert two.read_file("/srv/f") == b"1"
    two.terminate()
    Sandbox.delete_snapshot(snapshot.snapshot_id)
    with pytest.raises(NotFound):
        Sandbox.create(snapshot_id=snapshot.snapshot_id, driver=sandboxes.driver)
    with pytest.raises(NotFound):
        Sandbox.delete_snapshot(snapshot.snapshot_id)
    # The sandbox that it was taken of stands on the same layer and goes on.
    assert box.read_file("/srv/f") == b"1"
    box.write_file("/srv/g", b"2")
    assert shell(sandboxes.restore(box.checkpoint()), "cat /srv/f /srv/g") == "12"


@pytest.mark.behaviour("restore-8")
def test_deleting_a_snapshot_leaves_those_that_stand_on_it(sandboxes: Sandboxes, box: Sandbox) -> None:
    box.write_file("/srv/f", b"1")
    first = box.checkpoint()
    child = sandboxes.restore(first)
    child.write_file("/srv/g", b"2")
    second = child.checkpoint()
    top = place().store.layer_path(place().store.snapshot(second.snapshot_id).layers[0])
    child.terminate()
    box.terminate()
    Sandbox.delete_snapshot(first.snapshot_id)
    restored = sandboxes.restore(second)
    assert shell(restored, "cat /srv/f /srv/g") == "12"
    restored.terminate()
    assert top.exists()
    Sandbox.delete_snapshot(second.snapshot_id)
    assert not top.exists()


@pytest.mark.behaviour("restore-9")
def test_another_process_restores_it(sandboxes: Sandboxes, box: Sandbox, elsewhere: Elsewhere) -> None:
    box.write_file("/srv/f", b"1")
    program = (
        "import sys\n"
        "from worldfork import Sandbox\n"
        "with Sandbox.create(snapshot_id=sys.argv[1]) as box:\n"
        "    box.write_file('/srv/g', b'2')\n"
        "    print(box.checkpoint(stop=True).snapshot_id)\n"
    )
    second = finish(elsewhere(program, box.checkpoint().snapshot_id)).strip()
    assert shell(sandboxes.create(snapshot_id=second), "cat /srv/f /srv/g") == "12"


@pytest.mark.behaviour("restore-10")
def test_a_changed_base_is_refused_unless_allowed(
    sandboxes: Sandboxes, box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from worldfork.lineage import fitting

    snapshot = box.checkpoint()
    now = replace(fitting.host_base(), fingerprint="another userland")
    monkeypatch.setattr(fitting, "host_base", lambda: now)
    with pytest.raises(FormatUnsupported) as refused:
        sandboxes.restore(snapshot)
    assert "allow_changed_base" in refused.value.remedy
    assert sandboxes.restore(snapshot, allow_changed_base=True).run("true").ok


OTHER_FORM = """
import sys
from worldfork import Sandbox
from worldfork.core.errors import DriverUnavailable
try:
    Sandbox.create(snapshot_id=sys.argv[1])
except DriverUnavailable as error:
    print(error.remedy != "")
"""


@pytest.mark.root
@pytest.mark.behaviour("restore-11")
def test_layers_of_the_other_form_are_refused(box: Sandbox, elsewhere: Elsewhere, capabilities: Capabilities) -> None:
    assert DriverUnavailable.code == "driver_unavailable"
    other = "user" if capabilities.form == "trusted" else "trusted"
    snapshot = box.checkpoint()
    assert finish(elsewhere(OTHER_FORM, snapshot.snapshot_id, WORLDFORK_FORM=other)) == "True\n"


@pytest.mark.behaviour("restore-12")
def test_any_root_file_system_is_a_base(sandboxes: Sandboxes, tmp_path: Path) -> None:
    root = make_small_root(tmp_path / "root")
    (root / "data").mkdir()
    (root / "data" / "f").write_text("of the base\n")
    (root / "gone").write_text("1")
    before = sorted(str(path) for path in root.rglob("*"))
    box = sandboxes.create(base=f"dir:{root}")
    assert box.info().base == f"dir:{root}"
    assert shell(box, "cat /data/f; pwd") == "of the base\n/workspace"
    assert box.run("python3").exit_code == 127
    assert box.sh("echo $0").stdout == "bash\n"
    shell(box, "echo changed > /data/f; rm /gone; touch /data/new")
    snapshot = box.checkpoint()
    restored = sandboxes.restore(snapshot)
    assert shell(restored, "cat /data/f; ls /data; ls /gone 2>/dev/null || echo gone").split() == [
        "changed", "f", "new", "gone",
    ]  # fmt: skip
    assert shell(sandboxes.create(image=f"dir:{root}"), "cat /data/f") == "of the base"
    assert sorted(str(path) for path in root.rglob("*")) == before
    assert (root / "data" / "f").read_text() == "of the base\n"


@pytest.mark.behaviour("restore-12")
def test_a_base_that_cannot_be_one_is_refused(driver: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for base in ("dir:/no/such/place", f"dir:{tmp_path}/empty", f"dir:{tmp_path}/file", "dir:here", "dir:/", "ubuntu"):
        with pytest.raises(ConfigError):
            Sandbox.create(driver=driver, base=base)


@pytest.mark.behaviour("restore-12")
def test_a_base_that_is_gone_is_named(sandboxes: Sandboxes, tmp_path: Path) -> None:
    root = make_small_root(tmp_path / "root")
    box = sandboxes.create(base=f"dir:{root}")
    snapshot = box.checkpoint(stop=True)
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError) as error:
        sandboxes.restore(snapshot)
    assert str(root) in str(error.value)
    (tmp_path / "elsewhere").rename(root)
    assert sandboxes.restore(snapshot).run("true").ok


@pytest.mark.behaviour("restore-13")
def test_arguments_of_the_mirrored_sdk(driver: str, sandboxes: Sandboxes) -> None:
    box = sandboxes.create(request_timeout=5, api_key="x", proxy_url=None, startup_timeout=3, wait=True)
    assert box.run("true").ok
    assert python(box, "print(1)") == "1\n"
    for wrong in ({"gpus": 1}, {"pool_id": "x"}, {"allow_out": ["a"]}, {"no_such_argument": 1}):
        with pytest.raises(ConfigError) as error:
            Sandbox.create(driver=driver, **wrong)
        assert next(iter(wrong)) in str(error.value)
    with pytest.raises(ConfigError):
        Sandbox.create(driver="no-such-driver")
