"""What one process holds of one home: its store, its driver, its worker threads, its live sandboxes."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from worldfork.core import heap
from worldfork.core.clock import SystemClock
from worldfork.core.errors import SandboxError, StoreError, WorldforkError
from worldfork.core.settings import Settings, load_settings
from worldfork.lineage.drivers import Drivers
from worldfork.lineage.durable import Synchroniser
from worldfork.lineage.upkeep import Upkeep
from worldfork.records.sandbox import SandboxFacts
from worldfork.sandbox.cgroups import remove_groups
from worldfork.sandbox.driver import Driver
from worldfork.sandbox.pressure import HostKills
from worldfork.store.faultpoints import fault
from worldfork.store.home import open_home
from worldfork.store.store import Holder, Store, SweepReport

if TYPE_CHECKING:
    from worldfork.lineage.live import Live
    from worldfork.lineage.watch import Watch
    from worldfork.sandbox.microvm.driver import MicrovmDriver

_T = TypeVar("_T")
_log = logging.getLogger("worldfork")
_WORKERS = 4
_SPARE_S = 1.0
"""How long after the last sandbox a start that was begun beforehand is kept."""
_IMAGES_S = 7 * 86_400.0
"""How long what was made for machines stays although nobody asks for it."""

_places: dict[tuple[int, Settings], Place] = {}
_lock = threading.Lock()


class Place:
    """One home, as this process uses it. Made by `place()`; every thread and event loop shares it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = SystemClock()
        self.home = open_home(settings)
        self.store = Store.open(self.home, ttl_s=settings.lease_ttl_s)
        self.drivers = Drivers(settings, self.home)
        self.driver = self.drivers.own
        self.live: dict[str, Live] = {}
        """Sandboxes that this process started, by id; all but the detached ones end with it."""
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="worldfork-work")
        # Removing takes long; it must not keep a fork waiting.
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="worldfork-slow")
        self.upkeep = Upkeep(settings)
        self._synchroniser = Synchroniser(self.store, settings.remote, self.upkeep.want)
        self.host_kills = HostKills()
        self._watch: Watch | None = None
        self._closing = False
        self._collecting = False
        self._slow.submit(self._settle)

    def adopt(self, live: Live) -> None:
        """Keep a sandbox that this process started, and watch the disk it takes."""
        self.live[live.sandbox_id] = live
        self.upkeep.busy()
        if self._watch is None:
            from worldfork.lineage.watch import Watch

            self._watch = Watch(
                str(self.home.run),
                self.settings.reserve_bytes,
                living=lambda: list(self.live.values()),
                rest=lambda: self.drivers.drop_spare(_SPARE_S),
                kills=self.host_kills,
            )
        self._watch.start()

    def disk_on_host(self, facts: SandboxFacts) -> bool:
        """Whether what a sandbox writes lies in a directory of this host; a machine has a disk of its own."""
        return facts.driver == self.driver.name

    def driver_of(self, named: SandboxFacts | str) -> Driver:
        """Return the driver of a sandbox, or that of a name.

        Raises:
            ConfigError: there is none of this name.
        """
        return self.drivers.named(named if isinstance(named, str) else named.driver)

    def machines(self, name: str) -> MicrovmDriver:
        """Return the driver of machines of a name; see `Drivers.machines`."""
        return self.drivers.machines(name)

    async def work(self, call: Callable[[], _T], undo: Callable[[_T], None] | None = None) -> _T:
        """Run a blocking call of the store in a worker thread; a cancelled caller still waits for its end.

        Args:
            undo: takes back what the call did, when its caller was cancelled and will never learn of it.
        """
        future = asyncio.get_running_loop().run_in_executor(self._workers, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.shield(self._take_back(future, undo))
            raise

    def quick(self, call: Callable[[], _T]) -> _T:
        """Run a call of the store that takes well under a millisecond right here, on the event loop.

        Handing it to a worker costs more than the call: twice the time that a sleeping thread takes to wake.
        """
        return call()

    def is_full(self) -> bool:
        """Whether the disk that sandboxes write to has less room left than the host's reserve, or none for files."""
        status = os.statvfs(self.home.run)
        return status.f_bavail * status.f_frsize < self.settings.reserve_bytes or (
            status.f_files > 0 and status.f_favail == 0
        )

    def stock(self) -> None:
        """Begin the next start beforehand, while a sandbox is ending and this process waits for the kernel."""
        if not self._closing:
            with contextlib.suppress(SandboxError, OSError):
                self.driver.stock()
            if self._watch is not None:
                self._watch.start()

    async def _take_back(self, future: asyncio.Future[_T], undo: Callable[[_T], None] | None) -> None:
        with contextlib.suppress(Exception):
            done = await future
            if undo is not None:
                await asyncio.get_running_loop().run_in_executor(self._workers, undo, done)

    @contextlib.asynccontextmanager
    async def single_flight(self, key: str) -> AsyncIterator[None]:
        """Be the only one, of all threads and processes of this home, that builds `key`; wait for others first."""
        flight = self.store.single_flight(key, wait_s=math.inf)
        # Waiting may take as long as somebody's build: never in a worker, whose turn that build may need.
        loop = asyncio.get_running_loop()
        entered: asyncio.Future[None] = loop.create_future()
        left = threading.Event()

        def tell(error: BaseException | None) -> None:
            if entered.cancelled():
                left.set()
            elif error is not None:
                entered.set_exception(error)
            else:
                entered.set_result(None)

        def stay() -> None:
            try:
                with flight:
                    loop.call_soon_threadsafe(tell, None)
                    left.wait()
            except BaseException as error:
                if not left.is_set():
                    loop.call_soon_threadsafe(tell, error)

        thread = threading.Thread(target=stay, name="worldfork-flight", daemon=True)
        thread.start()
        try:
            await entered
            yield
        finally:
            left.set()
            if entered.done() and not entered.cancelled():
                await asyncio.shield(loop.run_in_executor(self._workers, thread.join))

    def make_durable(self, snapshot_id: str, sync_fd: int | None, level: str = "local") -> Future[None]:
        """Begin to bring a snapshot to where its level says; the descriptor is closed afterwards."""
        return self._synchroniser.begin(snapshot_id, level, sync_fd)

    def durability(self, snapshot_id: str) -> Future[None] | None:
        """Return what a snapshot's way to the disk or the remote will end with, if it is on it."""
        return self._synchroniser.under_way(snapshot_id)

    def dispose(self, facts: SandboxFacts) -> bool:
        """Clear away what a dead sandbox leaves: cgroups, directory, leases. Idempotent; blocking.

        Returns:
            False where cgroups would not go: its lease stays, so that the next sweep tries again.
        """
        stuck = remove_groups(facts.cgroups)
        if stuck:
            _log.warning("cgroups of %s could not be removed: %s", facts.sandbox_id, ", ".join(stuck))
        fault("end:groups")
        self._trash_run(facts.sandbox_id)
        if not stuck:
            self.store.release([facts.sandbox_id])
        return not stuck

    def tidy_soon(self) -> None:
        """Remove what lies in the trash, later, in a thread of its own."""
        with contextlib.suppress(RuntimeError):  # the interpreter is going down; the next opener removes it
            self._slow.submit(self._empty_trash)

    def collect_soon(self) -> None:
        """Remove the layers that nothing uses any more, later, in a thread of its own; once for many who ask."""
        if not self._collecting:
            self._collecting = True
            with contextlib.suppress(RuntimeError):  # the interpreter is going down; the next opener does it
                self._slow.submit(self._collect)

    def _collect(self) -> None:
        self._collecting = False
        try:
            self.store.collect()
        except (WorldforkError, OSError) as error:
            _log.warning("what nothing uses any more could not be removed: %s", error)

    def sweep(self) -> SweepReport:
        """Clear away what dead owners and dead sandboxes left. Blocking."""
        report = self.store.sweep(dead=self._dispose_dead)
        self._trash_strays()
        try:
            self.store.empty_trash()
        except StoreError as error:
            # A second try at what the report may have already.
            found = error.fields.get("failures") or [(str(self.home.trash), str(error))]
            report.failures += [failure for failure in found if failure not in report.failures]
        self._drop_images()
        return report

    def close(self) -> None:
        """End what this process owns and finish what it promised. Idempotent; blocking."""
        self._closing = True
        for live in list(self.live.values()):
            live.end_now()
        self.live.clear()
        if self._watch is not None:
            self._watch.stop()
        self.drivers.drop_spare()
        self.upkeep.stop()
        self._workers.shutdown(wait=True)
        self._slow.shutdown(wait=True)
        self._synchroniser.close()
        with contextlib.suppress(WorldforkError, OSError):
            self.upkeep.finish(self.store)
            self.store.empty_trash()
        self.store.close()

    def _dispose_dead(self, holder: Holder) -> None:
        try:
            facts = SandboxFacts.from_json(holder.facts)
        except (ValueError, KeyError, TypeError):
            _log.warning(
                "what is known of %s cannot be read; its directory goes, its cgroups may stay", holder.holder_id
            )
            self._trash_run(holder.holder_id)
            return
        if not self.dispose(facts):
            raise SandboxError(
                f"cgroups of {facts.sandbox_id} could not be removed",
                remedy="end what a debugger or a device holds in them; the next sweep tries again",
                sandbox_id=facts.sandbox_id,
            )

    def _trash_run(self, sandbox_id: str) -> None:
        run = self.home.run / sandbox_id
        if run.exists():
            self.store.trash(run)

    def _trash_strays(self) -> None:
        """Remove directories of sandboxes that nobody knows; a sandbox is known before it has one, until it is gone."""
        found = [path.name for path in self.home.run.iterdir()]
        known = {holder.holder_id for holder in self.store.holders()}
        for name in found:
            if name not in known:
                self._trash_run(name)

    def _drop_images(self) -> None:
        """Remove what was made for machines and nobody has asked for of late; it is made again where it is wanted."""
        if not (self.home.images / "trees").is_dir():
            return  # nor is any of what knows of machines loaded
        from worldfork.sandbox.microvm.unused import drop_unused

        try:
            drop_unused(self.home.images, self.home.run, _IMAGES_S)
        except (WorldforkError, OSError) as error:
            _log.warning("images of machines that nobody uses could not be removed: %s", error)

    def _empty_trash(self) -> None:
        try:
            self.store.empty_trash()
        except (WorldforkError, OSError) as error:
            _log.warning("the trash could not be emptied: %s", error)
        heap.give_back()

    def _settle(self) -> None:
        """After a start: finish what a dead process began, and clear away what it left."""
        for step in (self.sweep, self.store.collect, self._synchroniser.finish_for_others):
            try:
                step()
            except (WorldforkError, OSError) as error:
                _log.warning("settling %s failed: %s", self.home.root, error)


def place(settings: Settings | None = None) -> Place:
    """Return this process's place for the settings in force; opened once, again after a fork.

    Raises:
        StoreError, ConfigError: the home cannot be used; with the remedy.
    """
    wanted = settings or load_settings()
    key = (os.getpid(), wanted)
    with _lock:
        found = _places.get(key)
        if found is None:
            found = _places[key] = Place(wanted)
        return found


def is_open() -> bool:
    """Whether `place()` would find its place open already."""
    return (os.getpid(), load_settings()) in _places


def drop_spares() -> None:
    """Let go of starts that were begun beforehand, now instead of a second later. For tests that count what is left."""
    for (pid, _), one in list(_places.items()):
        if pid == os.getpid():
            one.drivers.drop_spare()


def close_place(one: Place) -> None:
    """Close one place of this process. For programs that work with many homes, one after the other."""
    with _lock:
        for key in [key for key, found in _places.items() if found is one]:
            del _places[key]
    one.close()


def close_places() -> None:
    """Close every place of this process, as at exit. For tests, and programs that change their home."""
    with _lock:
        mine = [key for key in _places if key[0] == os.getpid()]
        closing = [_places.pop(key) for key in mine]
    for one in closing:
        one.close()


def _forked() -> None:
    """A forked child owns nothing of its parent's places, and must not wait for a lock held in it."""
    global _lock
    _lock = threading.Lock()
    for one in _places.values():
        one.drivers.forget_spare()
        one.upkeep.forget()


os.register_at_fork(after_in_child=_forked)
atexit.register(close_places)
