"""Edge (threads): one round of federated averaging: all workers train from one state, the answers are summed.

An update counts whole or not at all: it is received into a buffer of its own, checked, and only then added.
There are few such buffers however many workers, so memory stays at a few models.
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
    """The buffers that updates are received into."""

    def __init__(self, size: int) -> None:
        self._free: queue.SimpleQueue[Vector] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(np.empty(size, np.float32))

    def take(self, deadline: Deadline) -> Vector:
        """A buffer of this caller's own. Raises DeadlineExceeded."""
        try:
            return self._free.get(timeout=deadline.remaining())
        except queue.Empty:
            raise DeadlineExceeded("no buffer became free before the deadline") from None

    def give_back(self, buffer: Vector) -> None:
        """Let others have it."""
        self._free.put(buffer)


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a worker's update is not in a round; ``by_job`` if the job itself is at fault."""

    reason: str
    by_job: bool = False


class RoundCollection:
    """The answers to one round as they come in."""

    def __init__(
        self, number: int, state: Vector, total: ExactSum, staging: ReceiveBuffers, deadline: Deadline
    ) -> None:
        self.number, self.total = number, total
        self.counted: dict[str, Trained] = {}
        self.missing: dict[str, Missing] = {}
        self._state, self._staging, self._deadline = state, staging, deadline
        self._lock = threading.Lock()
        self._closed = False

    def run(self, participants: Sequence[WorkerSupervisor]) -> None:
        """Ask all who are there; return when all have answered or the deadline has passed."""
        asked = [(participant, participant.worker) for participant in participants]
        threads = []
        for participant, worker in asked:
            if worker is None:
                self.missing[participant.name] = Missing(participant.reason, bool(participant.failure))
                continue
            thread = threading.Thread(target=self._ask, args=(participant, worker), daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()  # every wait in _ask ends with the deadline
        with self._lock:
            self._closed = True

    def _ask(self, participant: WorkerSupervisor, worker: Worker) -> None:
        name = participant.name
        try:
            trained = worker.train(self.number, self._state, self._deadline)
            if participant.ready is None or trained.samples != participant.ready.samples:
                raise ProtocolError(f"{name} says that it trained on {trained.samples} samples")
            buffer = self._staging.take(self._deadline)
            try:
                # A buffer is not held for a worker that is stuck: others wait for it.
                seconds = TRANSFER_SECONDS + buffer.nbytes / SLOWEST
                worker.receive_state(buffer, self._deadline.earlier(seconds))
                self._count(name, trained, buffer)
            finally:
                self._staging.give_back(buffer)
        except RefusedUpdate as error:
            self._miss(name, Missing(str(error)))
        except Refused as error:
            self._miss(name, Missing(str(error), by_job=error.code in ("data", "model")))
            if error.code == "worker":
                participant.lose(worker, str(error))
        except Exception as error:
            if not isinstance(error, MillpondError):
                log.exception("worker %s: internal error", name)
            self._miss(name, Missing(str(error)))
            participant.lose(worker, str(error))

    def _count(self, name: str, trained: Trained, update: Vector) -> None:
        with self._lock:
            if self._closed:
                raise DeadlineExceeded(f"{name} answered after the round had ended")
            self.total.add(update, trained.samples, name)
            self.counted[name] = trained

    def _miss(self, name: str, missing: Missing) -> None:
        with self._lock:
            self.missing[name] = missing
