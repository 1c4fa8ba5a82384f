"""The program that fetches a source distribution inside the sandbox where a world is built.

Its text is sent to the sandbox's Python through stdin; the library never runs it in its own process. pip itself asks
the registry, so that everything that pip is told there counts: indexes, directories of files, certificates, proxies.
Nothing of the package is run: no `setup.py`, no build.

Arguments: the package, its version, the SHA-256 of its file or "", the directory to unpack into. It prints the file's
name, its SHA-256 and the number of entries as one line of JSON. It runs on Python 3.8 too.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
from typing import Any, Iterator, NoReturn  # noqa: UP035 - Python 3.8 cannot subscribe the other one

ENDINGS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
MAX_ENTRIES = 200_000
MAX_BYTES = 4 << 30
"""What an archive may unpack to."""


def refuse(words: str) -> NoReturn:
    """End with a message."""
    sys.stderr.write(words + "\n")
    raise SystemExit(3)


def download(package: str, version: str, sha256: str, directory: str) -> tuple[str, str]:
    """Save the source distribution; return its path and its SHA-256."""
    command = importlib.import_module("pip._internal.commands").create_command("download")
    parse = importlib.import_module("pip._vendor.packaging.version").parse
    words = ["--quiet", "--no-binary=:all:", "--ignore-requires-python", "--no-cache-dir", package]
    options, _ = command.parse_args(words)
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        found = finder.find_all_candidates(package)
        fitting = [each.link for each in found if each.version == parse(version)]
        links = sorted(
            (each for each in fitting if each.filename.endswith(ENDINGS)),
            key=lambda link: next(rank for rank, end in enumerate(ENDINGS) if link.filename.endswith(end)),
        )
        if not links:
            others = ", ".join(sorted({str(each.version) for each in found})[-8:]) or "none at all"
            refuse(f"there is no source distribution of {package} {version}; there are: {others}")
        link = links[0]
        path = os.path.join(directory, os.path.basename(link.filename))
        save(session, link, path)
    return path, checked(path, sha256, link)


def save(session: Any, link: Any, path: str) -> None:
    """Download to a file."""
    answer = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
    answer.raise_for_status()
    size = 0
    with open(path, "wb") as file:
        for chunk in answer.iter_content(1 << 16):
            size += len(chunk)
            if size > MAX_BYTES:
                refuse(f"{link.filename} is larger than {MAX_BYTES} bytes")
            file.write(chunk)


def checked(path: str, sha256: str, link: Any) -> str:
    """Return the SHA-256 of a file, if it is what the caller and the registry say it is."""
    digests = {"sha256": hashlib.sha256()}
    told = {"sha256": sha256}
    name = str(getattr(link, "hash_name", None))
    if name in hashlib.algorithms_guaranteed and not name.startswith("shake"):
        digests.setdefault(name, hashlib.new(name))
        told["registry's " + name] = link.hash or ""
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            for digest in digests.values():
                digest.update(chunk)
    for what, expected in told.items():
        actual = digests[what.split()[-1]].hexdigest()
        if expected and actual != expected.lower():
            refuse(f"{os.path.basename(path)} has the {what} {actual}, not {expected}")
    return digests["sha256"].hexdigest()


def parts_of(name: str) -> list[str]:
    """Return the names of a member's path below the archive's one directory; refuse a path that leaves it."""
    parts = [each for each in name.split("/") if each not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        refuse(f"the archive holds {name!r}, which leaves its directory")
    return parts[1:]


def unpack(path: str, target: str) -> int:
    """Unpack regular files and directories, without the one directory that holds them; return how many."""
    count, left = 0, MAX_BYTES
    for name, mode, size, source in members(path):
        parts = parts_of(name)
        if not parts:
            continue
        count, left = count + 1, left - size
        if count > MAX_ENTRIES or left < 0:
            refuse(f"the archive holds more than {MAX_ENTRIES} entries or {MAX_BYTES} bytes")
        place = os.path.join(target, *parts)
        if source is None:
            os.makedirs(place, exist_ok=True)
            continue
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        os.chmod(place, 0o755 if mode & 0o100 else 0o644)
    return count


def members(path: str) -> Iterator[tuple[str, int, int, Any]]:
    """Yield (path, mode, size, a file to read, or None for a directory); links are followed within the archive."""
    if path.endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                opened = None if entry.is_dir() else archive.open(entry)
                yield entry.filename, entry.external_attr >> 16, entry.file_size, opened
        return
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isdir():
                yield member.name, member.mode, 0, None
            elif member.isreg():
                yield member.name, member.mode, member.size, tar.extractfile(member)
            elif member.issym() or member.islnk():
                try:
                    source = tar.extractfile(member)
                except KeyError:
                    continue  # it leads out of the archive
                if source is not None:
                    yield member.name, 0o644, source.seek(0, 2), _from_start(source)


def _from_start(source: Any) -> Any:
    source.seek(0)
    return source


def main() -> None:
    """Fetch and unpack."""
    package, version, sha256, target = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        path, digest = download(package, version, sha256, directory)
        count = unpack(path, target)
        if not count:
            refuse(f"{os.path.basename(path)} is empty")
        sys.stdout.write(json.dumps({"file": os.path.basename(path), "sha256": digest, "entries": count}) + "\n")


if __name__ == "__main__":
    main()
