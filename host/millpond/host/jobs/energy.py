# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): the energy that the workers of a job take: differences of their meters' counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from millpond.energy.joules import Source
from millpond.energy.sensors import EnergyMeter
from millpond.host.fleet.device import Device
from millpond.host.fleet.lifecycle import DeviceState


@dataclass(frozen=True, slots=True)
class Reading:
    """Joules that a meter had counted ``at`` a time (s), and the recent power in watts. ``meter_id`` changes
    when a meter starts again from zero: readings with different ids cannot be subtracted.
    """

    joules: float
    source: Source
    meter_id: str
    at: float
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class Readings:
    """Readings ``by_worker`` of all known meters, taken at one time (s)."""

    at: float
    by_worker: Mapping[str, Reading]


class FleetMeters:
    """The meters of the host, under the name of its worker, and of its devices. Safe to use from several
    threads.
    """

    def __init__(self, host: str, meter: EnergyMeter, devices: Mapping[str, Device]) -> None:
        self._host, self._meter, self._devices = host, meter, devices
        self._lock = threading.Lock()

    def read(self) -> Readings:
        """Read the host's meter now, and take the last report of each device."""
        found = {name: reading for name, device in self._devices.items() if (reading := _read_device(device))}
        with self._lock:
            own, now = self._meter.read(), time.monotonic()
        if own:
            found[self._host] = Reading(own.joules, own.source, "", now)
        return Readings(now, found)


def _read_device(device: Device) -> Reading | None:
    status = device.status
    load, welcome = status.load, status.welcome
    if status.state is not DeviceState.READY or load is None or welcome is None or load.joules is None:
        return None
    return Reading(load.joules, load.energy, welcome.boot, status.heard, status.watts)


@dataclass(frozen=True, slots=True)
class JobEnergy:
    """Joules by worker where known, and sources by worker: "unknown" for others that took part."""

    joules: dict[str, float]
    energy: dict[str, str]


def between(before: Readings | None, after: Readings, took_part: Collection[str]) -> JobEnergy:
    """Return the energy taken between two readings, with an entry for each worker in ``took_part``. Nothing
    is known without the first reading.
    """
    earlier = before.by_worker if before else {}
    seconds = after.at - before.at if before else 0.0
    taken = {
        name: _taken(earlier[name], reading, seconds)
        for name, reading in sorted(after.by_worker.items())
        if name in earlier
    }
    known = {name: joules for name, joules in taken.items() if joules is not None}
    sources: dict[str, str] = {name: after.by_worker[name].source for name in known}
    return JobEnergy(known, {name: sources.get(name, "unknown") for name in sorted({*known, *took_part})})


def _taken(before: Reading, after: Reading, seconds: float) -> float | None:
    """Return joules taken in ``seconds``. Devices report at times of their own, so the difference of two
    reports is scaled to ``seconds``; without a new report, the recent power is used.
    """
    restarted = (after.meter_id, after.source) != (
        before.meter_id,
        before.source,
    ) or after.joules < before.joules
    if restarted:
        return None
    if after.at > before.at:
        return (after.joules - before.joules) / (after.at - before.at) * seconds
    return None if after.watts is None else after.watts * seconds
