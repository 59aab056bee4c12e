"""Edge (shared memory): the one gate through which everything leaves the device.

Every process of the agent that holds a socket towards the host sends through a gate. It counts each byte by
kind and searches it, before any encryption, for canaries. Counts live in memory shared with the agent's main
process, which reports their sum: the privacy ledger.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from millpond.agent.config import Privacy
from millpond.wire.channel import Buffer
from millpond.wire.errors import LocalError
from millpond.wire.message import Kind

KINDS = tuple(Kind)


class CanaryError(LocalError):
    """Bytes that must not leave the device were about to."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Bytes to look for; ``forbidden`` ones are stopped, others only counted."""

    name: str
    data: bytes
    forbidden: bool


def patterns(privacy: Privacy) -> tuple[Pattern, ...]:
    """The configured canaries and tracers, in a fixed order that all processes share."""
    forbidden = [Pattern(name, text.encode(), True) for name, text in sorted(privacy.canaries.items())]
    counted = [Pattern(name, text.encode(), False) for name, text in sorted(privacy.tracers.items())]
    return (*forbidden, *counted)


class Tally:
    """Counters of one process, readable by another: bytes by kind, then sightings by pattern."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("ledger") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._map = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self._counters = memoryview(self._map).cast("Q")
        self._lock = threading.Lock()

    def add(self, index: int, count: int) -> None:
        """Add ``count`` to a counter."""
        with self._lock:
            self._counters[index] += count

    def __getitem__(self, index: int) -> int:
        return self._counters[index]


class Gate:
    """Counts and searches what leaves through the outlets it hands out, one for each connection."""

    def __init__(self, patterns: Sequence[Pattern], tally: Tally) -> None:
        if len(KINDS) + len(patterns) > mmap.PAGESIZE // 8:
            raise LocalError(f"{len(patterns)} canaries and tracers are too many")
        self.patterns, self.tally = tuple(patterns), tally

    def outlet(self) -> GateOutlet:
        """The outlet of a new connection."""
        return GateOutlet(self)


class GateOutlet:
    """One connection's way out: finds patterns also where they lie across two sends."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._tail = b""
        self._keep = max((len(pattern.data) for pattern in gate.patterns), default=1) - 1

    def passing(self, kind: Kind, data: Buffer) -> None:
        """Count and search ``data``. Raises CanaryError before a forbidden pattern is whole on the wire."""
        gate = self._gate
        if gate.patterns:
            self._search(data)
        gate.tally.add(KINDS.index(kind), len(data))

    def _search(self, data: Buffer) -> None:
        window = self._tail + bytes(data)
        for index, pattern in enumerate(self._gate.patterns, len(KINDS)):
            start = max(0, len(self._tail) - len(pattern.data) + 1)
            if found := window.count(pattern.data, start):
                self._gate.tally.add(index, found)
                if pattern.forbidden:
                    raise CanaryError(f"canary '{pattern.name}' was about to leave the device")
        self._tail = window[-self._keep :] if self._keep else b""


def ledger(gate: Gate, others: Sequence[Tally]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes sent by kind and sightings by pattern, over all processes."""
    tallies = (gate.tally, *others)
    sent = {str(kind): sum(tally[i] for tally in tallies) for i, kind in enumerate(KINDS)}
    seen = {
        pattern.name: sum(tally[i] for tally in tallies)
        for i, pattern in enumerate(gate.patterns, len(KINDS))
    }
    return sent, seen
