# SPDX-License-Identifier: Apache-2.0
"""Edge (files, the host daemon): looks at a fleet's directory, and asks its daemon."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from millpond.base.errors import LocalError, MillpondError
from millpond.base.text import counted
from millpond.host.api.daemon import DeviceInfo
from millpond.host.api.topology import LinkInfo
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet import directory as fleets
from millpond.host.fleet import expiry
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.records.jobs import JobState
from millpond.host.remote.doctor.facts import DeviceFacts, DiskFacts, FleetFacts
from millpond.images.boards import EMULATED

_UNITS = tuple(Path(folder, "systemd/system") for folder in ("/etc", "/usr/lib", "/usr/local/lib", "/lib"))
_UNIT = "millpond-host.service"
_PROBED = 1024  # values: the links are measured alike for any number
_LATEST = 5  # jobs, of which one may run


def look(directory: Path, tell: Callable[[str], None] = lambda _line: None) -> FleetFacts:
    """Look at the fleet in ``directory``, which need not be there. ``tell`` is called with a line before what
    takes a while.
    """
    facts = FleetFacts(
        str(directory.absolute()),
        datetime.datetime.now(datetime.UTC),
        disk=_disk(directory.absolute()),
        is_installed=any((folder / _UNIT).exists() for folder in _UNITS),
    )
    try:
        fleet = fleets.read(directory)
    except (LocalError, OSError) as error:
        return replace(facts, fault=str(error), is_there=os.path.lexists(directory / "fleet.toml"))
    host = fleet.config.host
    facts = replace(
        facts,
        boards=dict(Counter(device.board for device in fleet.config.device)),
        emulated=sum(device.board == EMULATED for device in fleet.config.device),
        is_confined=host.confinement == "required",
        is_firewalled=host.firewall == "required",
        certificates=expiry.ends(fleet, facts.now),
    )
    return _ask(fleet, facts, tell)


def _disk(directory: Path) -> DiskFacts | None:
    """Return the file system that the directory lies in, or would."""
    for place in (directory, *directory.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(place)
            size = found.f_frsize
            return DiskFacts(found.f_bavail * size, found.f_blocks * size, found.f_favail, found.f_files)
    return None


def _ask(fleet: Fleet, facts: FleetFacts, tell: Callable[[str], None]) -> FleetFacts:
    """Return the facts with the daemon's word."""
    try:
        with DaemonClient(fleet.directory) as client:
            found = client.overview()
            links, unmeasured = _measure(client, found.devices, tell)
            devices = tuple(_device(client, info, links) for info in found.devices)
            return replace(facts, warnings=found.warnings, devices=devices, unmeasured=unmeasured)
    except MillpondError as error:
        denied = fleet.socket.exists() and not os.access(fleet.socket, os.W_OK)
        return replace(facts, silent=str(error), is_denied=denied)


def _measure(
    client: DaemonClient, devices: tuple[DeviceInfo, ...], tell: Callable[[str], None]
) -> tuple[dict[str, LinkInfo], str]:
    """Measure the tunnels of all devices that are ready, unless that would disturb a job. Returns the links,
    or why there are none.
    """
    if not any(info.state == DeviceState.READY for info in devices):
        return {}, "no device is ready"
    if any(job.state == JobState.RUNNING for job in client.jobs(_LATEST)):
        return {}, "a job runs, which it would slow down"
    tell(f"measures the tunnels of {counted(len(devices), 'device')}")
    try:
        return client.topology(_PROBED).links, ""
    except MillpondError as error:
        return {}, str(error)


def _device(client: DaemonClient, info: DeviceInfo, links: dict[str, LinkInfo]) -> DeviceFacts:
    tunnel = None
    with contextlib.suppress(MillpondError):
        tunnel = client.tunnel(info.name)
    told = info.load.time if info.load else 0.0
    clock = told - time.time() if told and math.isfinite(told) else None
    return DeviceFacts(info, info.board == EMULATED, tunnel, clock, links.get(info.name))
