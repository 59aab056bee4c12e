# SPDX-License-Identifier: Apache-2.0
"""Edge: the transport into a virtual machine, for the host's endpoint outside and the device's inside."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from millpond.base.errors import LocalError, RemoteError
from millpond.tunnel.ring.layout import Layout
from millpond.tunnel.transports.ivshmem.connection import IvshmemConnection
from millpond.tunnel.transports.ivshmem.device_protocol import IvshmemDevice
from millpond.tunnel.transports.ivshmem.device_side import DeviceConnection
from millpond.tunnel.transports.ivshmem.doorbell_client import DoorbellClient
from millpond.tunnel.transports.ivshmem.host_side import HostConnection
from millpond.tunnel.transports.ivshmem.sysfs import open_device

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class IvshmemTransport:
    """The transport of an endpoint at ``where``: the path of a doorbell server's socket, a PCI address such
    as 0000:00:05.0, or ``pci`` for the only ivshmem device of this machine. ``entries`` are per queue. Raises
    LocalError.
    """

    def __init__(self, role: str, where: str, entries: int) -> None:
        self._role, self._where, self._layout = role, where, Layout(entries)
        self._device: IvshmemDevice | None = None
        self._open: Callable[[], IvshmemDevice] = lambda: DoorbellClient(Path(where).absolute(), role)
        if where == "pci" or _PCI_ADDRESS.fullmatch(where):
            if role == "host":
                raise LocalError("the host's end is outside of the virtual machine, at the doorbell server")
            self._open = lambda: open_device("" if where == "pci" else where)
            self._device = self._checked(self._open())

    def readiness(self) -> int | None:
        """Return None: a connection itself waits for a peer."""
        return None

    def join(self) -> IvshmemConnection:
        """Return a link to be opened with the peer that will then be there. Raises RemoteError, OSError,
        LocalError.
        """
        device = self._current_device()
        return HostConnection(device) if self._role == "host" else DeviceConnection(device, self._layout)

    def _current_device(self) -> IvshmemDevice:
        """Return the open device, or open one. A link needs nothing of a doorbell server that died, so its
        device is used until there is another server.
        """
        if self._device and not self._device.lost:
            return self._device
        try:
            device = self._checked(self._open())
        except (RemoteError, OSError):
            if not self._device:
                raise
        else:
            self._release()
            self._device = device
        return self._device

    def _checked(self, device: IvshmemDevice) -> IvshmemDevice:
        room = len(device.memory)
        if self._role == "device" and self._layout.size > room:
            device.close()
            raise LocalError(
                f"queues of {self._layout.entries} entries take {self._layout.size} bytes; the shared memory "
                f"has {room}: choose a smaller depth, or give the doorbell server the same"
            )
        return device

    def reject(self) -> None:
        """Do nothing: there is no listener."""

    def close(self) -> None:
        """Release the device."""
        self._release()

    def _release(self) -> None:
        if self._device:
            self._device.close()
        self._device = None

    def __str__(self) -> str:
        return f"the {'device' if self._role == 'host' else 'host'} at {self._where}"
