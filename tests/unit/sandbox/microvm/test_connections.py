"""Which sockets of a sandbox have an end elsewhere, by the kernel's own tables."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from worldfork.core.errors import SandboxError
from worldfork.sandbox.microvm.connections import OutsideConnection, outside_connections

TCP = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
TCP6 = "  sl  local_address                         remote_address                        st tx_queue rx_queue\n"
UDP = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid inode ref pointer drops\n"


def row(local: str, remote: str, state: str) -> str:
    return f"   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0\n"


def found(*lines: str) -> tuple[OutsideConnection, ...]:
    return outside_connections("".join(lines).encode())


def test_one_that_is_established_leaves() -> None:
    assert found(TCP, row("0F02000A:9C40", "0202000A:0050", "01")) == (
        OutsideConnection("tcp", "10.0.2.15:40000", "10.0.2.2:80", "established"),
    )


@pytest.mark.parametrize(
    ("local", "remote", "state"),
    [
        ("0100007F:1F90", "00000000:0000", "0A"),
        ("00000000:1F90", "00000000:0000", "0A"),
        ("0100007F:1F90", "0100007F:9C40", "01"),
        ("0100007F:1F90", "0500007F:9C40", "01"),
        ("0F02000A:1F90", "0F02000A:9C40", "01"),
        ("0F02000A:1F90", "0202000A:9C40", "06"),
        ("0F02000A:1F90", "00000000:0000", "07"),
        ("00000000000000000000000001000000:1F90", "00000000000000000000000001000000:9C40", "01"),
        ("0000000000000000FFFF00000100007F:1F90", "0000000000000000FFFF00000100007F:9C40", "01"),
        ("00000000000000000000000000000000:1F90", "00000000000000000000000000000000:0000", "0A"),
    ],
)
def test_what_stays_inside(local: str, remote: str, state: str) -> None:
    assert found(TCP6 if len(local) > 20 else TCP, row(local, remote, state)) == ()


@pytest.mark.parametrize(
    ("state", "name"), [("02", "syn-sent"), ("04", "fin-wait-1"), ("05", "fin-wait-2"), ("08", "close-wait")]
)
def test_one_that_begins_or_ends_has_another_end_too(state: str, name: str) -> None:
    assert [each.state for each in found(TCP, row("0F02000A:9C40", "0202000A:0050", state))] == [name]


def test_all_four_tables_are_told_apart() -> None:
    connections = found(
        TCP,
        row("0F02000A:0001", "0202000A:0002", "01"),
        TCP6,
        row("000000FD000000000000000001000000:0003", "000000FD000000000000000002000000:0004", "01"),
        UDP,
        row("0F02000A:0005", "0302000A:0035", "01"),
        row("00000000:0044", "00000000:0000", "07"),
    )
    assert connections == (
        OutsideConnection("tcp", "10.0.2.15:1", "10.0.2.2:2", "established"),
        OutsideConnection("tcp", "[fd00::1]:3", "[fd00::2]:4", "established"),
        OutsideConnection("udp", "10.0.2.15:5", "10.0.2.3:53", "established"),
    )


def test_an_address_of_the_older_kind_is_shown_as_one() -> None:
    mapped = "0000000000000000FFFF00000202000A"
    assert found(TCP6, row("0000000000000000FFFF00000F02000A:0001", f"{mapped}:0050", "01"))[0].remote == "10.0.2.2:80"


@pytest.mark.parametrize("text", ["nonsense", row("0F02000A:1", "0:1", "01"), TCP + "0: x", TCP + row("0", "0", "zz")])
def test_what_is_no_table_is_an_error(text: str) -> None:
    with pytest.raises(SandboxError, match="does not tell"):
        found(text)


def test_nothing_is_nothing() -> None:
    assert found() == found(TCP, UDP) == ()


def test_the_tables_of_a_real_kernel_can_be_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), socket.socket(type=socket.SOCK_DGRAM) as datagrams:
            datagrams.connect_ex(("192.0.2.1", 9))
            names = [Path("/proc/net", name) for name in ("tcp", "tcp6", "udp", "udp6")]
            tables = b"".join(path.read_bytes() for path in names if path.exists())
            connections = outside_connections(tables)
    assert not [each for each in connections if each.local.endswith(f":{port}")]
    assert bool([each for each in connections if each.remote == "192.0.2.1:9"]) == _has_route()


def _has_route() -> bool:
    with socket.socket(type=socket.SOCK_DGRAM) as trial:
        return not trial.connect_ex(("192.0.2.1", 9))
