"""What drivers cannot all do, and which tests are about just that. The table of docs/behaviour.md is written from here.

A driver says in its capabilities what it can do on this host. What is not named here holds for every driver.
"""

from __future__ import annotations

from dataclasses import dataclass

from worldfork.sandbox.driver import Capabilities


@dataclass(frozen=True)
class Difference:
    """Something that not every driver can do."""

    capability: str
    """A field of `Capabilities`."""
    means: str
    """What a driver with it can do."""
    otherwise: str
    """What happens on one without."""
    tests: tuple[str, ...] = ()
    """Names of tests that need it as a whole; others ask in their own text, by `needs` or `capabilities`."""


DIFFERENCES = (
    Difference(
        "host_base",
        "a fresh sandbox may start from `host`, this machine's userland",
        "`DriverUnavailable` with the remedy: a root file system, `dir:PATH`",
        (
            "test_the_host_base_shows_the_userland_and_no_secret",
            "test_a_changed_base_is_refused_unless_allowed",
        ),
    ),
    Difference(
        "host_network",
        "the network `host` is the host's own: its interfaces, addresses and services; a fresh sandbox has it",
        "`host` is a network of the machine's own, translated by QEMU; a fresh sandbox has none",
        (
            "test_network_host_is_the_host_s",
            "test_a_fresh_sandbox_is_on_the_network_unless_told_otherwise",
            "test_network_host_is_the_hosts_as_the_documents_say",
        ),
    ),
)

TESTS = {name: each.capability for each in DIFFERENCES for name in each.tests}


def lacks(test: str, capabilities: Capabilities) -> str:
    """Return the capability that a test needs and a driver lacks; empty if there is none."""
    capability = TESTS.get(test, "")
    return "" if not capability or getattr(capabilities, capability, capabilities.disk_on_host) else capability
