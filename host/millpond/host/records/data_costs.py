# SPDX-License-Identifier: Apache-2.0
"""Pure: the cost of a job's data by the workers' measurements, and its texts for users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from millpond.train.protocol import StreamTiming, Update

RECENT: Final = 5
"""The rounds of which the waiting of a running job is told."""
CONSIDERABLE: Final = 0.05
"""The share of its time from which on a worker is said to wait for data."""
BRIEF: Final = 0.5
"""The seconds of waiting below which it is not told: its share says nothing about a job of a few seconds."""


@dataclass(frozen=True, slots=True)
class DataCosts:
    """The cost of one worker's data in ``exchanges`` exchanges, which had ``trained`` samples to train on,
    and whose local computation took ``seconds``. In ``waited`` of them it was blocked for its next batch or
    mini-epoch, in ``stalled`` for a mini-epoch. ``reading`` are the seconds of reading ``samples`` samples,
    of ``size`` bytes together, in all threads; ``batches`` those that were trained on, or parts of them.
    ``mini_epochs`` is their number, and ``[tier] fast`` last held two of ``fitting`` samples; a rule repeated
    them ``repeats`` times together, 0 without one. ``stream`` is the last choice for a stream.
    """

    seconds: float = 0.0
    waited: float = 0.0
    stalled: float = 0.0
    reading: float = 0.0
    exchanges: int = 0
    trained: int = 0
    samples: int = 0
    size: int = 0
    batches: int = 0
    mini_epochs: int = 0
    fitting: int = 0
    stream: StreamTiming | None = None
    repeats: int = 0

    @classmethod
    def of(cls, update: Update, trained: int, most: float) -> DataCosts:
        """Return the costs of an exchange that took ``most`` seconds at most, as the host has seen."""
        data, seconds = update.data, min(update.seconds, most)
        return cls(
            seconds,
            seconds * data.waited / 100,
            seconds * data.stalled / 100,
            data.reading,
            1,
            trained,
            data.samples,
            data.size,
            data.batches,
            data.mini_epochs,
            data.fitting,
            data.stream,
            data.repeats,
        )

    def __add__(self, later: DataCosts) -> DataCosts:
        return DataCosts(
            self.seconds + later.seconds,
            self.waited + later.waited,
            self.stalled + later.stalled,
            self.reading + later.reading,
            self.exchanges + later.exchanges,
            self.trained + later.trained,
            self.samples + later.samples,
            self.size + later.size,
            self.batches + later.batches,
            self.mini_epochs + later.mini_epochs,
            later.fitting or self.fitting,
            later.stream or self.stream,
            self.repeats + later.repeats,
        )

    @property
    def share(self) -> float:
        """The share of its time in which the worker waited for data."""
        return self.waited / self.seconds if self.seconds else 0.0


def total(rounds: Iterable[Mapping[str, DataCosts]]) -> dict[str, DataCosts]:
    """Return the costs of each worker in some rounds together."""
    found: dict[str, DataCosts] = {}
    for costs in rounds:
        for worker, own in costs.items():
            found[worker] = found.get(worker, DataCosts()) + own
    return dict(sorted(found.items()))


def shares(costs: Mapping[str, DataCosts]) -> dict[str, float]:
    """Return the share of its time in which each worker waited for data; 0 for less than BRIEF seconds."""
    return {worker: own.share if own.waited >= BRIEF else 0.0 for worker, own in costs.items()}


def waiting(waits: Mapping[str, float], named: int = 3) -> str:
    """Return the share in which workers waited for data: "43 %", the mean of those that wait considerably,
    with the names of these, or if they are more than ``named`` their number, where others do not; "" if none
    does.
    """
    slow = [worker for worker, share in waits.items() if share >= CONSIDERABLE]
    if not slow:
        return ""
    text = f"{100 * sum(waits[worker] for worker in slow) / len(slow):.0f} %"
    if len(slow) == len(waits) > 1:
        return text
    names = ", ".join(slow) if len(slow) <= named else f"{len(slow)} of {len(waits)}"
    return f"{text} ({names})"


def waiting_for_data(waits: Mapping[str, float]) -> str:
    """Return the same as a job's status: "waiting for data 43 %", or ""."""
    found = waiting(waits)
    return f"waiting for data {found}" if found else ""
