"""Hazards of entropy, identity and secrets: what siblings must not share."""

from __future__ import annotations

import os
import secrets
import time

from worldfork.testing.checks import Wrong, check, expect
from worldfork.testing.live import ask, hold
from worldfork.testing.trial import Box, Trial, gather

FORKS_N = 16

_DRAW = """
import json, os, random, ssl, uuid
kernel = open("/proc/sys/kernel/random/uuid").read().strip()
print(json.dumps({"os.urandom": os.urandom(16).hex(), "uuid4": str(uuid.uuid4()), "random": random.random(),
    "ssl": ssl.RAND_bytes(16).hex(), "the kernel's uuid": kernel, "tempfile": __import__("tempfile").mktemp()}))
"""
_WHO = """
import json, os, socket
def read(path):
    try: return open(path).read().strip()
    except OSError: return ""
net = "/sys/class/net"
links = [name for name in sorted(os.listdir(net)) if name != "lo"] if os.path.isdir(net) else []
print(json.dumps({"host name": socket.gethostname(), "machine id": read("/etc/machine-id"),
    "link address": " ".join(read("%s/%s/address" % (net, name)) for name in links)}))
"""

_SEARCH = """
read rest; p=$(printf %s%s '{half}' $rest); found=no
cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' > /var/tmp/seen
while read -r line; do case $line in *$p*) found=variables;; esac; done < /var/tmp/seen
rm /var/tmp/seen
for d in /etc /root /home /run /tmp /var/tmp; do
  [ -z "$(find $d -xdev -type f -size -2048k -exec grep -lsF "$p" {{}} +)" ] || found=$d
done
echo $found
"""


@check(19, "siblings draw different random numbers", "forkd#2, mitos#5, PR882, substrate PR1524, vm0#8212", limit_s=120)
async def _random_numbers(trial: Trial) -> None:
    box = await trial.create()
    live = trial.memory and trial.adapter.abilities.processes
    if live:
        await hold(box, trial.adapter.abilities.hook)
    children = await trial.fork(await trial.snapshot(box), FORKS_N)
    drawn = await gather(*(child.python(_DRAW) for child in children))
    for source in drawn[0]:
        _all_differ([row[source] for row in drawn], source)
    if live:
        told = [await ask(child, "random") for child in children]
        for place, source in enumerate(("random", "uuid4", "os.urandom")):
            _all_differ([row[place] for row in told], f"{source} of a program that ran at the snapshot")


def _all_differ(values: list[object], source: str) -> None:
    twins = len(values) - len(set(values))
    expect(twins == 0, f"{twins} of {len(values)} siblings drew an equal number from {source}")


@check(20, "random numbers come at once after a fork", "forkd#218, #225")
async def _entropy_is_ready(trial: Trial) -> None:
    box = await trial.create()
    code = "import os, ssl, json; os.getrandom(64); ssl.RAND_bytes(64); ssl.create_default_context(); print(1)"
    await box.python(code)
    start_s = time.monotonic()
    await box.python(code)
    usual_s = time.monotonic() - start_s
    for child in await trial.fork(await trial.snapshot(box), 3):
        start_s = time.monotonic()
        await child.python(code)
        took_s = time.monotonic() - start_s
        expect(
            took_s < 1 + 5 * usual_s,
            f"the first use of ssl took {took_s:.1f} s in a fork, {usual_s:.1f} s in the source",
        )


@check(28, "siblings have names and addresses of their own", "firecracker docs, mitos's list")
async def _own_identity(trial: Trial) -> None:
    box = await trial.create()
    family = [box, *await trial.fork(await trial.snapshot(box), 3)]
    seen = [await one.python(_WHO) for one in family]
    shared = []
    for what in ("host name", "machine id", "link address"):
        values = [row[what] for row in seen if row[what]]
        if len(values) != len(set(values)):
            shared.append(f"{what} {values[0]!r}")
    expect(not shared, f"source and forks share: {', '.join(shared)}")
    again = [await one.python(_WHO) for one in family]
    expect(again == seen, f"a name changed while its sandbox lived: {seen} became {again}")


@check(
    29, "a secret given to one command, or lying in the caller, is in no fork", "mitos's list, Promigence, smolvm docs"
)
async def _secrets_stay(trial: Trial) -> None:
    given, own = secrets.token_hex(16), secrets.token_hex(16)
    os.environ["FORK_CHECK_OWN"] = own
    try:
        box = await trial.create()
        said = await box.sh("printenv FORK_CHECK_GIVEN", env={"FORK_CHECK_GIVEN": given})
        expect(said == given, "a command's own variables do not reach it")
        for who, one in (("the source", box), ("a fork", await trial.child_of(box))):
            for what, secret in (("given to a command that is over", given), ("in the caller's variables", own)):
                await _not_in(one, secret, f"a secret {what} is in {who}")
    finally:
        del os.environ["FORK_CHECK_OWN"]


async def _not_in(box: Box, secret: str, evidence: str) -> None:
    # The half alone, and the rest on stdin: the search must not find itself.
    found = await box.sh(_SEARCH.format(half=secret[:16]), f"{secret[16:]}\n".encode())
    if found != "no":
        raise Wrong(f"{evidence}: {found}")
