# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): one round of federated averaging: sends one state to all workers, sums their updates.

An update counts whole or not at all: it is received into a buffer, checked, and only then added. The buffers
are few however many workers there are, so memory stays at a few models.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millpond.base.deadline import Deadline
from millpond.base.errors import DeadlineExceeded, MillpondError, ProtocolError, Refused
from millpond.host.workers.supervisor import WorkerSupervisor
from millpond.host.workers.worker import Worker
from millpond.train.protocol import Trained
from millpond.train.reduce.exact import ExactSum, RefusedUpdate, Vector

log = logging.getLogger(__name__)

BUFFERS = 3
TRANSFER_SECONDS = 10.0
SLOWEST = 1e6  # bytes per second


class ReceiveBuffers:
    """A pool of BUFFERS buffers, float32 [size], into which updates are received."""

    def __init__(self, size: int) -> None:
        self._free: queue.SimpleQueue[Vector] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(np.empty(size, np.float32))

    def acquire(self, deadline: Deadline) -> Vector:
        """Return a buffer that is the caller's alone until ``release``. Raises DeadlineExceeded."""
        try:
            return self._free.get(timeout=deadline.remaining())
        except queue.Empty:
            raise DeadlineExceeded("no buffer became free before the deadline") from None

    def release(self, buffer: Vector) -> None:
        """Return a buffer to the pool."""
        self._free.put(buffer)


@dataclass(frozen=True, slots=True)
class Missing:
    """The reason for a worker's absence from a round; ``by_job`` if the job's model or data are at fault."""

    reason: str
    by_job: bool = False


class RoundCollection:
    """The collection of one round: updates ``counted``, their ``total``, and workers ``missing``."""

    def __init__(
        self, number: int, state: Vector, total: ExactSum, buffers: ReceiveBuffers, deadline: Deadline
    ) -> None:
        self.number, self.total = number, total
        self.counted: dict[str, Trained] = {}
        self.missing: dict[str, Missing] = {}
        self._state, self._buffers, self._deadline = state, buffers, deadline
        self._lock = threading.Lock()
        self._closed = False

    def run(self, supervisors: Sequence[WorkerSupervisor]) -> None:
        """Ask all prepared workers; return when all have answered or the deadline has passed."""
        asked = [(supervisor, supervisor.worker) for supervisor in supervisors]
        threads = []
        for supervisor, worker in asked:
            if worker is None:
                self.missing[supervisor.name] = Missing(supervisor.reason, bool(supervisor.failure))
                continue
            thread = threading.Thread(target=self._collect, args=(supervisor, worker), daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()  # every wait in _collect ends with the deadline
        with self._lock:
            self._closed = True

    def _collect(self, supervisor: WorkerSupervisor, worker: Worker) -> None:
        name = supervisor.name
        try:
            trained = worker.train(self.number, self._state, self._deadline)
            if supervisor.ready is None or trained.samples != supervisor.ready.samples:
                raise ProtocolError(f"{name} says that it trained on {trained.samples} samples")
            buffer = self._buffers.acquire(self._deadline)
            try:
                # A worker that is stuck must not keep a buffer: other workers wait for one.
                seconds = TRANSFER_SECONDS + buffer.nbytes / SLOWEST
                worker.receive_state(buffer, self._deadline.earlier(seconds))
                self._count(name, trained, buffer)
            finally:
                self._buffers.release(buffer)
        except RefusedUpdate as error:
            self._miss(name, Missing(str(error)))
        except Refused as error:
            self._miss(name, Missing(str(error), by_job=error.code in ("data", "model")))
            if error.code == "worker":
                supervisor.lose(worker, str(error))
        except Exception as error:
            if not isinstance(error, MillpondError):
                log.exception("worker %s: internal error", name)
            self._miss(name, Missing(str(error)))
            supervisor.lose(worker, str(error))

    def _count(self, name: str, trained: Trained, update: Vector) -> None:
        with self._lock:
            if self._closed:
                raise DeadlineExceeded(f"{name} answered after the round had ended")
            self.total.add(update, trained.samples, name)
            self.counted[name] = trained

    def _miss(self, name: str, missing: Missing) -> None:
        with self._lock:
            self.missing[name] = missing
