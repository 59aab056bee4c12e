# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): profiles workers before they take part: seconds of a step by batch.

The measured time is the time a step would wait: from the task to its answer here, with all transfers. The
gradients are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millpond.host.workers.dispatcher import Dispatcher, GradientTask, Samples, WorkerAnswer, WorkerLoss
from millpond.host.workers.worker import ModelState
from millpond.train.balance.profiling import Probe, Profile
from millpond.train.protocol import Compute

MEASURE = -1
"""The step number of a profiling task, which belongs to no step."""


class Profiler:
    """Workers that are being profiled. Calls ``done`` with a dispatcher and its profile, ``lost`` with the
    loss of a worker.
    """

    def __init__(
        self, done: Callable[[Dispatcher, Profile], None], lost: Callable[[WorkerLoss], None]
    ) -> None:
        self._done, self._lost = done, lost
        self._probes: dict[Dispatcher, tuple[Probe, str, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._probes)

    @property
    def dispatchers(self) -> tuple[Dispatcher, ...]:
        """The dispatchers of the workers that are being profiled."""
        return tuple(self._probes)

    def __contains__(self, dispatcher: object) -> bool:
        return dispatcher in self._probes

    @property
    def ranks(self) -> set[int]:
        """The ranks of the workers that are being profiled."""
        return {dispatcher.rank for dispatcher in self._probes}

    def begin(
        self, dispatcher: Dispatcher, kind: str, probe: Probe, parts: Sequence[int], state: ModelState
    ) -> None:
        """Begin to profile a worker that has ``parts`` samples by folder, at ``state``."""
        self._probes[dispatcher] = probe, kind, tuple(parts)
        self._next(dispatcher, state)

    def handle(self, event: WorkerAnswer | WorkerLoss) -> None:
        """Handle an answer or a loss of a worker that is being profiled."""
        dispatcher = event.dispatcher
        if isinstance(event, WorkerLoss):
            del self._probes[dispatcher]
            self._lost(event)
            return
        dispatcher.task = None
        probe, _, _ = self._probes[dispatcher]
        probe.add(event.computed.samples, event.seconds, event.computed.peak)
        self._next(dispatcher, event.task.state)

    def _next(self, dispatcher: Dispatcher, state: ModelState) -> None:
        probe, kind, parts = self._probes[dispatcher]
        batch = probe.next()
        if batch is not None:
            dispatcher.begin(GradientTask(Compute(MEASURE, 0, _first(batch, parts)), state))
            return
        del self._probes[dispatcher]
        self._done(dispatcher, Profile(dispatcher.worker.name, kind, probe.points))


def _first(batch: int, parts: Sequence[int]) -> Samples:
    """Return the indices of the first ``batch`` samples, by folder."""
    found = []
    for count in parts:
        found.append(tuple(range(min(batch, count))))
        batch -= len(found[-1])
    return tuple(found)
