# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): many small files read by a program of its own, with dropped caches or once more."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.tunnel.accounting import tree
from bench.volume.names import ReadSamples, read_files
from bench.volume.route import Mount, RouteFailed
from bench.volume.workload import Done
from millpond.linux.confinement.sandbox import spawn

_DROP = Path("/proc/sys/vm/drop_caches")


def cannot_drop_caches() -> str | None:
    """Return why the kernel's caches cannot be dropped here, None if they can."""
    return None if os.access(_DROP, os.W_OK) else f"{_DROP} may not be written"


def drop_caches() -> None:
    """Drop all pages, names and attributes that the kernel caches, of the whole machine."""
    os.sync()
    _DROP.write_text("3")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the program has taken, and the digest of what it has read."""

    seconds: float
    cpu: float
    digest: str


@dataclass(frozen=True, slots=True)
class ReadByProgram:
    """The files of ``samples``, opened and read by a process that is forked into the mount's sandbox. First
    of all with dropped caches, or, ``again``, after the same process has read them once.
    """

    samples: ReadSamples
    again: bool
    counts: str = "operation"

    def prepare(self, mount: Mount, repeat: int) -> None:
        """See Workload."""

    def work(self, mount: Mount, repeat: int) -> Done:
        """See Workload. Of what is read for the first time every byte must come from the storage."""
        paths = self.samples.shuffled(mount.folder, repeat)
        with _reader(mount, paths, again=self.again) as (pid, link):
            if not self.again:
                drop_caches()
            readers = (pid, *mount.near)
            before = _from_storage(readers)
            answer = _ask(link)
            fetched = _from_storage(readers) - before
        if not self.again and fetched < self.samples.count * self.samples.size:
            raise RouteFailed(f"{fetched} bytes came from the storage: the caches had not been dropped")
        if answer.digest != _digest(read_files(self.samples.shuffled(mount.backing, repeat))):
            raise RouteFailed("other contents than were written")
        return Done(self.samples.count, answer.seconds, answer.cpu)

    def check(self, mount: Mount, repeat: int) -> None:
        """See Workload."""


@contextlib.contextmanager
def _reader(mount: Mount, paths: list[str], *, again: bool) -> Iterator[tuple[int, socket.socket]]:
    """A process that reads when it is told to, and its end of the line; it is ready."""
    ours, theirs = socket.socketpair()

    def body() -> int:
        ours.close()
        return _read_when_told(theirs, paths, again=again)

    with ours:
        pid = spawn(mount.sandbox, body)
        theirs.close()
        try:
            if ours.recv(5) != b"ready":
                raise RouteFailed("the program that reads has ended")
            yield pid, ours
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            os.waitpid(pid, 0)


def _read_when_told(link: socket.socket, paths: list[str], *, again: bool) -> int:
    if again:
        read_files(paths)
    link.sendall(b"ready")
    link.recv(1)
    cpu, began = time.process_time(), time.perf_counter()
    contents = read_files(paths)
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    link.sendall(json.dumps(asdict(_Answer(seconds, used, _digest(contents)))).encode())
    link.recv(1)  # what it has used can be read while it is there
    return 0


def _ask(link: socket.socket) -> _Answer:
    link.sendall(b"!")
    said = link.recv(1 << 16)
    if not said:
        raise RouteFailed("the program that reads has failed")
    return _Answer(**json.loads(said))


def _digest(contents: list[bytes]) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()


def _from_storage(roots: tuple[int, ...]) -> int:
    """Return the bytes that processes, and all below them, have had read from storage."""
    total = 0
    for pid in tree(roots):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    return total
