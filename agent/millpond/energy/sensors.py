# SPDX-License-Identifier: Apache-2.0
"""Edge (sysfs, psutil and the clock): the energy that this machine has taken.

Of the sources the first that can be read is used:

- RAPL: the processors' packages. The domains inside them and psys, which has them in it, would count double.
  Memory and drives are not in it. The counter begins anew after some 260 kJ: read it every few minutes.
- hwmon: the ACPI meter of the whole machine if there is one, otherwise all chips with sensors of energy or
  power, added up. A power is read when asked for; between two readings it is taken to change evenly.
- declared watts, by the share of processor time that was busy.

All figures are of the whole machine, with other work on it. Emulated devices share one machine.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from millpond.energy import joules
from millpond.energy.joules import Joules, Source, Watts

_MICRO = 1e-6
_WHOLE_MACHINE = "power_meter"
"""The hwmon name of the ACPI meter."""


class EnergyMeter:
    """Measures the energy of this machine since the meter was made. ``root`` is where sysfs is mounted, None
    if it is another machine's: then only declared watts count.
    """

    def __init__(self, root: Path | None = Path("/sys"), declared: Watts | None = None) -> None:
        self.source, self._gauges = _find(root, declared)

    def read(self) -> Joules | None:
        """Return the energy so far, None if unknown or unreadable now; for a period subtract two readings."""
        try:
            values = [gauge.total() for gauge in self._gauges]
        except (OSError, ValueError):
            return None  # sensors may be busy; the next reading has it all
        return Joules(sum(values), self.source) if values else None


class _Gauge(Protocol):
    def total(self) -> float:
        """Return the joules so far. Raises OSError or ValueError if the gauge cannot be read now."""


class _Counter:
    """A file that counts microjoules."""

    def __init__(self, path: Path, largest: int | None = None) -> None:
        self._path, self._largest = path, largest
        self._last, self._total = _number(path), 0

    def total(self) -> float:
        now = _number(self._path)
        self._total += joules.counted(self._last, now, self._largest)
        self._last = now
        return self._total * _MICRO


class _Power:
    """A file with the present power in microwatts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last, self._at, self._total = _number(path), time.monotonic(), 0.0

    def total(self) -> float:
        power, now = _number(self._path), time.monotonic()
        self._total += joules.under(self._last * _MICRO, power * _MICRO, now - self._at)
        self._last, self._at = power, now
        return self._total


class _Declared:
    """Declared watts, by the processors' busy time."""

    def __init__(self, watts: Watts) -> None:
        self._watts, self._processors = watts, psutil.cpu_count() or 1
        self._began, self._busy = time.monotonic(), _busy_seconds()

    def total(self) -> float:
        seconds, busy = time.monotonic() - self._began, _busy_seconds() - self._busy
        return joules.declared(self._watts, seconds, busy, self._processors)


def _find(root: Path | None, watts: Watts | None) -> tuple[Source, Sequence[_Gauge]]:
    if root and (packages := _packages(root / "class/powercap")):
        return "rapl", packages
    if root and (sensors := _sensors(root / "class/hwmon")):
        return "hwmon", sensors
    return ("declared", [_Declared(watts)]) if watts else ("unknown", [])


def _packages(folder: Path) -> list[_Counter]:
    """Return all packages' counters, or none where one cannot be read: since 2020 only root may."""
    domains = [path for path in sorted(folder.glob("intel-rapl:*")) if _text(path / "name")[:7] == "package"]
    try:
        return [_Counter(path / "energy_uj", _number(path / "max_energy_range_uj")) for path in domains]
    except (OSError, ValueError):
        return []


def _sensors(folder: Path) -> list[_Gauge]:
    chips = sorted(folder.glob("hwmon*"))
    whole = [chip for chip in chips if _text(chip / "name") == _WHOLE_MACHINE]
    found: list[_Gauge] = []
    for make, path in itertools.chain.from_iterable(map(_of_chip, whole or chips)):
        with contextlib.suppress(OSError, ValueError):  # one that sleeps or is broken
            found.append(make(path))
    return found


def _of_chip(chip: Path) -> list[tuple[Callable[[Path], _Gauge], Path]]:
    """Return a chip's sensors of energy, or else of power: with both it measures the same twice."""
    kinds: tuple[tuple[str, Callable[[Path], _Gauge]], ...] = (
        ("energy*_input", _Counter),
        ("power*_input", _Power),
        ("power*_average", _Power),
    )
    of_kind = ([(make, path) for path in sorted(chip.glob(pattern))] for pattern, make in kinds)
    return next(filter(None, of_kind), [])


def _busy_seconds() -> float:
    """Return the busy seconds of all processors together since the machine was started."""
    spent = psutil.cpu_times()
    return float(spent.user + spent.nice + spent.system + spent.irq + spent.softirq)


def _number(path: Path) -> int:
    return int(path.read_text())


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
