"""Identity: what siblings must not share although it would be copied."""

from __future__ import annotations

import pytest
from tests.conformance.conftest import Sandboxes
from tests.conformance.inside import python, shell, told

from worldfork import ConfigError, Sandbox
from worldfork.sandbox.driver import Capabilities

WHO = (
    "import json, os, socket\n"
    "read = lambda path: open(path).read().strip()\n"
    "print(json.dumps({'id': os.environ['WORLDFORK_SANDBOX_ID'], 'host': socket.gethostname(),\n"
    "    'file': read('/etc/hostname'), 'machine': read('/etc/machine-id'),\n"
    "    'address': socket.gethostbyname(socket.gethostname())}))\n"
)


@pytest.mark.behaviour("identity-1")
def test_each_has_a_name_of_its_own(sandboxes: Sandboxes, box: Sandbox) -> None:
    family = [box, *sandboxes.fork(box, 3), sandboxes.restore(box.checkpoint())]
    seen = [told(one, WHO) for one in family]
    for key in ("id", "host", "file", "machine"):
        assert len({row[key] for row in seen}) == len(family), key
    for one, row in zip(family, seen, strict=True):
        assert (row["id"], row["host"], row["file"]) == (one.sandbox_id, one.sandbox_id, one.sandbox_id)
        assert len(row["machine"]) == 32
        assert row["machine"] == told(one, WHO)["machine"]
        assert row["address"].startswith("127.")


@pytest.mark.behaviour("identity-2")
def test_each_fork_knows_its_index_and_seed(sandboxes: Sandboxes, box: Sandbox) -> None:
    children = sandboxes.fork(box, 4)
    look = "import json, os; print(json.dumps([int(os.environ['WORLDFORK_' + n]) for n in ('FORK_INDEX', 'SEED')]))"
    assert [told(child, look) for child in children] == [[index, child.seed] for index, child in enumerate(children)]
    # Nobody can pretend to be another.
    forged = box.run("sh", ["-c", "echo $WORLDFORK_FORK_INDEX"], env={"WORLDFORK_FORK_INDEX": "7"}).stdout
    assert forged == "7\n"  # for one command, as its caller wished
    snapshot = sandboxes.create(env={"WORLDFORK_SEED": "1", "WORLDFORK_SANDBOX_ID": "x"}).checkpoint()
    child = sandboxes.fork(snapshot, 1, seeds=[5])[0]
    assert shell(child, "echo $WORLDFORK_SEED $WORLDFORK_SANDBOX_ID") == f"5 {child.sandbox_id}"


@pytest.mark.behaviour("identity-3")
def test_seeds_are_independent_common_or_given(sandboxes: Sandboxes, box: Sandbox) -> None:
    snapshot = box.checkpoint()

    def seeds(**options: object) -> list[int]:
        children = sandboxes.fork(snapshot, 3, **options)
        assert [int(shell(child, "echo $WORLDFORK_SEED")) for child in children] == [child.seed for child in children]
        return [child.seed for child in children]

    assert len(set(seeds())) == len(set(seeds(seeds="independent"))) == 3
    assert len(set(seeds(seeds="common"))) == 1
    assert seeds(seeds="common") != seeds(seeds="common")
    assert seeds(seeds=[3, 1, 2**63 - 1]) == [3, 1, 2**63 - 1]
    assert sandboxes.restore(snapshot, seed=42).seed == 42
    assert sandboxes.create(seed=42).info().seed == 42
    for wrong in ([1, 2], [1, 2, -1], [1, 2, 2**63], "other"):
        with pytest.raises(ConfigError):
            snapshot.fork(3, seeds=wrong)


@pytest.mark.behaviour("identity-4")
def test_identity_files_never_enter_a_layer(sandboxes: Sandboxes, box: Sandbox) -> None:
    shell(box, "echo '127.0.0.9 mine' >> /etc/hosts; echo x >> /etc/resolv.conf; echo other > /etc/hostname")
    assert "mine" in shell(box, "cat /etc/hosts")
    child = sandboxes.fork(box, 1)[0]
    seen = shell(child, "cat /etc/hosts /etc/resolv.conf /etc/hostname")
    assert "mine" not in seen
    assert box.sandbox_id not in seen
    assert child.sandbox_id in seen


@pytest.mark.behaviour("identity-5")
@pytest.mark.parametrize(
    "line",
    [
        "mv /etc /etc.old; mkdir /etc; cp /etc.old/passwd /etc.old/group /etc/; cp -r /etc.old/alternatives /etc/",
        "mv /etc /real; ln -s /real /etc",
        "mv /etc /etc.old; mkdir /etc /etc/hosts; cd /etc; ln -s /srv/target hostname; ln -s /dev/null machine-id",
        "rm -rf /workspace /tmp /root /run /var /home /srv /opt/x; true",
        "rm -rf /tmp /root; ln -s /srv /tmp; ln -s /nowhere /root; chmod 000 /workspace",
    ],
    ids=["etc new", "etc a link", "files are links", "directories gone", "directories are links"],
)
def test_a_world_that_turned_itself_over_still_restores(
    sandboxes: Sandboxes, box: Sandbox, capabilities: Capabilities, line: str
) -> None:
    turned = box.run("sh", ["-c", line])
    if turned.exit_code != 0 and not capabilities.rename_base_dirs:
        pytest.skip("a capability that this driver has not got here: rename_base_dirs")
    assert turned.exit_code == 0, turned.stderr
    child = sandboxes.fork(box, 1)[0]
    # A restore works, its identity is its own where there is a place for it, and no link led anywhere.
    assert shell(child, "hostname", working_dir="/") == child.sandbox_id
    assert shell(child, "echo $WORLDFORK_SANDBOX_ID", working_dir="/") == child.sandbox_id
    assert child.run("test", ["-e", "/srv/target"], working_dir="/").exit_code != 0
    assert shell(child, "head -c 3 /dev/null | wc -c", working_dir="/") == "0"
    assert box.sandbox_id not in shell(child, "cat /etc/hostname 2>/dev/null || true", working_dir="/")


@pytest.mark.behaviour("identity-6")
def test_names(sandboxes: Sandboxes) -> None:
    box = sandboxes.create(name="my world/1")
    assert (box.name, shell(box, "hostname")) == ("my world/1", "my-world-1")
    assert shell(sandboxes.create(name="x" * 100), "hostname") == "x" * 63
    nameless = sandboxes.create(name="é")
    assert shell(nameless, "hostname") == nameless.sandbox_id
    for wrong in ("", "a\0b", "n" * 201):
        with pytest.raises(ConfigError):
            sandboxes.create(name=wrong)


@pytest.mark.behaviour("identity-7")
def test_random_numbers_and_clocks_are_not_copied(sandboxes: Sandboxes, box: Sandbox) -> None:
    children = sandboxes.fork(box, 4)
    draw = "import os, random, uuid; print(os.urandom(16).hex(), random.getrandbits(128), uuid.uuid4())"
    drawn = [word for child in children for word in python(child, draw).split()]
    assert len(set(drawn)) == len(drawn)
    import time

    assert abs(float(python(children[0], "import time; print(time.time())")) - time.time()) < 5
