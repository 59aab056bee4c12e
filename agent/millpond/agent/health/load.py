# SPDX-License-Identifier: Apache-2.0
"""Edge (psutil): the load of the device, and the energy that it takes."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

from millpond.agent.cohort import cohort_roster
from millpond.agent.config import AgentConfig
from millpond.agent.health import drive
from millpond.energy.sensors import EnergyMeter
from millpond.wire.control_messages import AtRest, DriveHealth, Load, Welcome
from millpond.wire.messages import Message


def meter(config: AgentConfig, sysfs: Path = Path("/sys")) -> EnergyMeter:
    """Make the meter of the device's energy from now on."""
    return EnergyMeter(None if config.board == "emulated" else sysfs, config.watts)


def measure(
    config: AgentConfig,
    jobs: Iterable[str],
    energy: EnergyMeter,
    fault: str = "",
    budgets: Mapping[str, float] = MappingProxyType({}),
) -> Load:
    """Measure the present load; ``cpu`` is the busy share, 0 to 1, since the last call. ``fault`` is why no
    job can run, ``budgets`` are the spent shares of privacy budgets by folder.
    """
    taken = energy.read()
    return Load(
        cpu=psutil.cpu_percent() / 100,
        memory_used=psutil.virtual_memory().used,
        flash_used=psutil.disk_usage(config.flash).used,
        temperature=_temperature(),
        jobs=tuple(jobs),
        joules=taken.joules if taken else None,
        energy=energy.source,
        fault=fault,
        drive=DriveHealth("none") if config.board == "emulated" else drive.health(Path(config.flash)),
        time=time.time(),
        budgets=tuple(sorted(budgets.items())),
        cohort=cohort_roster.described(config.policy, Path(config.state)),
    )


def _temperature() -> float | None:
    sensors = psutil.sensors_temperatures()
    readings = [entry.current for entries in sensors.values() for entry in entries if entry.current]
    return max(readings, default=None)


def describe(config: AgentConfig, software: str, boot: str, at_rest: AtRest) -> Message:
    """Make the answer to the host's Hello."""
    return Welcome(
        device=config.name,
        software=software,
        boot=boot,
        machine=platform.machine(),
        cores=psutil.cpu_count() or 1,
        memory=psutil.virtual_memory().total,
        flash=psutil.disk_usage(config.flash).total,
        at_rest=at_rest,
    )
