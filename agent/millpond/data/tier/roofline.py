# SPDX-License-Identifier: Apache-2.0
"""Pure: the roofline of reading: what a network can reach where samples come at some bandwidth.

The arithmetic intensity of a network is its operations per byte of a sample (Xu et al., *Data-Aware Storage
Tiering for Deep Learning*, section II.A). Where ``bandwidth * intensity`` is below the peak of the
processors, reading is the limit.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Roofline:
    """Processors of ``peak`` operations per second, and ``bandwidth`` bytes per second of samples."""

    peak: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class NetworkPoint:
    """A network under a roofline: its ``intensity`` in operations per byte, the ``needed`` bytes per second
    that keep the processors busy, the operations per second that are ``reached``, and its samples per second.
    """

    intensity: float
    needed: float
    reached: float
    samples: float

    @property
    def share(self) -> float:
        """The share of the needed bandwidth that is there, 1 at most: that of the peak that is reached."""
        return self.reached / (self.needed * self.intensity)


def point(system: Roofline, operations: float, sample_bytes: float) -> NetworkPoint:
    """Return where a network lies that takes so many ``operations`` to train on one sample of so many
    bytes.
    """
    intensity = operations / sample_bytes
    reached = min(system.peak, system.bandwidth * intensity)
    return NetworkPoint(intensity, system.peak / intensity, reached, reached / operations)
