# SPDX-License-Identifier: Apache-2.0
"""Pure: counts a mount's requests and their durations, cheaply enough to do so for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_CLASSES = 32  # of durations: the last one holds everything above half an hour


class OperationMeter:
    """A histogram of request durations for each kind of request: a class is the number of bits of the
    microseconds.

    ``ahead`` are bytes read ahead, ``ahead_used`` those of them that a program then read.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, list[int]] = {}
        self.ahead, self.ahead_used = 0, 0

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


@dataclass(frozen=True, slots=True)
class MountStats:
    """The statistics of one mount: kernel requests by operation, durations of requests to the device by kind,
    bytes read ahead and bytes of them used.
    """

    device: str
    mountpoint: str
    how: str = ""
    asked: dict[str, int] = field(default_factory=dict)
    took: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ahead: int = 0
    ahead_used: int = 0


_SENT = {
    "lookup": ("fs.walk",),
    "getattr": ("fs.getattr",),
    "read": ("fs.read", "fs.readfile"),
}


def answered_here(numbers: MountStats) -> dict[str, tuple[int, int]]:
    """Return for each operation how many kernel requests were answered from the cache, and how many there
    were.

    Requests that the kernel answers from its own cache are not counted at all.
    """
    found = {}
    for operation, kinds in _SENT.items():
        asked = numbers.asked.get(operation, 0)
        sent = sum(sum(numbers.took.get(kind, ())) for kind in kinds)
        found[operation] = max(0, asked - sent), asked
    return found
