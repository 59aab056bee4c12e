"""Edge (the clock): workers measured before they take part: how long steps of which batches take them.

What is measured is what a step waits for: from the task to its answer here, with all that lies between. The
sums are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millpond.host.link import Answer, Link, Loss, Samples, Task
from millpond.host.workers import ModelState
from millpond.train.balance.profiling import Probe, Profile
from millpond.train.protocol import Compute

MEASURE = -1
"""The number of a step that is none."""


class Measuring:
    """Those that are being measured. ``done`` is called with each link and its profile, ``lost`` with those
    that are lost meanwhile.
    """

    def __init__(self, done: Callable[[Link, Profile], None], lost: Callable[[Loss], None]) -> None:
        self._done, self._lost = done, lost
        self._probes: dict[Link, tuple[Probe, str, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._probes)

    @property
    def links(self) -> tuple[Link, ...]:
        """Those that are being measured."""
        return tuple(self._probes)

    def __contains__(self, link: object) -> bool:
        return link in self._probes

    @property
    def ranks(self) -> set[int]:
        """Of those that are being measured."""
        return {link.rank for link in self._probes}

    def begin(self, link: Link, kind: str, probe: Probe, parts: Sequence[int], state: ModelState) -> None:
        """Measure a worker that has ``parts`` samples by folder, at ``state``."""
        self._probes[link] = probe, kind, tuple(parts)
        self._next(link, state)

    def take(self, event: Answer | Loss) -> None:
        """One of them has answered, or is lost."""
        link = event.link
        if isinstance(event, Loss):
            del self._probes[link]
            self._lost(event)
            return
        link.task = None
        probe, _, _ = self._probes[link]
        probe.add(event.computed.samples, event.seconds, event.computed.peak)
        self._next(link, event.task.state)

    def _next(self, link: Link, state: ModelState) -> None:
        probe, kind, parts = self._probes[link]
        batch = probe.next()
        if batch is not None:
            link.begin(Task(Compute(MEASURE, 0, _first(batch, parts)), state))
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
