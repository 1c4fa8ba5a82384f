"""Hazards of names and networks after a fork."""

from __future__ import annotations

import os
import time

from worldfork.testing.checks import check, expect
from worldfork.testing.trial import Trial, gather

_RESOLVE = """
import json, os, socket, time
start = time.monotonic()
def ask(name):
    try: return sorted({row[4][0] for row in socket.getaddrinfo(name, 80)})
    except OSError as error: return "error: %s" % error
found = {"localhost": ask("localhost"), "its own name": ask(socket.gethostname()), "nobody": ask("nobody.invalid")}
try: found["servers"] = sum(line.startswith("nameserver") for line in open("/etc/resolv.conf"))
except OSError: found["servers"] = 0
print(json.dumps({**found, "took_s": time.monotonic() - start}))
"""
_MANY = """
import concurrent.futures, json, socket, time
start = time.monotonic()
def ask(number):
    family = [socket.AF_UNSPEC, socket.AF_INET][number % 2]
    try: return bool(socket.getaddrinfo("localhost", 80 + number, family, socket.SOCK_STREAM))
    except OSError as error: return str(error)
with concurrent.futures.ThreadPoolExecutor(50) as pool: rows = list(pool.map(ask, range(50)))
print(json.dumps({"failed": [row for row in rows if row is not True], "took_s": time.monotonic() - start}))
"""
_CARRY = """
import json, socket, threading
server = socket.create_server(("127.0.0.1", 0)); got = []
def serve():
    peer, _ = server.accept()
    while part := peer.recv(65536): got.append(len(part))
thread = threading.Thread(target=serve); thread.start()
with socket.create_connection(server.getsockname(), timeout=10) as client: client.sendall(bytes(1 << 20))
thread.join(10); print(json.dumps(sum(got)))
"""
_CONNECT = """
import json, socket, threading
server = socket.create_server(("127.0.0.1", 0), backlog=64); failed = []
def serve():
    for _ in range(2000):
        peer, _ = server.accept(); peer.recv(1); peer.close()
thread = threading.Thread(target=serve, daemon=True); thread.start()
for number in range(2000):
    try:
        with socket.create_connection(server.getsockname(), timeout=5) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\\1\\0\\0\\0\\0\\0\\0\\0"); client.sendall(b"x")
    except OSError as error: failed.append([number, str(error)]); break
print(json.dumps(failed))
"""


@check(22, "names resolve in a fork, or fail at once", "opencomputer PR39, arcbox PR135, activepieces PR13132")
async def _names_resolve(trial: Trial) -> None:
    box = await trial.create()
    for index, child in enumerate(await trial.fork(await trial.snapshot(box), 3)):
        found = await child.python(_RESOLVE)
        for what in ("localhost", "its own name"):
            expect(isinstance(found[what], list), f"fork {index + 1} cannot resolve {what}: {found[what]}")
        expect(not isinstance(found["nobody"], list), f"a name that nobody has resolves to {found['nobody']}")
        expect(found["took_s"] < 15, f"three names took {found['took_s']:.0f} s in fork {index + 1}")
        if trial.adapter.abilities.network:
            expect(found["servers"] > 0, f"fork {index + 1} has a network and no name server in /etc/resolv.conf")


@check(23, "fifty names at once resolve in each fork", "CubeSandbox#1406, sbx-releases#309")
async def _names_at_once(trial: Trial) -> None:
    box = await trial.create()
    children = await trial.fork(await trial.snapshot(box), 3)
    for index, found in enumerate(await gather(*(child.python(_MANY) for child in children))):
        failed = found["failed"]
        expect(not failed, f"{len(failed)} of 50 parallel look-ups failed in fork {index + 1}: {failed[:2]}")
        expect(found["took_s"] < 10, f"50 parallel look-ups took {found['took_s']:.0f} s in fork {index + 1}")


@check(25, "the network works after many sandboxes came and went, and none leaves a link", "matchlock#72", limit_s=120)
async def _after_many(trial: Trial) -> None:
    before = _links()
    snapshot = await trial.snapshot(await trial.create())
    for _ in range(30):
        await trial.end(await trial.one(snapshot))
    child = await trial.one(snapshot)
    start_s = time.monotonic()
    carried = await child.python(_CARRY)
    took_s = time.monotonic() - start_s
    expect(carried == 1 << 20, f"of 1 MiB over loopback {carried} bytes arrived")
    expect(took_s < 20, f"1 MiB over loopback took {took_s:.0f} s")
    await trial.end(child)
    grown = _links() - before
    # Others on this machine may make some meanwhile; thirty sandboxes that leave theirs are not to be missed.
    expect(len(grown) < 10, f"{len(grown)} network links stayed on the host after 31 sandboxes: {sorted(grown)[:3]}")


def _links() -> set[str]:
    return set(os.listdir("/sys/class/net")) if os.path.isdir("/sys/class/net") else set()


@check(26, "two thousand connections can be opened and closed in a fork", "microsandbox changelog", limit_s=180)
async def _many_connections(trial: Trial) -> None:
    child = await trial.child_of(await trial.create())
    failed = await child.python(_CONNECT)
    expect(not failed, f"connection {failed[0][0] + 1 if failed else 0} of 2000 failed: {failed}")
