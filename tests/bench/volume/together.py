# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): several programs that read different files of a mount at once."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from bench.volume.blocks import MIB
from bench.volume.route import Mount, RouteFailed
from bench.volume.workload import Done


@dataclass(frozen=True, slots=True)
class ReadTogether:
    """Each of the mount's programs reads ``count`` files of its own, ``size`` bytes each. Files are there for
    ``programs``; an amount is a MiB, of all programs together.
    """

    name: str
    programs: int
    count: int
    size: int
    counts: str = "MiB"

    def make(self, backing: Path) -> None:
        """Make the files, a folder for each program."""
        content = random.Random(1)
        for program in range(self.programs):
            for path in self._paths(backing, program):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.randbytes(self.size))

    def prepare(self, mount: Mount, repeat: int) -> None:
        """See Workload."""

    def work(self, mount: Mount, repeat: int) -> Done:
        """See Workload. The time is from the word to begin until the last program has read all."""
        seconds, cpu = _run(
            [self._paths(mount.folder, program) for program in range(mount.programs)],
            [self._paths(mount.backing, program) for program in range(mount.programs)],
        )
        size = mount.programs * self.count * self.size
        return Done(size / MIB, seconds, cpu, fetched=size)

    def check(self, mount: Mount, repeat: int) -> None:
        """See Workload."""

    def _paths(self, folder: Path, program: int) -> list[Path]:
        return [folder / self.name / str(program) / f"{number:05}" for number in range(self.count)]


def _run(files: Sequence[Sequence[Path]], expected: Sequence[Sequence[Path]]) -> tuple[float, float]:
    """Run a program for each list of files. Returns the seconds until the last one has read all, and the
    processor time of all. Raises RouteFailed unless each has read what is expected.
    """
    links: list[socket.socket] = []
    pids: list[int] = []
    try:
        for paths, others in zip(files, expected, strict=True):
            ours, theirs = socket.socketpair()
            links.append(ours)
            pids.append(_fork(theirs, paths, others))
            theirs.close()
        if not all(link.recv(64) for link in links):  # none may begin late
            raise RouteFailed("a program has failed before it read")
        began = time.perf_counter()
        for link in links:
            link.sendall(b"!")
        said = [link.recv(64) for link in links]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pids.pop(0), 0)[1]) for _ in links]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for link in links:
            link.close()
    if any(codes) or not all(said):
        raise RouteFailed("a program has failed, or read other contents than were written")
    answers = [tuple(map(float, text.split())) for text in said]
    return max(ended for ended, _ in answers) - began, sum(cpu for _, cpu in answers)


def _fork(link: socket.socket, paths: Sequence[Path], expected: Sequence[Path]) -> int:
    pid = os.fork()
    if pid == 0:
        _read(link, paths, expected)
    return pid


def _read(link: socket.socket, paths: Sequence[Path], expected: Sequence[Path]) -> NoReturn:
    """In a process of its own: read, say when all was read, see whether it was what is expected."""
    code = 1
    try:
        contents = [path.read_bytes() for path in expected]
        places = [
            memoryview(bytearray(b"-") * len(data)) for data in contents
        ]  # memory that is there already
        link.sendall(b"ready")
        link.recv(1)
        cpu = time.process_time()
        for path, place in zip(paths, places, strict=True):
            _read_into(place, path)
        ended = time.perf_counter()  # a clock that all processes share
        link.sendall(f"{ended} {time.process_time() - cpu}".encode())
        code = int(any(data != place for data, place in zip(contents, places, strict=True)))
    except OSError:
        traceback.print_exc()
    finally:
        os._exit(code)


def _read_into(place: memoryview, path: Path) -> None:
    """Fill ``place`` with the file, 1 MiB at a time."""
    descriptor = os.open(path, os.O_RDONLY)
    done = 0
    while read := os.readv(descriptor, [place[done : done + MIB]]):
        done += read
    os.close(descriptor)
