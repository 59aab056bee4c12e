# SPDX-License-Identifier: Apache-2.0
"""Edge (a queue): the roster of a job: the workers that take part or are measured, and their events."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable

from millpond.host.jobs.training.membership import Membership
from millpond.host.jobs.training.profiler import Profiler
from millpond.host.workers.dispatcher import Dispatcher, WorkerAnswer, WorkerLoss
from millpond.host.workers.worker import ModelState


class JobRoster(Membership[Dispatcher]):
    """A membership of workers with dispatchers; the ``profiler`` has those that are measured before they take
    part. All of them put their events into ``events``.
    """

    def __init__(self, workers: int, devices: Iterable[int], quorum: float) -> None:
        super().__init__(workers, devices, quorum)
        self.size = workers
        self.profiler = Profiler()
        self.events: queue.SimpleQueue[WorkerAnswer | WorkerLoss] = queue.SimpleQueue()
        self._kept: deque[WorkerAnswer | WorkerLoss] = deque()

    def wait(self, seconds: float) -> WorkerAnswer | WorkerLoss | None:
        """Return what a worker that takes part says within some ``seconds``. What one says that is measured
        is handled.
        """
        try:
            event = self.events.get(timeout=seconds)
        except queue.Empty:
            return None
        if event.dispatcher not in self.profiler:
            return event
        self.profiler.handle(event)
        return None

    def next_event(self, seconds: float) -> WorkerAnswer | WorkerLoss | None:
        """Return what was kept, or else what ``wait`` returns."""
        return self._kept.popleft() if self._kept else self.wait(seconds)

    def keep(self, event: WorkerAnswer | WorkerLoss) -> None:
        """Keep an event that came between exchanges for the next one."""
        self._kept.append(event)

    @property
    def states_in_use(self) -> set[ModelState]:
        """The states that workers still need."""
        everyone = (*self.present.values(), *self.profiler.dispatchers)
        return {d.task.state for d in everyone if d.task and d.worker.holds}
