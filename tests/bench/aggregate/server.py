# SPDX-License-Identifier: Apache-2.0
"""Entry: a server of rounds, in a process that can be measured:
``python -m bench.aggregate.server KIND VALUES ROUNDS THREADS FD...``.

A round gives all clients a vector of float32 and takes one of each; their mean is the next round's vector.
``millpond`` is the product's reduction on the product's connections to devices, ``plain`` a loop around
``select`` that adds what comes with numpy. It prints a line of JSON once it is connected, and for each round.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from bench.train.simulated_devices import SAMPLES
from bench.train.simulated_host import SimulatedDevice
from millpond.aggregate.exact import ExactSum, scale_of
from millpond.aggregate.kernels import Vector
from millpond.aggregate.reduction import Addend, Reduction
from millpond.base.deadline import Deadline
from millpond.host.fleet.device import Device
from millpond.host.workers.worker import DeviceWorker, ModelState
from millpond.linux import memory
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import Folder, PrepareWorker, Update, Work
from millpond.train.state.layout import Tensor

_CHUNK = 1 << 18
_THREADS = 10


class MillpondServer:
    """The product's side of a round."""

    def __init__(self, descriptors: list[int], size: int, threads: int) -> None:
        request = PrepareWorker(
            WorkSpec("bench", ModelSpec("none:none")),
            "csd0",
            (Folder("private/digits", "csd0"),),
            {},
            (Tensor("weight", (size,), "float32"),),
        )
        self._workers = []
        for number in descriptors:
            device = cast(Device, SimulatedDevice(f"csd{number}", number, number))
            self._workers.append(DeviceWorker(device, lambda _: request, lambda file: Path(file.sha256)))
            self._workers[-1].prepare(Deadline.after(60))
        self._shared = memory.map_first(memory.make("mean"), 4 * size)
        self._state = ModelState(self._shared.part(0, 4 * size))
        self.mean = self._state.values
        self._reduction = Reduction(self.mean, threads)

    def ask(self, number: int, answered: Callable[[DeviceWorker, Update], None]) -> Callable[[], None]:
        """Give all clients the state; returns what waits for their heads. Few clients have a thread each, as
        a job's workers have.
        """
        work = Work(number, 1, 1, (((0, SAMPLES),),))

        def ask(worker: DeviceWorker) -> None:
            answered(worker, worker.train(work, self._state, Deadline.after(60)))

        if len(self._workers) > _THREADS:
            for worker in self._workers:
                ask(worker)
            return lambda: None
        asking = [threading.Thread(target=ask, args=(worker,)) for worker in self._workers]
        for thread in asking:
            thread.start()

        def wait() -> None:
            for thread in asking:
                thread.join()

        return wait

    def run(self, number: int) -> None:
        """Run a round."""
        addends: list[Addend] = []

        def answered(worker: DeviceWorker, update: Update) -> None:
            addends.append(Addend(worker, update.weight, update.largest, update.norm))

        self.ask(number, answered)()
        if lost := self._reduction.run(addends):
            raise RuntimeError(str(lost[0].error))


class StagedServer(MillpondServer):
    """The design that was not taken: each vector is pulled whole as soon as its head has come, into a staging
    buffer, and then added to one exact sum of the whole vector. The bound of all values must be known before.
    """

    def __init__(self, descriptors: list[int], size: int) -> None:
        super().__init__(descriptors, size, 1)
        self._sum, self._staging = ExactSum(size), np.empty(size, np.float32)

    def run(self, number: int) -> None:
        """Run a round; the threads that wait for answers put them into a queue."""
        answers: queue.SimpleQueue[tuple[DeviceWorker, float]] = queue.SimpleQueue()
        wait = self.ask(number, lambda worker, update: answers.put((worker, update.weight)))
        weights = 0.0
        self._sum.begin(scale_of(1.0, len(self._workers)))
        for _ in self._workers:
            worker, weight = answers.get()
            worker.fetch(len(self.mean), Deadline.after(60))
            worker.read(self._staging, Deadline.after(60))
            self._sum.add(self._staging, bound=1.0)
            weights += weight
        wait()
        self._sum.divide(weights, self.mean)


@dataclass(slots=True)
class _Transfer:
    """Of a client in a round: bytes sent to it and taken of it, and the first bytes of a value whose others
    have not come yet. They are not left in the socket: a window that has closed may wait for them.
    """

    sent: int = 0
    taken: int = 0
    begun: bytes = b""


