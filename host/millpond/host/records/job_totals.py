# SPDX-License-Identifier: Apache-2.0
"""Pure: the totals of a job's finished rounds, whose size does not grow with their number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from millpond.host.records.jobs import Round

TRAINING: Final = "train"
"""The place of figures of training, beside "host" and "devices"."""
MOST_FIGURES: Final = 32
"""Figures of a job that are kept: a job's author names them."""


@dataclass(frozen=True, slots=True)
class JobTotals:
    """The totals of a job's rounds: ``seconds`` in all, ``samples`` and ``joules`` by worker, bytes ``to``
    and ``back`` by device, rounds without a worker in ``missing``, ``events`` by kind. ``last`` is the last
    round, ``figures`` are the last ones by place and name.
    """

    seconds: float = 0.0
    samples: Mapping[str, int] = field(default_factory=dict)
    joules: Mapping[str, float] = field(default_factory=dict)
    to: Mapping[str, int] = field(default_factory=dict)
    back: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, int] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    figures: Mapping[tuple[str, str], float] = field(default_factory=dict)
    last: Round | None = None

    def plus(self, rounds: Iterable[Round]) -> JobTotals:
        """Return the totals with further rounds."""
        seconds, last, figures = self.seconds, self.last, dict(self.figures)
        joules = dict(self.joules)
        counted = (self.samples, self.to, self.back, self.missing, self.events)
        samples, to, back, missing, events = map(Counter, counted)
        for last in rounds:
            seconds += last.seconds
            samples.update(last.workers)
            missing.update(last.missing.keys())
            events.update(event.kind for event in last.events)
            for device, (sent, received) in last.tunnel.items():
                to[device] += sent
                back[device] += received
            for worker, used in last.joules.items():
                joules[worker] = joules.get(worker, 0.0) + used
            figures |= figures_of(last)
        kept = dict(list(figures.items())[:MOST_FIGURES])
        return JobTotals(seconds, samples, joules, to, back, missing, events, kept, last)


def figures_of(result: Round) -> dict[tuple[str, str], float]:
    """Return the figures of a round by place and name, without those that are not finite."""
    scored = {(place, name): value for place, own in result.scores.items() for name, value in own.items()}
    trained = {(TRAINING, name): value for name, value in result.metrics.items()}
    return {key: value for key, value in (scored | trained).items() if value is not None}
