# SPDX-License-Identifier: Apache-2.0
"""Pure: a mount's statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.fs.vfs.latencies import Latencies


class OperationMeter(Latencies):
    """Durations of requests to the server. ``ahead`` are bytes read ahead, ``ahead_used`` those of them that
    a program then read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ahead, self.ahead_used = 0, 0


@dataclass(frozen=True, slots=True)
class MountStats:
    """The statistics of one mount: kernel requests by operation, durations of requests to the device by kind,
    bytes read ahead and bytes of them used, bytes written that the device does not have yet (``dirty``);
    durations of operations as programs see them, and their errors by errno.
    """

    device: str
    mountpoint: str
    how: str = ""
    asked: dict[str, int] = field(default_factory=dict)
    took: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ahead: int = 0
    ahead_used: int = 0
    dirty: int = 0
    operations: dict[str, tuple[int, ...]] = field(default_factory=dict)
    errors: dict[str, dict[str, int]] = field(default_factory=dict)


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
