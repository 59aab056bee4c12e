# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): the dispatcher of one worker of a job: tasks go in, answers come out."""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass

from millpond.aggregate.exact import RefusedUpdate
from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError, Refused
from millpond.host.records.failures import FOR_GOOD, MACHINE_MEMORY, OUT_OF_MEMORY, reason_of
from millpond.host.workers.worker import ModelState, Worker
from millpond.train.protocol import Update, Work
from millpond.train.update_bounds import UpdateBounds

log = logging.getLogger(__name__)

LONGEST_SECONDS = 60.0
"""Time limit of a task, unless its plan is longer; a worker that hangs is noticed sooner."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """A request for an update from ``state``."""

    request: Work
    state: ModelState

    @property
    def samples(self) -> int:
        """The number of samples of the task."""
        return self.request.samples


@dataclass(frozen=True, slots=True, eq=False)
class WorkerAnswer:
    """The answer to a task: the head of an update, whose values the worker has until its next task.
    ``seconds`` passed here between task and answer.
    """

    dispatcher: Dispatcher
    task: Assignment
    update: Update
    seconds: float

    def loss(self, reason: str, for_good: bool) -> WorkerLoss:
        """Return the loss of the same worker and task."""
        return WorkerLoss(self.dispatcher, self.task, reason, for_good)


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """The loss of a worker and its task; ``for_good`` if no other try with the same settings mends it, as
    where the answer was wrong. A worker that ran ``out_of_memory`` has reached its own limit if it is lost
    for good, or else the memory of its machine ran out.
    """

    dispatcher: Dispatcher
    task: Assignment
    reason: str
    for_good: bool
    out_of_memory: bool = False


class Dispatcher:
    """Sends tasks to ``worker`` and puts answers and losses into ``events``. ``task`` is the task under way;
    the consumer of its answer sets ``task`` to None. An answer that is not
    within ``bounds`` is refused.
    """

    def __init__(
        self,
        rank: int,
        worker: Worker,
        events: queue.SimpleQueue[WorkerAnswer | WorkerLoss],
        bounds: UpdateBounds | None = None,
    ) -> None:
        self.rank, self.worker, self._bounds = rank, worker, bounds or UpdateBounds()
        self.task: Assignment | None = None
        self._abandoned = ""
        self._events = events
        self._tasks: queue.SimpleQueue[tuple[Assignment, float, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"dispatcher {worker.name}", daemon=True)
        self._thread.start()

    def begin(self, task: Assignment, seconds: float = LONGEST_SECONDS) -> None:
        """Send the worker a task, to be done in ``seconds``; the answer to the last task must have been
        consumed.
        """
        self.task, self.worker.holds = task, True
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

    def _run_task(self, task: Assignment, began: float, allowed: float) -> WorkerAnswer | WorkerLoss:
        name = self.worker.name
        try:
            update = self.worker.train(task.request, task.state, Deadline.after(allowed))
            seconds = time.monotonic() - began
            if fault := self._bounds.refusal(task.request, update):
                raise RefusedUpdate(name, fault)
            return WorkerAnswer(self, task, update, seconds)
        except RefusedUpdate as error:
            return WorkerLoss(self, task, reason_of(error, name), for_good=True)
        except Refused as error:
            memory = error.code in (OUT_OF_MEMORY, MACHINE_MEMORY)
            return WorkerLoss(self, task, reason_of(error, name), error.code in FOR_GOOD, memory)
        except Exception as error:
            if not isinstance(error, (MillpondError, OSError)):
                log.exception("worker %s: internal error", name)
            return WorkerLoss(self, task, self._abandoned or reason_of(error, name), for_good=False)
