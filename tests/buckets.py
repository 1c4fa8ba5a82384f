"""A server on loopback that speaks S3."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "worlds"
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@contextmanager
def s3_server(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start one, with an empty bucket; the AWS_* variables name it for the length of the block. Gives its address."""
    pytest.importorskip("moto.server", reason="needs moto")
    pytest.importorskip("obstore", reason="needs obstore")
    # Of its own, since it leaves files open.
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        assert server.stdout is not None
        address = f"http://127.0.0.1:{int(server.stdout.readline())}"
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
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10).close()
        yield address
        server.communicate(timeout=20)
