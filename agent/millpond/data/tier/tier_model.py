# SPDX-License-Identifier: Apache-2.0
"""Pure: training over a slow and a fast tier, by the formula of mini-epoch training and by events.

A consumer takes ``peak`` samples per second if it never waits. The slow tier gives ``slow`` bytes per
second; a mini-epoch that is repeated ``rf`` times needs new samples at ``peak / rf``. Xu et al. (*Data-Aware
Storage Tiering for Deep Learning*, equation 1) give the bandwidth that is read as the mean over time of
``MAX(need / rf, B2)``. As printed it is never below ``B2``, against their own 30.4 GB/s for ``rf = 128``; a
tier cannot give more than it has, so it is ``MIN`` here, with which that figure follows (3.8 TB/s / 128 =
29.7 GB/s; they count 1024 GB in a TB). Their 90.7 and 147 GB/s for means of 55 and 35 are means over
mini-epochs, as if all times ``t_i`` were equal; the mean over time of ``need / rf`` is ``need`` over the mean
of ``rf``, 69 and 109 GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TieredSystem:
    """A consumer of ``peak`` samples per second, of ``sample_bytes`` each, over a slow tier of ``slow`` bytes
    per second and a fast one of ``fast``, which bounds the consumer, too.
    """

    peak: float
    sample_bytes: float
    slow: float
    fast: float

    @property
    def rate(self) -> float:
        """The samples per second that are consumed from the fast tier."""
        return min(self.peak, self.fast / self.sample_bytes)


@dataclass(frozen=True, slots=True)
class TieredTraining:
    """The outcome: samples per second, bytes per second that are read from the slow tier, and the share of
    the time in which the consumer waits.
    """

    throughput: float
    read: float
    stall: float


def predicted(system: TieredSystem, repeats: Sequence[float]) -> TieredTraining:
    """Return the outcome by equation 1, for mini-epochs of one size that are repeated so often."""
    fetch = system.sample_bytes / system.slow  # seconds for each sample of a mini-epoch
    times = [max(rf / system.rate, fetch) for rf in repeats]
    whole = sum(times)
    need = system.rate * system.sample_bytes
    read = sum(time * min(need / rf, system.slow) for time, rf in zip(times, repeats, strict=True)) / whole
    stall = sum(time - rf / system.rate for time, rf in zip(times, repeats, strict=True)) / whole
    return TieredTraining(sum(repeats) / whole, read, stall)


def simulated(
    system: TieredSystem, repeats: Sequence[float], size: float, *, cold: bool = False
) -> TieredTraining:
    """Return the outcome by events, for mini-epochs of ``size`` samples: the next one is fetched from the
    time at which one begins, and one begins when it is there and the one before is done. The fetch of the
    first is counted only if ``cold``: training does not begin before it, but each round of a job does.
    """
    fetch = size * system.sample_bytes / system.slow
    now, there, waited = 0.0, fetch if cold else 0.0, 0.0
    for number, rf in enumerate(repeats):
        waited += max(there - now, 0.0)
        began = max(now, there)
        there = began + fetch if number + 1 < len(repeats) else began
        now = began + rf * size / system.rate
    read = (len(repeats) - (not cold)) * size * system.sample_bytes / now
    return TieredTraining(sum(repeats) * size / now, read, waited / now)
