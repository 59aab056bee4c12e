"""Edge (the clock): workers measured before they take part: how long steps of which batches take them.

What is measured is what a step waits for: from the task to its answer here, with all that lies between. The
sums are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millpond.host.workers.dispatcher import Dispatcher, GradientTask, Samples, WorkerAnswer, WorkerLoss
from millpond.host.workers.worker import ModelState
from millpond.train.balance.profiling import Probe, Profile
from millpond.train.protocol import Compute

MEASURE = -1
"""The number of a step that is none."""


class Profiler:
    """Those that are being measured. ``done`` is called with each link and its profile, ``lost`` with those
    that are lost meanwhile.
    """

    def __init__(
        self, done: Callable[[Dispatcher, Profile], None], lost: Callable[[WorkerLoss], None]
    ) -> None:
        self._done, self._lost = done, lost
        self._probes: dict[Dispatcher, tuple[Probe, str, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._probes)

    @property
    def links(self) -> tuple[Dispatcher, ...]:
        """Those that are being measured."""
        return tuple(self._probes)

    def __contains__(self, link: object) -> bool:
        return link in self._probes

    @property
    def ranks(self) -> set[int]:
        """Of those that are being measured."""
        return {link.rank for link in self._probes}

    def begin(
        self, link: Dispatcher, kind: str, probe: Probe, parts: Sequence[int], state: ModelState
    ) -> None:
        """Measure a worker that has ``parts`` samples by folder, at ``state``."""
        self._probes[link] = probe, kind, tuple(parts)
        self._next(link, state)

    def take(self, event: WorkerAnswer | WorkerLoss) -> None:
        """One of them has answered, or is lost."""
        link = event.link
        if isinstance(event, WorkerLoss):
            del self._probes[link]
            self._lost(event)
            return
        link.task = None
        probe, _, _ = self._probes[link]
        probe.add(event.computed.samples, event.seconds, event.computed.peak)
        self._next(link, event.task.state)

    def _next(self, link: Dispatcher, state: ModelState) -> None:
        probe, kind, parts = self._probes[link]
        batch = probe.next()
        if batch is not None:
            link.begin(GradientTask(Compute(MEASURE, 0, _first(batch, parts)), state))
            return
        del self._probes[link]
        self._done(link, Profile(link.worker.name, kind, probe.points))


def _first(batch: int, parts: Sequence[int]) -> Samples:
    """The first ``batch`` samples, by folder."""
    found = []
    for count in parts:
        found.append(tuple(range(min(batch, count))))
        batch -= len(found[-1])
    return tuple(found)
