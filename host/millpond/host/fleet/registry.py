# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): the devices of the running daemon by name, which may become more or fewer."""

from __future__ import annotations

import threading
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millpond.host.fleet.device import Device


class DeviceRegistry(Mapping[str, "Device"]):
    """A mapping that may change while other threads iterate over it: these see what there was."""

    def __init__(self, devices: Mapping[str, Device]) -> None:
        self._devices = dict(devices)
        self._lock = threading.Lock()

    def add(self, device: Device) -> None:
        """Add a device, in place of one of its name."""
        with self._lock:
            self._devices = {**self._devices, device.name: device}

    def remove(self, name: str) -> Device:
        """Forget a device, and return it. Raises KeyError for an unknown one."""
        with self._lock:
            left = dict(self._devices)
            device = left.pop(name)
            self._devices = left  # a new one: the old one may be iterated over
        return device

    def __getitem__(self, name: str) -> Device:
        return self._devices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def keys(self) -> KeysView[str]:
        """Return the names at this moment."""
        return self._devices.keys()

    def items(self) -> ItemsView[str, Device]:
        """Return names and devices at this moment."""
        return self._devices.items()

    def values(self) -> ValuesView[Device]:
        """Return the devices at this moment."""
        return self._devices.values()
