"""Pure: what a device's loads say about the energy that it takes, and what is to be believed of it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from millpond.energy import joules
from millpond.energy.joules import Watts
from millpond.wire.control_messages import Load

LATE_SECONDS = 10.0
"""What the present power is the mean of."""
_MOST = 1e15


class DevicePower:
    """One device's. ``declared`` holds where it does not know by itself. What an ``emulated`` one measures is
    not its own.
    """

    def __init__(self, declared: Watts | None, *, emulated: bool) -> None:
        self._declared, self._emulated = declared, emulated
        self._boot = ""
        self._at = self._total = 0.0
        self._late: deque[tuple[float, float]] = deque()

    def take(self, load: Load, boot: str, now: float) -> Load:
        """The load of an agent that was started as ``boot``, heard at ``now`` (s), with its energy as it is
        to be believed. Where that comes from what the host declares, it counts from the first load on.
        """
        if boot != self._boot:
            self._boot, self._at, self._total = boot, now, 0.0
            self._late.clear()
        load = self._believed(load)
        if load.energy == "unknown" and self._declared:
            load = replace(load, joules=self._count(self._declared, load.cpu, now), energy="declared")
        self._at = now
        if load.joules is None or (self._late and load.joules < self._late[-1][1]):
            self._late.clear()
        if load.joules is not None:
            self._late.append((now, load.joules))
        while len(self._late) > 2 and now - self._late[1][0] >= LATE_SECONDS:
            self._late.popleft()
        return load

    @property
    def watts(self) -> float | None:
        """What it has taken of late; None while that is not known."""
        if len(self._late) < 2:
            return None
        (began, before), (ended, after) = self._late[0], self._late[-1]
        return (after - before) / (ended - began) if ended > began else None

    def _believed(self, load: Load) -> Load:
        """Figures that can not be are none."""
        foreign = self._emulated and load.energy != "declared"
        if foreign or load.energy == "unknown":
            return replace(load, joules=None, energy="unknown")
        good = load.joules is not None and 0 <= load.joules <= _MOST
        return load if good else replace(load, joules=None)

    def _count(self, watts: Watts, cpu: float, now: float) -> float:
        """``cpu`` is of the time since the load before."""
        seconds, share = now - self._at, cpu if math.isfinite(cpu) else 0.0
        self._total += joules.declared(watts, seconds, max(share, 0.0) * seconds, 1)
        return self._total
