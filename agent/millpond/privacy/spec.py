# SPDX-License-Identifier: Apache-2.0
"""Pure: the table ``[privacy]`` of a job, and what its rounds cost."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal

from millpond.base.keys import Key
from millpond.privacy.accounting import rho_of

_REACH = 8.0
"""The standard deviations within which noise lies: it is beyond them once in 10**15 values."""


@dataclass(frozen=True, slots=True)
class PrivacySpec:
    """Differential privacy of a job in rounds: all its rounds together are (epsilon, delta)-private for each
    ``unit``. Devices clip updates at limits.clip, and add noise to them. Losses do not leave them.
    """

    epsilon: Annotated[float, Key("what all rounds together may tell of a unit", above=0, example="3.0")]
    delta: Annotated[float, Key("probability with which they may tell more", above=0, most=0.1)] = 1e-5
    unit: Annotated[
        Literal["device", "group"],
        Key(
            'what is protected: all samples of a "device", or each "group" of policy.least_samples, which '
            "the worker clips, unseen by the agent"
        ),
    ] = "device"

    def rho(self, rounds: int) -> float:
        """Return the cost of one of so many rounds, see ``accounting``."""
        return rho_of(self.epsilon, self.delta) / max(rounds, 1)

    def multiplier(self, rounds: int) -> float:
        """Return the standard deviation of a round's noise over the largest norm of what a unit adds."""
        return 1 / math.sqrt(2 * self.rho(rounds))

    def plan(self, rounds: int) -> str:
        """Return one line about the noise of so many rounds."""
        return (
            f"privacy: {rounds} rounds are ({self.epsilon:g}, {self.delta:g})-private for each {self.unit}: "
            f"the noise of a sum has {self.multiplier(rounds):.3g} times the clip as its standard deviation"
        )

    def reach(self, rounds: int) -> float:
        """Return how far noise reaches, over the largest norm of what a unit adds."""
        return _REACH * self.multiplier(rounds)

    def largest(self, clip: float, rounds: int, samples: Collection[int]) -> float:
        """Return a bound of the values of each term of a sum of updates of so many ``samples``, such that the
        sum of the terms' bounds is one of the sum with its noise.
        """
        counts = 1 if self.unit == "device" else max(samples)  # a group has a sample at least
        # Of the devices that add noise a third may be lost: all of them add up to twice what is needed.
        return clip * (counts + 2 * self.reach(rounds) / len(samples))
