"""Upkeep of the store, begun when this process has come to rest: a process of its own seals, shares and squashes.

Walking and hashing thousands of files in Python would make every fork of this process wait for its turn. The other
process is nice, ends with this one, and may be killed at any instant.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from worldfork.core.settings import Settings
from worldfork.store.store import Store

_log = logging.getLogger("worldfork")
# What the directory or the environment of a program offers as modules is not for us to run.
_RUN = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
_REST_S = 2.0
"""How long nothing was stored or begun before upkeep starts."""
_LAST_S = 2.0
"""How long the end of a process may be held up before another layer is begun."""
_AT_LATEST_S = 60.0
"""After which it starts although this process never rests."""


class Upkeep:
    """When this process starts upkeep of its home, and how it ends it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted_since_s: float | None = None
        self._busy_at_s = 0.0
        self._over = False

    def busy(self) -> None:
        """Say that this process is doing something that upkeep should not compete with."""
        self._busy_at_s = time.monotonic()

    def want(self) -> None:
        """Say that there is something to do. Cheap."""
        if self._settings.upkeep == "off":
            return
        self.busy()
        with self._mutex:
            if self._over:
                return
            if self._wanted_since_s is None:
                self._wanted_since_s = time.monotonic()
                self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="worldfork-upkeep", daemon=True)
                with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        with self._mutex:
            while not self._over:
                wait_s = self._wait_s()
                if wait_s is None:
                    self._changed.wait()
                elif wait_s > 0:
                    self._changed.wait(wait_s)
                else:
                    self._wanted_since_s = None
                    self._work()

    def _wait_s(self) -> float | None:
        """Return how long to wait before the next start; None while there is nothing to do."""
        if self._wanted_since_s is None:
            return None
        now = time.monotonic()
        return min(self._busy_at_s + _REST_S, self._wanted_since_s + _AT_LATEST_S) - now

    def _work(self) -> None:
        # With the ids of all layers, if this user has a range.
        ranges = self._settings.id_range == "auto" and os.geteuid() != 0
        modules = ["worldfork.core.mapped"] * ranges + ["worldfork.keeping.upkeep"]
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _RUN, json.dumps(sys.path), *modules],
                env={**os.environ, **variables(self._settings)},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            _log.warning("no upkeep of the store: %s", error)
            return  # it is left to a later time
        self._process = process
        self._mutex.release()
        try:
            words = process.stderr.read() if process.stderr is not None else b""
            code = process.wait()
        finally:
            self._mutex.acquire()
            self._process = None
            for stream in (process.stdin, process.stderr):
                if stream is not None:
                    stream.close()
        if code == os.EX_TEMPFAIL:
            self._wanted_since_s = time.monotonic() + _AT_LATEST_S
            self._busy_at_s = self._wanted_since_s
        elif code and not self._over:
            last = words.decode(errors="replace").strip().rpartition("\n")[2]
            _log.warning("upkeep of the store ended with %d: %s", code, last)

    def forget(self) -> None:
        """In a forked child: let go of the other end of what the parent has started."""
        process = self._process
        for stream in (process.stdin, process.stderr) if process is not None else ():
            if stream is not None:
                stream.close()

    def finish(self, store: Store) -> None:
        """At the end of this process: seal what it has stored, so that damage can be told from then on. Blocking.

        A program that ends at once never comes to rest. What takes long is left to others.

        Raises:
            StoreError: the metadata failed.
        """
        if self._wanted_since_s is None or self._settings.upkeep == "off":
            return
        from worldfork.keeping.sealing import seal_all

        until_s = time.monotonic() + _LAST_S
        seal_all(store, stop=lambda: time.monotonic() > until_s)

    def stop(self) -> None:
        """End upkeep that is under way and begin no other. Idempotent."""
        with self._mutex:
            self._over = True
            if self._process is not None:
                self._process.kill()
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def variables(settings: Settings) -> Mapping[str, str]:
    """Return the settings as another process of the same home reads them."""
    return {
        "WORLDFORK_HOME": str(settings.home),
        "WORLDFORK_SCRATCH": str(settings.scratch or ""),
        "WORLDFORK_FORM": settings.form,
        "WORLDFORK_OVERLAY": settings.overlay,
        "WORLDFORK_CGROUPS": settings.cgroups,
        "WORLDFORK_RESERVE_BYTES": str(settings.reserve_bytes),
        "WORLDFORK_QUOTA_BYTES": str(settings.quota_bytes),
        "WORLDFORK_LEASE_TTL_S": str(settings.lease_ttl_s),
        "WORLDFORK_REMOTE": settings.remote,
        "WORLDFORK_ID_RANGE": settings.id_range,
    }