class PlainServer:
    """Sends to all, and adds what comes; with ``adds`` False the first value alone."""

    def __init__(self, descriptors: list[int], size: int, *, adds: bool = True) -> None:
        self._adds = adds
        self._clients = [socket.socket(fileno=number) for number in descriptors]
        for client in self._clients:
            client.setblocking(False)
        self.mean = np.zeros(size, np.float32)
        self._sum = np.zeros(size, np.float32)
        self._bytes = bytearray(_CHUNK)
        self._buffer: Vector = np.frombuffer(self._bytes, np.float32)

    def run(self, _number: int) -> None:
        """Run a round."""
        self._sum[:] = 0
        data = self.mean.data.cast("B")
        with selectors.EpollSelector() as selector:
            for client in self._clients:
                selector.register(client, selectors.EVENT_WRITE, _Transfer())
            while selector.get_map():
                for key, _ in selector.select():
                    client, transfer = cast(socket.socket, key.fileobj), cast(_Transfer, key.data)
                    if key.events & selectors.EVENT_WRITE:
                        transfer.sent += client.send(data[transfer.sent : transfer.sent + (1 << 20)])
                        if transfer.sent == len(data):
                            selector.modify(client, selectors.EVENT_READ, transfer)
                    elif self._take(client, transfer) == len(data):
                        selector.unregister(client)
        np.divide(self._sum, len(self._clients), out=self.mean)

    def _take(self, client: socket.socket, transfer: _Transfer) -> int:
        """Add what has come, in whole values, and return how many bytes of them there were so far."""
        begun = len(transfer.begun)
        self._bytes[:begun] = transfer.begun
        came = begun + client.recv_into(memoryview(self._bytes)[begun:])
        if came == begun:
            raise ConnectionError("a client has gone")
        start, count = transfer.taken // 4, came // 4
        transfer.begun = bytes(self._bytes[4 * count : came])
        transfer.taken += 4 * count
        if not self._adds and start:
            count = 0
        self._sum[start : start + count] += self._buffer[:count]
        return transfer.taken


class SharedVectorServer:
    """Threads that add to one vector, in C, see shared_vector.c: ``locked`` or racing."""

    def __init__(
        self, descriptors: list[int], size: int, threads: int, library: Path, *, locked: bool
    ) -> None:
        self._serve = ctypes.CDLL(str(library)).serve_round
        self._clients = (ctypes.c_int * len(descriptors))(*descriptors)
        self.mean, self._sum = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self._threads, self._locked = threads, locked

    def run(self, _number: int) -> None:
        """Run a round."""
        vectors = [ctypes.c_void_p(vector.ctypes.data) for vector in (self.mean, self._sum)]
        size = ctypes.c_size_t(len(self.mean))
        if self._serve(*vectors, size, self._clients, len(self._clients), self._threads, self._locked):
            raise RuntimeError("a client has gone")


def _resident() -> int:
    """Return the peak of this process since the last call, in bytes; its own pages alone."""
    text = Path("/proc/self/status").read_text()
    peak = 1024 * int(text.split("VmHWM:")[1].split()[0])
    Path("/proc/self/clear_refs").write_text("5")
    return peak


def _server(
    kind: str, descriptors: list[int], size: int, threads: int
) -> MillpondServer | PlainServer | SharedVectorServer:
    if kind == "millpond":
        return MillpondServer(descriptors, size, threads)
    if kind == "staged":
        return StagedServer(descriptors, size)
    if kind in ("plain", "bare"):
        return PlainServer(descriptors, size, adds=kind == "plain")
    library = Path(os.environ["SHARED_VECTOR"])
    return SharedVectorServer(descriptors, size, threads, library, locked=kind == "locked")


def main() -> None:
    """Connect, run the rounds, tell of each."""
    kind, size, rounds, threads, *descriptors = sys.argv[1], *map(int, sys.argv[2:])
    _resident()
    alone = _resident()
    server = _server(kind, descriptors, size, threads)
    _resident()
    _tell(alone=alone, connected=_resident())
    for number in range(rounds):
        began, before = time.monotonic(), time.process_time()
        server.run(number)
        seconds, cpu = time.monotonic() - began, time.process_time() - before
        _tell(seconds=seconds, cpu=cpu, peak=_resident(), first=float(server.mean[0]))


def _tell(**values: float) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
