# SPDX-License-Identifier: Apache-2.0
"""Pure: the recent history of a fleet's devices, and their changes, from answers of the daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from millpond.host.api.daemon import DeviceInfo, Devices

KEPT_SAMPLES: Final = 600
"""Samples of a device that are kept: ten minutes at one a second."""
KEPT_EVENTS: Final = 500
LEAST_SECONDS: Final = 0.75
"""The least time between two samples: the daemon hears of a device every half second, so that rates over
less time would be none and then too many.
"""
_LOST: Final = frozenset({"absent", "connecting"})


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """A device ``at`` a time (Unix seconds): ``cpu`` 0..1, used ``memory`` and ``flash`` in bytes,
    ``temperature`` in degrees Celsius, the bytes per second ``to`` and ``back`` from it over its tunnel since
    the sample before, ``watts``. None where the value is not known. ``crossed`` are the bytes, to and from
    it, that its tunnel counts.
    """

    at: float
    cpu: float | None = None
    memory: int | None = None
    flash: int | None = None
    temperature: float | None = None
    to: float | None = None
    back: float | None = None
    watts: float | None = None
    crossed: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """A change of a device ``at`` a time (Unix seconds): its new ``state``, or added, removed or restarted,
    and a ``text`` of one line without the device's name.
    """

    at: float
    device: str
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class FleetHistory:
    """A fleet ``at`` a time (Unix seconds, 0 before the first answer): its ``devices``, the recent
    ``samples`` of each by name and the recent ``events``, oldest first, and the daemon's ``warnings``.
    """

    at: float = 0.0
    devices: tuple[DeviceInfo, ...] = ()
    samples: Mapping[str, tuple[DeviceSample, ...]] = field(default_factory=dict)
    events: tuple[FleetEvent, ...] = ()
    warnings: tuple[str, ...] = ()

    def after(self, at: float, answer: Devices) -> FleetHistory:
        """Return the history with an answer of the daemon that came ``at`` a time."""
        before = {info.name: info for info in self.devices}
        samples = {
            info.name: _with_sample(self.samples.get(info.name, ()), at, info) for info in answer.devices
        }
        new = _events(at, before, answer.devices) if self.at else ()
        events = (*self.events, *new)[-KEPT_EVENTS:]
        return FleetHistory(at, answer.devices, samples, events, answer.warnings)

    def device(self, name: str) -> DeviceInfo | None:
        """Return a device as the last answer has it, None for one that is not in the fleet."""
        return next((info for info in self.devices if info.name == name), None)

    def last(self, name: str) -> DeviceSample | None:
        """Return the newest sample of a device, None without one."""
        found = self.samples.get(name)
        return found[-1] if found else None


def _with_sample(samples: tuple[DeviceSample, ...], at: float, info: DeviceInfo) -> tuple[DeviceSample, ...]:
    """Return the samples of a device with one more, unless the last one is too young."""
    last = samples[-1] if samples else None
    if last and 0 <= at - last.at < LEAST_SECONDS:
        return samples
    return (*samples[1 - KEPT_SAMPLES :], _sample(at, info, last))


def _sample(at: float, info: DeviceInfo, last: DeviceSample | None) -> DeviceSample:
    load, crossed = info.load, info.tunnel
    to, back = _rates(at, crossed, last)
    if load is None or info.state in _LOST:
        return DeviceSample(at, to=to, back=back, crossed=crossed)
    memory, flash, celsius = load.memory_used, load.flash_used, load.temperature
    return DeviceSample(at, load.cpu, memory, flash, celsius, to, back, info.watts, crossed)


def _rates(
    at: float, crossed: tuple[int, int], last: DeviceSample | None
) -> tuple[float | None, float | None]:
    """Return the bytes per second to and from a device; None at its first sample, and where its interface is
    a new one, which counts from zero.
    """
    if last is None or at <= last.at:
        return None, None
    to, back = (now - then for now, then in zip(crossed, last.crossed, strict=True))
    seconds = at - last.at
    return (None, None) if min(to, back) < 0 else (to / seconds, back / seconds)


def _events(at: float, before: Mapping[str, DeviceInfo], now: tuple[DeviceInfo, ...]) -> Iterator[FleetEvent]:
    for info in now:
        text = _change(before.get(info.name), info)
        if text:
            kind = info.state if info.name in before else "added"
            yield FleetEvent(at, info.name, kind, text)
    for name in before.keys() - {info.name for info in now}:
        yield FleetEvent(at, name, "removed", "is no longer in the fleet")


def _change(before: DeviceInfo | None, now: DeviceInfo) -> str:
    """Return what has happened to a device between two answers, "" for nothing."""
    if before is None:
        return f"is new in the fleet: {described(now)}"
    if before.state != now.state:
        return "" if {before.state, now.state} <= _LOST else _became(now)
    if now.state not in _LOST and before.reason != now.reason:
        return _became(now)
    agents = [info.welcome.boot for info in (before, now) if info.welcome]
    return "its agent was started again" if len(set(agents)) == 2 else ""


def _became(now: DeviceInfo) -> str:
    return f"is {'lost' if now.state in _LOST else now.state}{f': {now.reason}' if now.reason else ''}"


def described(info: DeviceInfo) -> str:
    """Return the state of a device, with the reason where it has one."""
    return f"{info.state}: {info.reason}" if info.reason else info.state
