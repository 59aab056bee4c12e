"""Edge (psutil): how busy the device is."""

from __future__ import annotations

import platform
from collections.abc import Iterable

import psutil

from millpond.agent.config import AgentConfig
from millpond.wire.control import Load, Welcome
from millpond.wire.message import Message


def measure(config: AgentConfig, jobs: Iterable[str]) -> Load:
    """The present load; cpu is the share since the last call."""
    return Load(
        cpu=psutil.cpu_percent() / 100,
        memory_used=psutil.virtual_memory().used,
        flash_used=psutil.disk_usage(config.flash).used,
        temperature=_temperature(),
        jobs=tuple(jobs),
    )


def _temperature() -> float | None:
    sensors = psutil.sensors_temperatures()
    readings = [entry.current for entries in sensors.values() for entry in entries if entry.current]
    return max(readings, default=None)


def describe(config: AgentConfig, software: str, boot: str) -> Message:
    """The answer to the host's Hello."""
    return Welcome(
        device=config.name,
        software=software,
        boot=boot,
        machine=platform.machine(),
        cores=psutil.cpu_count() or 1,
        memory=psutil.virtual_memory().total,
        flash=psutil.disk_usage(config.flash).total,
    )
