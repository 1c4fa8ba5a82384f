"""A server on loopback that speaks S3."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "worlds"


@contextmanager
def s3_server(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start one, with an empty bucket; the AWS_* variables name it for the length of the block. Gives its address."""
    server_module = pytest.importorskip("moto.server", reason="needs moto")
    pytest.importorskip("obstore", reason="needs obstore")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        address = f"http://{host}:{port}"
        for name, value in (
            ("AWS_ENDPOINT_URL", address),
            ("AWS_ACCESS_KEY_ID", "nobody"),
            ("AWS_SECRET_ACCESS_KEY", "nothing"),
            ("AWS_REGION", "us-east-1"),
            ("NO_PROXY", "127.0.0.1"),
            ("no_proxy", "127.0.0.1"),
        ):
            patch.setenv(name, value)
        patch.delenv("AWS_SESSION_TOKEN", raising=False)
        request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(request, timeout=10).close()
        yield address
    finally:
        server.stop()
