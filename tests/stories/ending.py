"""A process that ends with sandboxes alive and a snapshot that is not yet durable.

Arguments: a base, and how it ends. Prints the snapshot's id before. The home comes from the process environment.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

from worldfork import AsyncSandbox, Sandbox


def main() -> None:
    base, way = sys.argv[1:]
    sandboxes = [Sandbox.create(base=base, network="none") for _ in range(3)]
    sandboxes[0].write_file("/f", b"first" + os.urandom(4 << 20))
    sandboxes[1].start_process("sleep", ["1000"])
    print(sandboxes[0].checkpoint().snapshot_id, flush=True)
    if way == "error":
        raise RuntimeError("not caught by anybody")
    if way == "exit":
        sys.exit(0)
    if way == "immediately":
        os._exit(0)
    if way == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    if way == "interrupt":
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        sandboxes[2].run("sleep", ["1000"])
    if way == "loop":
        asyncio.run(leave_the_loop(base))
    if way == "commands":
        threading.Thread(target=sandboxes[2].run, args=("sleep", ["1000"]), daemon=True).start()


async def leave_the_loop(base: str) -> None:
    """End an event loop under a sandbox that was made in it, and under a command."""
    sandbox = await AsyncSandbox.create(base=base, network="none")
    running = asyncio.create_task(sandbox.run("sleep", ["1000"]))
    await asyncio.sleep(0.05)
    assert not running.done()


if __name__ == "__main__":
    main()
