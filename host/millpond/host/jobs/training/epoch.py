# SPDX-License-Identifier: Apache-2.0
"""Pure: the counts of one epoch of exchanges, and their summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from millpond.host.model.jobs import Round

if TYPE_CHECKING:
    from millpond.host.jobs.training.exchange_engine import ExchangeOutcome


@dataclass(slots=True)
class Epoch:
    """Counts of one epoch: ``counted`` samples by worker, ``late`` samples that came a step late or more, the
    summed ``loss`` and its ``loss_count``, the ``seconds`` of all exchanges. ``exchange`` holds for each of
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
        for rank, samples in outcome.counted.items():
            self.counted[names[rank]] += samples
            self.exchanges[names[rank]] += 1

    def applied(self, outcome: ExchangeOutcome, seconds: float, optimizer: float) -> None:
        """Add the ``seconds`` for applying the mean, of which ``optimizer`` were the optimizer's."""
        self.seconds += seconds
        self.exchange.append(max(0.0, outcome.seconds - outcome.work) + seconds - optimizer)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the epoch: mean training loss, samples per second, the share of late samples, and
        the median milliseconds of an exchange without computation.
        """
        return {
            "training_loss": self.loss / max(self.loss_count, 1e-9),
            "samples_per_second": self.samples / max(self.seconds, 1e-9),
            "late_share": self.late / self.samples,
            "exchange_ms": 1000 * median(self.exchange) if self.exchange else 0.0,
        }

    @property
    def by_worker(self) -> dict[str, dict[str, float]]:
        """The metrics of each worker: its samples, its share of all, the exchanges that it was part of."""
        return {
            name: {
                "samples": float(samples),
                "share": samples / self.samples,
                "exchanges": float(self.exchanges[name]),
            }
            for name, samples in sorted(self.counted.items())
        }


def summary(result: Round) -> str:
    """Return one line of a recorded epoch: loss, speed, exchange, each worker's share of the samples."""
    found = result.metrics
    shares = ", ".join(f"{name} {own['share']:.1%}" for name, own in sorted(result.by_worker.items()))
    late = f" ({found['late_share']:.1%} late)" if found["late_share"] else ""
    return (
        f"training loss {found['training_loss']:.4f}, "
        f"{result.samples} samples{late} in {result.seconds:.2f} s, {found['samples_per_second']:.1f} per "
        f"second, {found['exchange_ms']:.1f} ms of a step exchange; {shares}"
    )
