# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): a virtual worker in this process, which sleeps for its curve's time without computing."""

from __future__ import annotations

import threading
import time

import numpy as np

from bench.balance.paper import Machine
from millpond.aggregate.kernels import Vector
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost
from millpond.host.workers.worker import ModelState
from millpond.train.protocol import Ready, Update, Work
from millpond.train.task.sums import LOSS

SIZE = 1000
"""Values of its model."""
GRADIENT = np.linspace(-1.0, 1.0, SIZE, dtype=np.float32)
"""Of every sample, so that a step's mean shows whether all samples were counted as they should be."""
NORM = float(np.linalg.norm(GRADIENT))


class VirtualWorker:
    """A ``host.workers.worker.Worker``. It takes ``slowness`` times as long as ``machine`` for each step
    that begins from now on, and ``tells`` it of its processor's load or not. ``late`` are seconds by which it
    woke up later than it wanted to.
    """

    def __init__(self, name: str, machine: Machine, *, tells: bool) -> None:
        self.name = name
        self.slowness = 1.0
        self.late: list[float] = []
        self.holds, self.percent = False, 0
        self._values = np.empty(SIZE, np.float32)
        self._machine, self._tells = machine, tells
        self._closed = threading.Event()

    def prepare(self, deadline: Deadline) -> Ready:
        """See Worker. It has as many samples as anybody wants."""
        return Ready((1 << 40,))

    def train(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        """See Worker."""
        began, slowness = time.monotonic(), self.slowness
        samples = request.samples
        seconds = slowness * float(self._machine.seconds(np.array(samples)))
        if self._closed.wait(seconds):
            raise ConnectionLost(f"{self.name} was closed")
        took = time.monotonic() - began
        self.late.append(took - seconds)
        np.multiply(GRADIENT, np.float32(samples), out=self._values)
        self.holds = False
        busy = 1 - 1 / slowness if self._tells else float("nan")
        loss = {LOSS: (0.0, float(samples))}
        return Update(request.exchange, samples, samples, samples, samples * NORM, took, busy, 0, loss)

    def fetch(self, stop: int, deadline: Deadline) -> None:
        """See Worker. There is one part."""

    def read(self, out: Vector, deadline: Deadline) -> None:
        """See Worker."""
        out[:] = self._values

    def close(self) -> None:
        """See Worker. It wakes up at once."""
        self._closed.set()
