"""What a sandbox on the host's network takes from the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from worldfork.sandbox.network import CERTIFICATE_SETTINGS, HOST_SETTINGS, host_network


def test_only_listed_variables_are_taken() -> None:
    network = host_network({"HTTPS_PROXY": "http://proxy:3128", "AWS_SECRET_ACCESS_KEY": "x", "HOME": "/none"})
    assert network.env["HTTPS_PROXY"] == "http://proxy:3128"
    assert "AWS_SECRET_ACCESS_KEY" not in network.env


def test_the_list_can_be_replaced() -> None:
    assert host_network({"HTTPS_PROXY": "http://proxy:3128", "HOME": "/none"}, ("NO_PROXY",)).env == {}


def test_a_certificate_elsewhere_is_bound_and_renamed(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("certificate")
    environ = {"REQUESTS_CA_BUNDLE": str(bundle), "PIP_CERT": str(bundle), "HOME": "/none"}
    network = host_network(environ, CERTIFICATE_SETTINGS)
    inside = network.env["REQUESTS_CA_BUNDLE"]
    assert inside.startswith("/dev/.worldfork/")
    assert network.env["PIP_CERT"] == inside
    assert network.binds == [(str(bundle), inside)]


def test_a_certificate_of_the_system_keeps_its_path() -> None:
    environ = {"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt", "HOME": "/none"}
    network = host_network(environ, CERTIFICATE_SETTINGS)
    expected = {"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt"}
    known = {key: value for key, value in network.env.items() if key == "SSL_CERT_FILE"}
    assert known == (expected if Path(expected["SSL_CERT_FILE"]).exists() else {})
    assert network.binds == []


def test_what_is_missing_on_the_host_is_left_out(tmp_path: Path) -> None:
    network = host_network({"PIP_FIND_LINKS": f"{tmp_path}/gone", "HOME": "/none"}, ("PIP_FIND_LINKS",))
    assert network.env == {}


def test_a_local_index_comes_with_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "simple").mkdir()
    network = host_network(
        {"PIP_EXTRA_INDEX_URL": f"file://{tmp_path}/simple/ https://index.example/simple", "HOME": "/none"},
        ("PIP_EXTRA_INDEX_URL",),
    )
    ((source, inside),) = network.binds
    assert source == str(tmp_path)
    assert network.env["PIP_EXTRA_INDEX_URL"] == f"file://{inside}/simple https://index.example/simple"


@pytest.mark.parametrize("section", ["global", "install"])
def test_pips_own_files_count_as_its_variables(tmp_path: Path, section: str) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(f"[{section}]\ntimeout = 7\nindex-url = https://index.example/simple\n")
    network = host_network({"PIP_CONFIG_FILE": str(file), "HOME": "/none"}, HOST_SETTINGS)
    assert network.env["PIP_DEFAULT_TIMEOUT"] == "7"
    assert network.env["PIP_INDEX_URL"] == "https://index.example/simple"
    assert (
        host_network({"PIP_CONFIG_FILE": str(file), "PIP_DEFAULT_TIMEOUT": "9", "HOME": "/none"}).env[
            "PIP_DEFAULT_TIMEOUT"
        ]
        == "9"
    )
