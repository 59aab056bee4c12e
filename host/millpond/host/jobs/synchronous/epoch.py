# SPDX-License-Identifier: Apache-2.0
"""Pure: the counts of one epoch of steps, and their summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millpond.host.jobs.synchronous.step_engine import StepOutcome


@dataclass(slots=True)
class Epoch:
    """Counts of one epoch: ``counted`` samples by worker, ``late`` samples that came a step late or more, the
    summed ``loss``, the ``seconds`` of all steps. ``exchange`` holds for each step the seconds that were
    neither the slowest worker's computation nor the optimizer's.
    """

    number: int = 1
    counted: Counter[str] = field(default_factory=Counter)
    late: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    exchange: list[float] = field(default_factory=list)

    @property
    def samples(self) -> int:
        """The number of samples that went into the model."""
        return self.counted.total()

    def count(self, outcome: StepOutcome, names: Sequence[str]) -> None:
        """Add the outcome of a step; ``names`` are the workers by rank."""
        self.seconds += outcome.seconds
        self.loss += outcome.loss
        self.late += outcome.late
        for rank, samples in outcome.counted.items():
            self.counted[names[rank]] += samples

    def applied(self, outcome: StepOutcome, seconds: float, optimizer: float) -> None:
        """Add the ``seconds`` for applying the step's mean, of which ``optimizer`` were the optimizer's."""
        self.seconds += seconds
        self.exchange.append(max(0.0, outcome.seconds - outcome.work) + seconds - optimizer)

    def summary(self) -> str:
        """Return one line: loss, speed, exchange, each worker's share of the samples."""
        speed = self.samples / max(self.seconds, 1e-9)
        exchange = 1000 * median(self.exchange) if self.exchange else 0.0
        shares = ", ".join(f"{name} {n / self.samples:.1%}" for name, n in sorted(self.counted.items()))
        late = f" ({self.late / self.samples:.1%} late)" if self.late else ""
        return (
            f"training loss {self.loss / self.samples:.4f}, "
            f"{self.samples} samples{late} in {self.seconds:.2f} s, {speed:.1f} per second, "
            f"{exchange:.1f} ms of a step exchange; {shares}"
        )
