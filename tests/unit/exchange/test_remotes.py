"""Remotes: a name has its whole content or none, whoever is first, and whatever happens to the others."""

from __future__ import annotations

import builtins
import fcntl
import os
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.buckets import BUCKET, s3_server
from tests.stores import in_child

from worldfork.content.blocks import Sink
from worldfork.core.errors import ConfigError, NotFound, OutOfSpace, StoreError
from worldfork.exchange.remotes import Remote, open_remote
from worldfork.store import faultpoints

LARGE = 20 << 20


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as address:
        yield address


@pytest.fixture(params=["directory", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    if request.param == "directory":
        return open_remote(str(tmp_path / "remote"), make=True)
    request.getfixturevalue("s3")
    return open_remote(f"s3://{BUCKET}/{tmp_path.name}")


def give(content: bytes) -> Callable[[Sink], object]:
    def fill(sink: Sink) -> None:
        for begin in range(0, len(content), 1 << 20):
            sink.write(content[begin : begin + (1 << 20)])

    return fill


def content_of(remote: Remote, name: str, step: int = 1 << 20) -> bytes:
    parts = []
    with remote.reading(name) as source:
        while part := source.read(step):
            assert len(part) <= step
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("size", [0, 1, 3 << 20, LARGE + 1])
def test_what_is_written_is_read(remote: Remote, size: int) -> None:
    content = os.urandom(size)
    assert not remote.has("layers/a")
    assert remote.create("layers/a", give(content))
    assert remote.has("layers/a")
    assert content_of(remote, "layers/a") == content


@pytest.mark.parametrize("size", [10, LARGE])
def test_whoever_is_second_changes_nothing(remote: Remote, size: int) -> None:
    first = b"1" * size
    assert remote.create("layers/a", give(first))
    assert not remote.create("layers/a", give(b"2" * size))
    assert content_of(remote, "layers/a") == first


def test_many_at_once(remote: Remote) -> None:
    contents = [bytes([number]) * (1 << 20) for number in range(6)]
    barrier = threading.Barrier(len(contents))
    firsts: list[bytes] = []

    def one(content: bytes) -> None:
        barrier.wait()
        if remote.create("layers/a", give(content)):
            firsts.append(content)

    threads = [threading.Thread(target=one, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(firsts) == 1
    assert content_of(remote, "layers/a") == firsts[0]


@pytest.mark.parametrize("size", [10, LARGE])
def test_what_fails_half_way_was_never_there(remote: Remote, size: int) -> None:
    def fill(sink: Sink) -> None:
        give(b"x" * size)(sink)
        raise KeyError("half-way")

    with pytest.raises(KeyError):
        remote.create("layers/a", fill)
    assert not remote.has("layers/a")
    assert remote.create("layers/a", give(b"whole"))


def test_what_is_not_there(remote: Remote) -> None:
    with pytest.raises(NotFound) as caught, remote.reading("layers/none"):
        pass
    assert caught.value.fields["remote"] == remote.where


def test_left_before_the_end(remote: Remote) -> None:
    remote.create("layers/a", give(os.urandom(LARGE)))
    with remote.reading("layers/a") as source:
        assert len(source.read(10)) == 10


class TestDirectory:
    def test_a_stop_at_any_step_leaves_a_whole_file_or_none(self, tmp_path: Path) -> None:
        for step in ("push:written", "push:synced", "push:named", "push:lasting"):
            place = tmp_path / step

            def die(step: str = step, place: Path = place) -> None:
                faultpoints.install(lambda name: os._exit(42) if name == step else None)
                open_remote(str(place), make=True).create("layers/a", give(b"whole"))

            assert in_child(die) == 42
            remote = open_remote(str(place), make=True)
            assert os.listdir(place / "drafts") == []
            assert remote.has("layers/a") == (step in ("push:named", "push:lasting"))
            remote.create("layers/a", give(b"whole"))
            assert content_of(remote, "layers/a") == b"whole"

    def test_the_draft_of_somebody_alive_stays(self, tmp_path: Path) -> None:
        (tmp_path / "drafts").mkdir()
        with open(tmp_path / "drafts" / "theirs", "wb") as theirs:
            fcntl.flock(theirs, fcntl.LOCK_EX)
            (tmp_path / "drafts" / "dead").write_bytes(b"")
            open_remote(str(tmp_path), make=True)
            assert os.listdir(tmp_path / "drafts") == ["theirs"]

    def test_data_reach_the_disk_before_the_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        real_sync, real_link = os.fsync, os.link

        def sync(fd: int) -> None:
            calls.append("sync " + ("directory" if os.path.isdir(f"/proc/self/fd/{fd}") else "file"))
            real_sync(fd)

        def link(*args: object) -> None:
            calls.append("name")
            real_link(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "link", link)
        open_remote(str(tmp_path)).create("layers/a", give(b"x"))
        assert calls == ["sync file", "name", "sync directory"]

    def test_a_file_system_without_hard_links(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise PermissionError(1, "no")

        monkeypatch.setattr(os, "link", refuse)
        remote = open_remote(str(tmp_path))
        assert remote.create("layers/a", give(b"1"))
        assert not remote.create("layers/a", give(b"2"))
        assert content_of(remote, "layers/a") == b"1"

    def test_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        remote = open_remote(str(tmp_path))
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OutOfSpace):
            remote.create("layers/a", give(b"1"))
        assert not remote.has("layers/a")
        assert os.listdir(tmp_path / "drafts") == []

    @pytest.mark.timeout(20)
    def test_what_is_no_file_keeps_nobody_waiting(self, tmp_path: Path) -> None:
        remote = open_remote(str(tmp_path))
        for directory in ("drafts", "layers"):
            (tmp_path / directory).mkdir()
            os.mkfifo(tmp_path / directory / "pipe")
            (tmp_path / directory / "link").symlink_to("/etc/passwd")
        for name in ("pipe", "link"):
            with pytest.raises(StoreError), remote.reading(f"layers/{name}"):
                pass
        open_remote(str(tmp_path), make=True)

    def test_no_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError):
            open_remote(str(tmp_path / "none"))
        with pytest.raises(ConfigError):
            open_remote("ftp://somewhere")


class TestS3:
    @pytest.mark.parametrize("url", ["s3://", "s3://UPPER/x", "s3:///x", "s3://a"])
    def test_what_is_no_address(self, url: str) -> None:
        with pytest.raises(ConfigError):
            open_remote(url)

    def test_no_bucket(self, s3: str) -> None:
        remote = open_remote("s3://no-such-bucket/x")
        with pytest.raises(ConfigError):
            remote.create("layers/a", give(b"x"))

    def test_nobody_answers(self, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(StoreError) as caught:
            open_remote(f"s3://{BUCKET}/x").has("layers/a")
        assert "\n" not in caught.value.message

    def test_a_forked_child_raises_and_never_hangs(self, s3: str) -> None:
        open_remote(f"s3://{BUCKET}/x").has("layers/a")

        def use() -> None:
            with pytest.raises(StoreError) as caught:
                open_remote(f"s3://{BUCKET}/x").has("layers/a")
            assert "fork" in caught.value.message

        assert in_child(use) == 0

    def test_no_secret_is_told(self, s3: str) -> None:
        assert "nothing" not in open_remote(f"s3://{BUCKET}/x/").where

    def test_the_package_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def without(name: str, *args: object, **more: object) -> object:
            if name.startswith("obstore"):
                raise ImportError(name)
            return real(name, *args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(ConfigError) as caught:
            open_remote(f"s3://{BUCKET}/x")
        assert "pip install" in caught.value.remedy

    def test_an_object_that_is_exchanged_while_it_is_read(self, s3: str, tmp_path: Path) -> None:
        remote = open_remote(f"s3://{BUCKET}/{tmp_path.name}")
        remote.create("layers/a", give(os.urandom(LARGE * 2)))
        with remote.reading("layers/a") as source:
            source.read(1)
            request = urllib.request.Request(
                f"{s3}/{BUCKET}/{tmp_path.name}/layers/a", data=b"x" * LARGE * 2, method="PUT"
            )
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20).close()
            with pytest.raises(StoreError):
                list(iter(lambda: source.read(1 << 20), b""))
