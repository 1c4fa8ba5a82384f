"""The hazard of connections that were open at the fork."""

from __future__ import annotations

import asyncio

from worldfork.testing.checks import Wrong, check, expect
from worldfork.testing.trial import DIRECTORY, Trial

_TALKERS = f"""
import os, socket, threading, time
os.chdir({DIRECTORY!r})
server = socket.create_server(("127.0.0.1", 0))
def serve():
    while True:
        peer, _ = server.accept()
        def echo(peer=peer):
            try:
                while part := peer.recv(64): peer.sendall(part)
            except OSError: pass
        threading.Thread(target=echo, daemon=True).start()
threading.Thread(target=serve, daemon=True).start()
client = socket.create_connection(server.getsockname(), timeout=5)
open("port.new", "w").write(str(server.getsockname()[1])); os.rename("port.new", "port")
count = 0
while True:
    count += 1
    try: client.sendall(b"%63d\\n" % count); said = client.recv(64, socket.MSG_WAITALL); text = str(int(said))
    except (OSError, ValueError) as error: text = "broken: %s" % error
    open("count.new", "w").write(text); os.rename("count.new", "count")
    time.sleep(0.02)
"""
_KNOCK = """
import json, socket, sys, time
start = time.monotonic()
try:
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10) as one:
        one.sendall(b"x" * 64); text = "served" if one.recv(64) else "closed"
except TimeoutError: text = "hung"
except OSError as error: text = "refused"
print(json.dumps([text, time.monotonic() - start]))
"""


@check(
    27, "the source's connections are unhurt by a fork, and a fork's end with an error instead of a hang",
    "E2B docs, Modal docs", needs=("processes",),
)  # fmt: skip
async def _open_connections(trial: Trial) -> None:
    box = await trial.create()
    await box.python("print(1)")
    await box.write("talkers.py", _TALKERS)
    await box.background("exec python3 talkers.py", "count")
    port = await box.read("port")
    for turn in range(3):
        child = await trial.child_of(box)
        before = await box.read("count")
        await asyncio.sleep(0.3)
        after = await box.read("count")
        broken = not (before.isdigit() and after.isdigit())
        expect(
            not broken and int(after) > int(before),
            f"after fork {turn + 1} the source's talk went from {before!r} to {after!r}",
        )
        told, took_s = await child.python(_KNOCK, port)
        expected = ("served", "closed", "refused") if trial.memory else ("refused",)
        if told not in expected:
            raise Wrong(f"whoever connects in fork {turn + 1} is {told}, after {took_s:.1f} s")
        await trial.end(child)
