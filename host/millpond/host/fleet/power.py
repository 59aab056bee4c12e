# SPDX-License-Identifier: Apache-2.0
"""Pure: the energy of a device by its load reports, checked and completed from declared watts."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from millpond.energy import joules
from millpond.energy.joules import Watts
from millpond.wire.control_messages import Load

LATE_SECONDS = 10.0
"""Length of the window over which the recent power is averaged."""
_MOST = 1e15


class DevicePower:
    """The energy of one device. ``declared`` watts count where the agent knows no energy. An ``emulated``
    device's sensors measure the whole machine, so their figures are dropped.
    """

    def __init__(self, declared: Watts | None, *, emulated: bool) -> None:
        self._declared, self._emulated = declared, emulated
        self._boot = ""
        self._at = self._total = 0.0
        self._late: deque[tuple[float, float]] = deque()

    def take(self, load: Load, boot: str, now: float) -> Load:
        """Return the load that an agent, started as ``boot``, reported at ``now`` (s), with a credible
        energy. Energy from declared watts counts from the first load on.
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
        """The mean power over the last LATE_SECONDS; None while unknown."""
        if len(self._late) < 2:
            return None
        (began, before), (ended, after) = self._late[0], self._late[-1]
        return (after - before) / (ended - began) if ended > began else None

    def _believed(self, load: Load) -> Load:
        """Return the load without impossible figures: texts of JSON have no NaN."""
        load = replace(
            load,
            cpu=load.cpu if math.isfinite(load.cpu) else 0.0,
            temperature=_finite(load.temperature),
            drive=replace(load.drive, wear=_finite(load.drive.wear)),
            time=_finite(load.time) or 0.0,
            budgets=tuple((folder, spent) for folder, spent in load.budgets if math.isfinite(spent)),
        )
        foreign = self._emulated and load.energy != "declared"
        if foreign or load.energy == "unknown":
            return replace(load, joules=None, energy="unknown")
        good = load.joules is not None and 0 <= load.joules <= _MOST
        return load if good else replace(load, joules=None)

    def _count(self, watts: Watts, cpu: float, now: float) -> float:
        """Add the declared energy since the last load; ``cpu`` is the processor's share of that time."""
        seconds, share = now - self._at, cpu if math.isfinite(cpu) else 0.0
        self._total += joules.declared(watts, seconds, max(share, 0.0) * seconds, 1)
        return self._total


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
