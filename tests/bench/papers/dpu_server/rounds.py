# SPDX-License-Identifier: Apache-2.0
"""Edge (processes, cgroups): rounds of the paper's six servers with ten clients, on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.aggregate.rounds import connected
from bench.balance.cgroups import cgroup
from bench.papers.dpu_server import millpond_round
from bench.papers.dpu_server.library import (
    LOCKED,
    MILLPOND,
    UDP,
    Library,
    Vector,
    blocks,
    build,
    datagram_socket,
)

CLIENTS, THREADS = 10, 2
"""Clients as in the paper; threads of a UDP server, one for each core of a small machine."""
WHOLE, DPU = 1.0, 0.4
"""Processor time of a server: a whole core, and what stands for the slower cores of a DPU."""


@dataclass(frozen=True, slots=True)
class Design:
    """A server of the paper: its number there, on which processor, and how it receives and adds."""

    number: int
    label: str
    share: float
    how: int


SERVERS = (
    Design(1, "CPU, TCP, atomic", WHOLE, LOCKED),
    Design(2, "CPU, TCP, racing", WHOLE, 0),
    Design(3, "DPU, TCP, atomic", DPU, LOCKED),
    Design(4, "DPU, TCP, racing", DPU, 0),
    Design(5, "DPU, UDP, atomic", DPU, UDP | LOCKED),
    Design(6, "DPU, UDP, racing", DPU, UDP),
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a round: until the last client has the mean; at the server until the last END, and from
    there until the mean is there, and seconds of a core; 0 for the product's own. ``lost`` are shares of
    datagrams: of vectors, and of the mean.
    """

    response: float
    receive: float
    compute: float
    lost: tuple[float, float]
    cpu: float


class Rounds:
    """A server's process and ten clients, whose vectors are rows of ``vectors``, and their means of
    ``means``.
    """

    def __init__(
        self, library: Library, server: subprocess.Popen[str], ends: Sequence[socket.socket]
    ) -> None:
        self._library, self._server, self._ends = library, server, ends
        self.vectors: Vector = np.empty((0, 0), np.float32)
        self.means = self.vectors
        self._datagrams: list[socket.socket] = []
        self._free: list[socket.socket] = []  # not connected
        self._port = self._round = 0

    def connect(self, stack: ExitStack, size: int) -> None:
        """Connect the clients' UDP sockets to those of the server, and have vectors of ``size`` values."""
        ports = json.loads(self._read())
        for number in range(CLIENTS):
            own = stack.enter_context(datagram_socket(1, size))
            own.connect(("127.0.0.1", ports[number % len(ports)]))
            self._datagrams.append(own)
            self._free.append(stack.enter_context(datagram_socket(1, size)))
        self._port = ports[0]
        rng = np.random.default_rng(1)
        self.vectors = rng.standard_normal((CLIENTS, size), dtype=np.float32)
        self.means = np.zeros_like(self.vectors)

    def run(self, how: int, lost: float = 0.0) -> Timing:
        """Do a round; the share ``lost`` of the datagrams of the mean is dropped at the clients."""
        assert self._server.stdin
        self._round += 1
        self._server.stdin.write(f"{how} {self._round}\n")
        self._server.stdin.flush()
        if how & MILLPOND:
            place = self._free, self._port, self._round
            response = millpond_round.participate(*place, self.vectors, self.means)
            self._read()
            return Timing(response, 0.0, 0.0, (0.0, 0.0), 0.0)
        used = [each.fileno() for each in (self._datagrams if how & UDP else self._ends)]
        seconds, came = self._library.participate(used, how, self.vectors, self.means, lost, self._round)
        (began, ended, done), taken, cpu = json.loads(self._read())
        sent = CLIENTS * blocks(self.vectors.shape[1])
        gone = (1 - taken / sent, 1 - came / sent) if how & UDP else (0.0, 0.0)
        return Timing(max(seconds), ended - began, done - ended, gone, cpu)

    def _read(self) -> str:
        assert self._server.stdout
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError("the server has ended")
        return line


@contextmanager
def rounds(size: int, share: float) -> Iterator[Rounds]:
    """Start a server with ``share`` of a core, and clients with vectors of ``size`` values. Raises
    Unmeasured.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millpond-bench-")))
        group = stack.enter_context(cgroup(f"millpond-bench-dpu-{share}"))
        group.limit(share)
        path = build(folder)
        pairs = [stack.enter_context(connected()) for _ in range(CLIENTS)]
        near, far = zip(*pairs, strict=True)
        numbers = [end.fileno() for end in near]
        module = [sys.executable, "-m", "bench.papers.dpu_server.server_process"]
        server = subprocess.Popen(
            [*module, str(path), *map(str, (size, THREADS, *numbers))],
            pass_fds=numbers,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        stack.callback(server.wait)
        stack.callback(server.kill)
        group.add(server.pid)
        found = Rounds(Library(path), server, far)
        found.connect(stack, size)
        yield found


def exact(vectors: Vector) -> Vector:
    """Return the mean of the rows, rounded once."""
    return np.asarray(vectors.mean(axis=0, dtype=np.float64), np.float32)
