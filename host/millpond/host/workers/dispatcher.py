"""Edge (a thread): one worker of a synchronous job at work: tasks go in, answers come out."""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass

from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError, Refused
from millpond.host.workers.worker import ModelState, Worker
from millpond.train.protocol import Compute, Computed
from millpond.train.reduce.exact import BOUND, RefusedUpdate, Vector, within

log = logging.getLogger(__name__)

Samples = tuple[tuple[int, ...], ...]
"""Indices of samples, by folder of a worker."""
LONGEST_SECONDS = 60.0
"""For a task, unless more is planned for it; who hangs is found out sooner."""


@dataclass(frozen=True, slots=True)
class GradientTask:
    """Gradients that a worker is to compute at ``state``."""

    request: Compute
    state: ModelState

    @property
    def samples(self) -> int:
        """How many it is for."""
        return sum(map(len, self.request.samples))


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """A task is done: ``sums`` are there until the worker has another, in memory where a process on the host
    could still change them, to its own job's harm. ``seconds`` are what passed between task and answer here.
    """

    link: Dispatcher
    task: GradientTask
    computed: Computed
    sums: Vector
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """A worker is lost, and its task with it; for good, if what it says or sends is no good to the job."""

    link: Dispatcher
    task: GradientTask
    reason: str
    for_good: bool


class Dispatcher:
    """Hands tasks to ``worker``; what comes of them goes into ``events``. ``task`` is what it is at; whoever
    takes the answer sets it to None.
    """

    def __init__(
        self, rank: int, worker: Worker, events: queue.SimpleQueue[WorkerAnswer | WorkerLoss]
    ) -> None:
        self.rank, self.worker = rank, worker
        self.task: GradientTask | None = None
        self._events = events
        self._tasks: queue.SimpleQueue[tuple[GradientTask, float, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"link {worker.name}", daemon=True)
        self._thread.start()

    def begin(self, task: GradientTask, seconds: float = LONGEST_SECONDS) -> None:
        """Give the worker a task, and so much time; the answer to its last must have been taken."""
        self.task = task
        self._tasks.put((task, time.monotonic(), seconds))

    def end(self) -> None:
        """No more tasks; the worker is the caller's again."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (given := self._tasks.get()) is not None:
            event = self._do(*given)
            self._events.put(event)
            if isinstance(event, WorkerLoss):
                return

    def _do(self, task: GradientTask, began: float, allowed: float) -> WorkerAnswer | WorkerLoss:
        try:
            computed, sums = self.worker.compute(task.request, task.state, Deadline.after(allowed))
            seconds = time.monotonic() - began
            if not within(sums, BOUND * task.samples):
                raise RefusedUpdate(self.worker.name, f"a gradient is not finite, or beyond {BOUND:g}")
            return WorkerAnswer(self, task, computed, sums, seconds)
        except RefusedUpdate as error:
            return WorkerLoss(self, task, str(error), for_good=True)
        except Refused as error:
            return WorkerLoss(self, task, str(error), for_good=error.code in ("data", "model"))
        except Exception as error:
            if not isinstance(error, (MillpondError, OSError)):
                log.exception("worker %s: internal error", self.worker.name)
            return WorkerLoss(self, task, str(error), for_good=False)
