"""The drivers of one home, by name; the one of machines is made when it is first asked for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from worldfork.core.errors import ConfigError
from worldfork.core.settings import Settings
from worldfork.sandbox.driver import Driver
from worldfork.sandbox.namespace import NamespaceDriver
from worldfork.sandbox.probe import proved_ids
from worldfork.store.home import Home

if TYPE_CHECKING:
    from worldfork.sandbox.microvm.driver import MicrovmDriver

MACHINES = "microvm"


class Drivers:
    """What starts sandboxes of one home, in this process."""

    def __init__(self, settings: Settings, home: Home) -> None:
        self.own = NamespaceDriver(settings)
        """The one whose sandboxes write to directories of this host; the store's form and ids are its own."""
        self.own.ids = proved_ids(settings, self.own.form, home.scratch / "id-range", home.tmp)
        self._settings = settings
        self._home = home
        self._machines: MicrovmDriver | None = None
        self._making = threading.Lock()

    def named(self, name: str) -> Driver:
        """Return the driver of a name.

        Raises:
            ConfigError: there is none of this name.
        """
        return self.own if name == self.own.name else self.machines(name)

    def machines(self, name: str = MACHINES) -> MicrovmDriver:
        """Return the driver whose sandboxes are virtual machines.

        Raises:
            ConfigError: `name` is another's.
        """
        if name != MACHINES:
            raise ConfigError(
                f"there is no driver {name!r}", remedy=f"use {self.own.name!r} or {MACHINES!r}", name=name
            )
        with self._making:
            if self._machines is None:
                from worldfork.sandbox.microvm.driver import MicrovmDriver

                made = MicrovmDriver(self._settings, self._home.images)
                # What a machine leaves is written as this user's sandboxes without one would write it.
                made.ids = self.own.ids
                self._machines = made
            return self._machines

    def drop_spare(self, unused_s: float = 0.0) -> bool:
        """Let go of what is kept for the next sandbox, unused for so long; return whether some remains. Blocking."""
        remains = self.own.drop_spare(unused_s)
        return (self._machines is not None and self._machines.drop_spare(unused_s)) or remains

    def forget_spare(self) -> None:
        """In a forked child: let go of the parent's."""
        self._making = threading.Lock()
        self.own.forget_spare()
        if self._machines is not None:
            self._machines.forget_spare()
