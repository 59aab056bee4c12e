# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): the dispatcher of one worker of a synchronous job: tasks go in, answers come out."""

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
"""Time limit of a task, unless its plan is longer; a worker that hangs is noticed sooner."""


@dataclass(frozen=True, slots=True)
class GradientTask:
    """A request for gradients at ``state``."""

    request: Compute
    state: ModelState

    @property
    def samples(self) -> int:
        """The number of samples of the task."""
        return sum(map(len, self.request.samples))


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """The answer to a task. ``sums``, float32 [size], stay until the worker's next task, in memory that a
    process of the same job on the host could still change. ``seconds`` passed here between task and answer.
    """

    dispatcher: Dispatcher
    task: GradientTask
    computed: Computed
    sums: Vector
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """The loss of a worker and its task; ``for_good`` if the answer was wrong and no retry mends it."""

    dispatcher: Dispatcher
    task: GradientTask
    reason: str
    for_good: bool


class Dispatcher:
    """Sends tasks to ``worker`` and puts answers and losses into ``events``. ``task`` is the task under way;
    the consumer of its answer sets ``task`` to None.
    """

    def __init__(
        self, rank: int, worker: Worker, events: queue.SimpleQueue[WorkerAnswer | WorkerLoss]
    ) -> None:
        self.rank, self.worker = rank, worker
        self.task: GradientTask | None = None
        self._abandoned = ""
        self._events = events
        self._tasks: queue.SimpleQueue[tuple[GradientTask, float, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"dispatcher {worker.name}", daemon=True)
        self._thread.start()

    def begin(self, task: GradientTask, seconds: float = LONGEST_SECONDS) -> None:
        """Send the worker a task, to be done in ``seconds``; the answer to the last task must have been
        consumed.
        """
        self.task = task
        self._tasks.put((task, time.monotonic(), seconds))

    def end(self) -> None:
        """Accept no more tasks; the worker is the caller's again."""
        self._tasks.put(None)

    def abandon(self, reason: str) -> None:
        """Close the worker; its loss is reported with ``reason``."""
        self._abandoned = reason
        self.worker.close()

    def _run(self) -> None:
        while (given := self._tasks.get()) is not None:
            event = self._run_task(*given)
            self._events.put(event)
            if isinstance(event, WorkerLoss):
                return

    def _run_task(self, task: GradientTask, began: float, allowed: float) -> WorkerAnswer | WorkerLoss:
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
            return WorkerLoss(self, task, self._abandoned or str(error), for_good=False)
