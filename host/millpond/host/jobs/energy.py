"""Edge (the clock): what energy the workers of a job take: differences of what their meters have counted."""

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
    """What a meter had counted ``at`` a time (s), and the power of late. Of meters with another ``since``
    nothing follows: that one was begun anew.
    """

    joules: float
    source: Source
    since: str
    at: float
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class Readings:
    """Of all whose meters are known, at one time (s)."""

    at: float
    of: Mapping[str, Reading]


class FleetMeters:
    """Those of the host, by the name of its worker, and its devices. Safe to use from several threads."""

    def __init__(self, host: str, meter: EnergyMeter, devices: Mapping[str, Device]) -> None:
        self._host, self._meter, self._devices = host, meter, devices
        self._lock = threading.Lock()

    def read(self) -> Readings:
        """What they say now; devices, what they said last."""
        found = {name: reading for name, device in self._devices.items() if (reading := _of(device))}
        with self._lock:
            own, now = self._meter.read(), time.monotonic()
        if own:
            found[self._host] = Reading(own.joules, own.source, "", now)
        return Readings(now, found)


def _of(device: Device) -> Reading | None:
    status = device.status
    load, welcome = status.load, status.welcome
    if status.state is not DeviceState.READY or load is None or welcome is None or load.joules is None:
        return None
    return Reading(load.joules, load.energy, welcome.boot, status.heard, status.watts)


@dataclass(frozen=True, slots=True)
class JobEnergy:
    """Joules of those of whom they are known, and where from, "unknown" for the others who took part."""

    joules: dict[str, float]
    energy: dict[str, str]


def between(before: Readings | None, after: Readings, took_part: Collection[str]) -> JobEnergy:
    """What was taken between two readings. Without the first, nothing is known."""
    earlier = before.of if before else {}
    seconds = after.at - before.at if before else 0.0
    taken = {
        name: _taken(earlier[name], reading, seconds)
        for name, reading in sorted(after.of.items())
        if name in earlier
    }
    known = {name: joules for name, joules in taken.items() if joules is not None}
    sources: dict[str, str] = {name: after.of[name].source for name in known}
    return JobEnergy(known, {name: sources.get(name, "unknown") for name in sorted({*known, *took_part})})


def _taken(before: Reading, after: Reading, seconds: float) -> float | None:
    """Devices are read each half second, so what they took in between is brought to the ``seconds`` asked
    for. In less than that, they took what they did of late.
    """
    begun_anew = (after.since, after.source) != (before.since, before.source) or after.joules < before.joules
    if begun_anew:
        return None
    if after.at > before.at:
        return (after.joules - before.joules) / (after.at - before.at) * seconds
    return None if after.watts is None else after.watts * seconds
