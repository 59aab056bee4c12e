# SPDX-License-Identifier: Apache-2.0
"""Pure: the counts of one epoch of exchanges, and their summary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING

from millpond.host.records.data_costs import DataCosts, shares, waiting_for_data
from millpond.host.records.jobs import Round

if TYPE_CHECKING:
    from millpond.host.jobs.training.exchange_engine import ExchangeOutcome


@dataclass(slots=True)
class Epoch:
    """Counts of one epoch: ``counted`` samples by worker, ``late`` samples that came a step late or more, the
    summed ``loss`` and its ``loss_count``, the ``seconds`` of all exchanges, the ``ages`` of the updates'
    states in exchanges, what the ``data`` of each worker cost. ``exchange`` holds for each of
    them the seconds that were neither the slowest worker's computation nor the optimizer's.
    """

    number: int = 1
    counted: Counter[str] = field(default_factory=Counter)
    late: int = 0
    loss: float = 0.0
    loss_count: float = 0.0
    seconds: float = 0.0
    exchange: list[float] = field(default_factory=list)
    exchanges: Counter[str] = field(default_factory=Counter)
    ages: list[int] = field(default_factory=list)
    data: dict[str, DataCosts] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """The number of samples that went into the model."""
        return self.counted.total()

    def count(self, outcome: ExchangeOutcome, names: Sequence[str]) -> None:
        """Add the outcome of an exchange; ``names`` are the workers by rank."""
        self.seconds += outcome.seconds
        self.loss += outcome.loss
        self.loss_count += outcome.count
        self.late += outcome.late
        self.ages += outcome.ages
        for rank, samples in outcome.counted.items():
            self.counted[names[rank]] += samples
            self.exchanges[names[rank]] += 1
        for rank, costs in outcome.data.items():
            self.data[names[rank]] = self.data.get(names[rank], DataCosts()) + costs

    def share_before(self, outcome: ExchangeOutcome, samples: int) -> float:
        """Return the share of the epoch's ``samples`` that was used before an exchange that is counted."""
        return min(1.0, max(0, self.samples - outcome.samples) / max(samples, 1))

    def applied(self, outcome: ExchangeOutcome, seconds: float, optimizer: float) -> None:
        """Add the ``seconds`` for applying the mean, of which ``optimizer`` were the optimizer's."""
        self.seconds += seconds
        self.exchange.append(max(0.0, outcome.seconds - outcome.work) + seconds - optimizer)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the epoch: mean training loss, samples per second, the share of late samples, the
        mean and the largest number of exchanges that updates were late, the median milliseconds of an
        exchange without computation, and the share of the workers' time in which they waited for data.
        """
        loss = {"training_loss": self.loss / self.loss_count} if self.loss_count else {}
        return loss | {
            "samples_per_second": self.samples / max(self.seconds, 1e-9),
            "late_share": self.late / self.samples,
            "staleness": fmean(self.ages or [0]),
            "most_staleness": float(max(self.ages, default=0)),
            "exchange_ms": 1000 * median(self.exchange) if self.exchange else 0.0,
            "waiting_share": sum(self.data.values(), DataCosts()).share,
        }

    @property
    def by_worker(self) -> dict[str, dict[str, float]]:
        """The metrics of each worker: its samples, its share of all, the exchanges that it was part of, the
        share of its time in which it waited for data.
        """
        return {
            name: {
                "samples": float(samples),
                "share": samples / self.samples,
                "exchanges": float(self.exchanges[name]),
                "waiting_share": self.data.get(name, DataCosts()).share,
            }
            for name, samples in sorted(self.counted.items())
        }


def round_summary(result: Round) -> str:
    """Return one line of a recorded round, with its late updates and its waiting for data, if any."""
    texts = [f"{result.samples} samples", f"{result.seconds:.2f} s"]
    if most := result.metrics.get("most_staleness"):
        texts.append(f"states {result.metrics['staleness']:.1f} rounds old, {most:.0f} at most")
    return ", ".join(filter(None, [*texts, waiting_for_data(shares(result.data))]))


def summary(result: Round) -> str:
    """Return one line of a recorded epoch: loss, speed, exchange, each worker's share of the samples."""
    found = result.metrics
    wait = waiting_for_data(shares(result.data))
    parts = ", ".join(f"{name} {own['share']:.1%}" for name, own in sorted(result.by_worker.items()))
    late = f" ({found['late_share']:.1%} late)" if found["late_share"] else ""
    return (
        f"training loss {found.get('training_loss', math.nan):.4f}, "
        f"{result.samples} samples{late} in {result.seconds:.2f} s, {found['samples_per_second']:.1f} per "
        f"second, {found['exchange_ms']:.1f} ms of a step exchange; {parts}"
        f"{f'; {wait}' if wait else ''}"
    )
