"""Real virtual machines for tests: a kernel of the distribution with a small init that answers lines."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from worldfork.core.errors import DriverUnavailable
from worldfork.sandbox.microvm import guest_image
from worldfork.sandbox.microvm.machine import Accel, Boot, Disk, Machine, Restore, SavedBy, tsc_khz

ANSWER_S = 60.0
INIT = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void load(void) {
    char name[200], path[300];
    FILE *order = fopen("/modules/order", "r");
    while (order && fgets(name, sizeof name, order)) {
        name[strcspn(name, "\n")] = 0;
        snprintf(path, sizeof path, "/modules/%s", name);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file >= 0 && syscall(SYS_finit_module, file, "", 0) && errno != EEXIST)
            dprintf(2, "module %s: %s\n", name, strerror(errno));
        close(file);
    }
}

static int port(void) {
    char path[40];
    for (int turn = 0; turn < 2000; turn++) {
        for (int place = 0; place < 8; place++) {
            snprintf(path, sizeof path, "/dev/vport%dp1", place);
            int file = open(path, O_RDWR | O_CLOEXEC);
            if (file >= 0)
                return file;
        }
        usleep(5000);
    }
    return -1;
}

static void run(int agent, char *line) {
    dup2(agent, 1);
    dup2(agent, 2);
    if (line[0] == 'f') { /* fill: N pages with a byte each */
        size_t count = strtoul(line + 2, 0, 10);
        char *pages = mmap(0, count * 4096, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (size_t at = 0; at < count; at++)
            memset(pages + at * 4096, 1 + at % 250, 4096);
        static char *kept;
        static size_t kept_count;
        kept = pages;
        kept_count = count;
        unsigned long sum = 0;
        for (size_t at = 0; at < kept_count * 4096; at += 512)
            sum += (unsigned char)kept[at];
        dprintf(agent, "sum %lu\n", sum);
    } else if (line[0] == 'm') { /* mount: DEVICE TYPE on /mnt */
        char device[100], type[20];
        sscanf(line + 2, "%99s %19s", device, type);
        mkdir("/mnt", 0755);
        int failed = mount(device, "/mnt", type, strcmp(type, "ext4") ? MS_RDONLY : 0, "");
        dprintf(agent, "mount %s\n", failed ? strerror(errno) : "done");
    } else if (line[0] == 'r') { /* read a file */
        char text[200] = "";
        int file = open(line + 2, O_RDONLY);
        ssize_t got = file < 0 ? -1 : read(file, text, sizeof text - 1);
        close(file);
        text[got < 0 ? 0 : got] = 0;
        text[strcspn(text, "\n")] = 0;
        dprintf(agent, "read %s\n", got < 0 ? strerror(errno) : text);
    } else if (line[0] == 'w') { /* write the rest of the line at the start of a block device */
        char device[100], block[512] = "";
        sscanf(line + 2, "%99s %100s", device, block);
        int file = open(device, O_RDWR);
        ssize_t put = write(file, block, sizeof block);
        fsync(file);
        close(file);
        dprintf(agent, "wrote %zd\n", put);
    } else {
        dprintf(agent, "pong %s\n", line + 2);
    }
}

int main(void) {
    mkdir("/dev", 0755);
    mount("dev", "/dev", "devtmpfs", 0, "");
    mount("proc", "/proc", "proc", 0, "");
    load();
    int agent = port();
    char line[300], byte;
    size_t length = 0;
    dprintf(agent, "hello\n");
    while (read(agent, &byte, 1) == 1) {
        if (byte != '\n') {
            if (length < sizeof line - 1)
                line[length++] = byte;
            continue;
        }
        line[length] = 0;
        length = 0;
        run(agent, line);
    }
    return 0;
}
"""


def missing() -> str:
    """Return what this machine lacks for booting a guest; empty if nothing.

    Raises:
        AssertionError: under CI, which installs all of it: a skip there would hide that nothing was tested.
    """
    if platform.machine() != "x86_64":
        return f"guests are made for x86_64, and this machine is {platform.machine()}"
    # Debian has mke2fs where an ordinary user does not search.
    places = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    lacking = [name for name in ("qemu-system-x86_64", "gcc", "mke2fs") if shutil.which(name, path=places) is None]
    return _loud(f"this machine has no {' and no '.join(lacking)}") if lacking else ""


def _loud(words: str) -> str:
    if os.environ.get("CI") == "true":
        raise AssertionError(words)
    return words


IMAGES = "WORLDFORK_TEST_IMAGES"
"""Names a directory of guest images that runs of tests share: a kernel's download, the trial of KVM, templates."""


def prepare_images(images: Path) -> Path:
    """Return a directory of guest images that has a kernel, downloaded if this machine has none.

    Args:
        images: that of a home, unless `IMAGES` names another.
    """
    images = Path(os.environ.get(IMAGES) or images)
    images.mkdir(parents=True, exist_ok=True)
    with _turn_in(images):
        if guest_image.find_kernel(images) is None:
            try:
                guest_image.fetch_kernel(images)
            except DriverUnavailable as error:
                pytest.skip(_loud(f"there is no kernel for guests: {error}"))
    return images


@contextlib.contextmanager
def _turn_in(directory: Path) -> Iterator[None]:
    """Wait until no other run of tests is at what is made here once."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def compile_init(directory: Path) -> bytes:
    """Return a static program that answers lines on the agent's port."""
    source = directory / "guest.c"
    source.write_text(INIT, encoding="utf-8")
    subprocess.run(["gcc", "-O1", "-w", "-static", "-o", directory / "guest", source], check=True)
    return (directory / "guest").read_bytes()


@dataclass
class Guest:
    """A running QEMU and the test's end of its agent port."""

    process: subprocess.Popen[bytes]
    agent: socket.socket
    qmp: Path
    pending: bytearray = field(default_factory=bytearray)

    def read_line(self) -> str:
        while b"\n" not in self.pending:
            data = self.agent.recv(4096)
            if not data:
                raise AssertionError(f"the guest ended with {self.process.wait()}")
            self.pending += data
        line, _, rest = bytes(self.pending).partition(b"\n")
        self.pending[:] = rest
        return line.decode()

    def ask(self, line: str) -> str:
        self.agent.sendall(line.encode() + b"\n")
        return self.read_line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.agent.close()


def start(
    directory: Path,
    ram_fd: int,
    how: Boot | Restore,
    *,
    memory_mib: int = 256,
    disks: tuple[Disk, ...] = (),
    accel: Accel = "tcg",
) -> Guest:
    """Start a guest; the caller kills it."""
    qmp = directory / f"qmp-{os.urandom(4).hex()}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(qmp))
        listening.listen(1)
        mine, theirs = socket.socketpair()
        with theirs:
            machine = Machine(
                accel=accel,
                memory_mib=memory_mib,
                vcpus=1,
                ram_fd=ram_fd,
                share_ram=isinstance(how, Boot),
                qmp_fd=listening.fileno(),
                agent_fd=theirs.fileno(),
                start=how,
                disks=disks,
            )
            process = subprocess.Popen(machine.arguments(), pass_fds=machine.descriptors(), start_new_session=True)
    mine.settimeout(ANSWER_S)
    return Guest(process, mine, qmp)


def booting(kernel: Path, initrd: Path) -> Boot:
    """Return how a template starts here."""
    return Boot(str(kernel), str(initrd), tsc_khz=tsc_khz(Path("/proc/cpuinfo").read_text(encoding="utf-8")))


def restoring(state_fd: int, saved_by: SavedBy = "devices") -> Restore:
    return Restore(saved_by, state_fd)
