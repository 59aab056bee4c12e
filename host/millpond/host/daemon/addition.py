# SPDX-License-Identifier: Apache-2.0
"""Edge: the devices of the running daemon are started, also those that are added to the fleet meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from millpond.host.fleet import directory
from millpond.host.fleet.directory import DeviceConfig, Fleet
from millpond.host.fleet.registry import DeviceRegistry

if TYPE_CHECKING:
    from millpond.host.fleet.device import Device
    from millpond.host.fleet.forwarding import Forwarding


class DeviceAddition:
    """Starts the devices of ``fleet`` and keeps them in ``devices``, and takes those that are added."""

    def __init__(
        self,
        fleet: Fleet,
        devices: DeviceRegistry,
        forwarding: Forwarding,
        make: Callable[[DeviceConfig], Device],
    ) -> None:
        self._fleet, self._devices, self._forwarding, self._make = fleet, devices, forwarding, make
        self._lock = threading.Lock()
        self._started: list[Device] = []

    def start_all(self) -> None:
        """Start the devices that the fleet has now."""
        for config in self._fleet.config.device:
            self._start(config)

    def _start(self, config: DeviceConfig) -> None:
        device = self._make(config)
        device.start()
        self._started.append(device)
        self._devices.add(device)

    def add(self, name: str) -> None:
        """Take a device, unless it is there. Raises LocalError."""
        with self._lock:
            if name in self._devices:
                return
            config = directory.read(self._fleet.directory).device(name)
            self._fleet.take(config)
            self._forwarding.add(name)  # the host is closed to it before there is a tunnel
            self._start(config)

    def close(self) -> None:
        """Stop all devices, the last one first."""
        with self._lock:
            for device in reversed(self._started):
                device.stop()
