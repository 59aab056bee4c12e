"""Pure: the batches of a job's workers, re-tuned after each step by what the step took.

Every worker runs it on the same numbers, which come with the step's exchange, and so has the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millpond.train.balance.curve import Floats, Ints
from millpond.train.balance.equal_time import Crew
from millpond.train.balance.slowness import Slowness

PATIENCE = 1.1
"""The longest step over the planned one. In simulations of 1,000 devices with 10 % of them busy, 1.25 gives
0.78 of the ideal, 1.1 gives 0.89 and 1.02 gives 0.96; but the smaller it is, the more sums come a step late.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """Batches by rank (0: sits out), the seconds that each is expected to take, and how long a step waits."""

    batches: Ints
    times: Floats
    deadline: float


class Controller:
    """Equal-time batches for ``crew``; with ``total`` their sum is fixed. A step waits ``patience`` times as
    long as planned. Raises ValueError if ``total`` cannot be had.
    """

    def __init__(self, crew: Crew, *, total: int | None = None, patience: float = PATIENCE) -> None:
        self.crew, self._total, self._patience = crew, total, patience
        self._slowness = Slowness(crew.size)
        self.plan = self._make_plan()

    @property
    def slowness(self) -> Floats:
        """How many times as long as on its curve each worker takes, as far as it is known."""
        return self._slowness.level.copy()

    def observe(self, batches: Ints, measured: Floats) -> bool:
        """The batch that each worker did last and the seconds of its whole own work for it, NaN for who did
        none in this step. Whether there is a new plan.
        """
        expected = self.crew.times(batches, self._slowness.level)
        if not self._slowness.observe(expected, measured):
            return False
        before, self.plan = self.plan, self._make_plan()
        return bool(np.any(before.batches != self.plan.batches))

    def _make_plan(self) -> Plan:
        level = self._slowness.level
        if self._total is None:
            batches = self.crew.batches(self.crew.step_seconds(level), level)
        else:
            batches = self.crew.batches_of(self._total, level)
        times = self.crew.times(batches, level)
        return Plan(batches, times, self._patience * float(times.max()))
