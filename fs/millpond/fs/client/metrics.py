"""Pure: what a mount counts of itself, cheaply enough for every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_CLASSES = 32  # of durations: the last holds all above half an hour


class OperationMeter:
    """How long requests took: of each kind, how many in each class. The class is the number of bits of the
    microseconds. ``ahead`` are bytes read ahead, ``ahead_used`` those of them that were asked for.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, list[int]] = {}
        self.ahead, self.ahead_used = 0, 0

    def took(self, kind: str, seconds: float) -> None:
        """One more of this kind. Two threads at once may lose one, which is as well."""
        classes = self.kinds.get(kind)
        if classes is None:
            classes = self.kinds.setdefault(kind, [0] * _CLASSES)
        classes[min(int(seconds * 1e6).bit_length(), _CLASSES - 1)] += 1


def percentile(classes: Sequence[int], share: float) -> float:
    """The seconds that this share of the requests took at most, to within a half; 0 if there are none."""
    wanted, seen = share * sum(classes), 0
    for bits, count in enumerate(classes):
        seen += count
        if count and seen >= wanted:
            return 0.75 * (1 << bits) / 1e6
    return 0.0


@dataclass(frozen=True, slots=True)
class MountStats:
    """Of one mount: what its kernel asked, by operation; how long the requests to the device took, by kind;
    bytes read ahead, and those of them that were used.
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
    """Of what the kernel asked: how much was answered without asking the device, and how much there was. What
    the kernel keeps itself it does not even ask.
    """
    found = {}
    for operation, kinds in _SENT.items():
        asked = numbers.asked.get(operation, 0)
        sent = sum(sum(numbers.took.get(kind, ())) for kind in kinds)
        found[operation] = max(0, asked - sent), asked
    return found
