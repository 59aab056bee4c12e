# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): profiles workers before they take part: seconds of an exchange by batch.

The measured time is that from the task to the head of its update here. The samples are synthetic, and the
updates are thrown away: no private data is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millpond.host.workers.dispatcher import Assignment, Dispatcher, WorkerAnswer, WorkerLoss
from millpond.host.workers.worker import ModelState
from millpond.train.balance.profiling import Probe, Profile
from millpond.train.protocol import Work

MEASURE = -1
"""The number of a profiling task, which belongs to no exchange."""


Done = Callable[[Dispatcher, Profile], None]
Lost = Callable[[WorkerLoss], None]


@dataclass(frozen=True, slots=True)
class _Probed:
    """A worker that is measured, of a ``kind``; what is called with its profile, or with its loss."""

    probe: Probe
    kind: str
    done: Done
    lost: Lost


class Profiler:
    """Workers that are being profiled."""

    def __init__(self) -> None:
        self._probes: dict[Dispatcher, _Probed] = {}

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
        self, dispatcher: Dispatcher, kind: str, probe: Probe, state: ModelState, done: Done, lost: Lost
    ) -> None:
        """Begin to profile a worker at ``state``. Either ``done`` or ``lost`` is called in the end."""
        self._probes[dispatcher] = _Probed(probe, kind, done, lost)
        self._next(dispatcher, state)

    def handle(self, event: WorkerAnswer | WorkerLoss) -> None:
        """Handle an answer or a loss of a worker that is being profiled."""
        dispatcher = event.dispatcher
        if isinstance(event, WorkerLoss):
            self._probes.pop(dispatcher).lost(event)
            return
        dispatcher.task = None
        self._probes[dispatcher].probe.add(event.update.samples, event.seconds, event.update.peak)
        self._next(dispatcher, event.task.state)

    def _next(self, dispatcher: Dispatcher, state: ModelState) -> None:
        probed = self._probes[dispatcher]
        batch = probed.probe.next()
        if batch is not None:
            dispatcher.begin(Assignment(Work(MEASURE, 0, 0, (), synthetic=batch), state))
            return
        del self._probes[dispatcher]
        probed.done(dispatcher, Profile(dispatcher.worker.name, probed.kind, probed.probe.points))
