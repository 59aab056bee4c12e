# SPDX-License-Identifier: Apache-2.0
"""Pure: histograms of durations, cheap enough to count each request."""

from __future__ import annotations

from collections.abc import Sequence

_CLASSES = 32  # of durations: the last one holds everything above half an hour


class Latencies:
    """A histogram of request durations for each kind of request: a class is the number of bits of the
    microseconds.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, list[int]] = {}

    def add(self, kind: str, seconds: float) -> None:
        """Count a request of this kind. Two threads at once may lose one count, which is accepted."""
        classes = self.kinds.get(kind)
        if classes is None:
            classes = self.kinds.setdefault(kind, [0] * _CLASSES)
        classes[min(int(seconds * 1e6).bit_length(), _CLASSES - 1)] += 1


def percentile(classes: Sequence[int], share: float) -> float:
    """Return the seconds within which this share of the requests ended, to within a half; 0 if there were
    none.
    """
    wanted, seen = share * sum(classes), 0
    for bits, count in enumerate(classes):
        seen += count
        if count and seen >= wanted:
            return 0.75 * (1 << bits) / 1e6
    return 0.0
