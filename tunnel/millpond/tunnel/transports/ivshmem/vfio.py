# SPDX-License-Identifier: Apache-2.0
"""Edge: use the ivshmem device through vfio-pci: its MSI-X interrupts arrive as eventfds."""

from __future__ import annotations

import array
import errno
import fcntl
import mmap
import os
import struct
import time
from contextlib import ExitStack
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError
from millpond.tunnel.datapath.notifier import Notifier
from millpond.tunnel.ring.layout import QUEUES
from millpond.tunnel.transports.ivshmem.bar0 import DoorbellRegisters

_SET_IOMMU, _GET_STATUS, _SET_CONTAINER, _GET_DEVICE, _GET_REGION, _SET_IRQS = (
    0x3B64 + number for number in (2, 3, 4, 6, 8, 10)
)
_TYPE1V2_IOMMU = 3
_VIABLE = 1
_MAPPABLE = 4
_BAR0, _CONFIG = 0, 7
_MSIX = 2
_EVENTFD_TRIGGER = 1 << 2 | 1 << 5
_COMMAND, _MEMORY_AND_MASTER = 0x4, 0x6
_REGION = struct.Struct("IIIIQQ")
_BUSY_SECONDS = 2.0


class VfioMissing(LocalError):
    """This machine offers no interrupts through vfio."""


class VfioDevice:
    """The device in sysfs at ``device``, its BAR 2 as ``memory``; an IvshmemDevice, for one process at a
    time.

    Raises VfioMissing, and LocalError if another process still has it after 2 s.
    """

    events: tuple[int, ...] = ()
    lost = False

    def __init__(self, device: Path, memory: memoryview, *, weakly_ordered: bool) -> None:
        self.memory, self.weakly_ordered = memory, weakly_ordered
        self._undo = ExitStack()
        try:
            self._device = self._open(device)
            self._registers = DoorbellRegisters(self._map_registers())
            self.wakes = self._take_interrupts()
        except OSError as error:
            self.close()
            raise VfioMissing(f"vfio gives no interrupts: {error.strerror}") from None
        except BaseException:
            self.close()
            raise
        self.position = self._registers.position

    def _open(self, device: Path) -> int:
        try:
            container = self._keep(os.open("/dev/vfio/vfio", os.O_RDWR | os.O_CLOEXEC))
            group = self._keep(_open_group(device / "iommu_group"))
            status = bytearray(struct.pack("II", 8, 0))
            fcntl.ioctl(group, _GET_STATUS, status)
            if not struct.unpack("II", status)[1] & _VIABLE:
                raise VfioMissing("another device of its IOMMU group is in use")
            fcntl.ioctl(group, _SET_CONTAINER, struct.pack("i", container))
            fcntl.ioctl(container, _SET_IOMMU, _TYPE1V2_IOMMU)
            name = bytearray(device.name.encode() + b"\0")  # mutable: only then ioctl returns the descriptor
            return self._keep(fcntl.ioctl(group, _GET_DEVICE, name))
        except OSError as error:
            raise VfioMissing(f"vfio: {error.strerror}") from None

    def _keep(self, descriptor: int) -> int:
        os.set_inheritable(descriptor, False)
        self._undo.callback(os.close, descriptor)
        return descriptor

    def _region(self, index: int) -> tuple[int, int, int]:
        """Return a region's size, offset in the device's file, and flags."""
        info = bytearray(_REGION.pack(_REGION.size, 0, index, 0, 0, 0))
        fcntl.ioctl(self._device, _GET_REGION, info)
        _, flags, *_, size, offset = _REGION.unpack(info)
        return size, offset, flags

    def _map_registers(self) -> memoryview:
        size, offset, flags = self._region(_BAR0)
        if not flags & _MAPPABLE:
            raise VfioMissing(
                "its registers share a page with others: boot with pci=resource_alignment=12@pci:1af4:1110"
            )
        return memoryview(mmap.mmap(self._device, max(size, mmap.PAGESIZE), offset=offset))[:size]

    def _take_interrupts(self) -> tuple[int, ...]:
        """Enable interrupts; returns an eventfd per vector. An interrupt is a write by the device, so it must
        be bus master.
        """
        _, config, _ = self._region(_CONFIG)
        command = struct.unpack("<H", os.pread(self._device, 2, config + _COMMAND))[0]
        os.pwrite(self._device, struct.pack("<H", command | _MEMORY_AND_MASTER), config + _COMMAND)
        wakes = [self._keep(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)) for _ in range(QUEUES)]
        head = struct.pack("IIIII", 20 + 4 * QUEUES, _EVENTFD_TRIGGER, _MSIX, 0, QUEUES)
        fcntl.ioctl(self._device, _SET_IRQS, head + array.array("i", wakes).tobytes())
        return tuple(wakes)

    def notifiers(self, peer: int) -> tuple[Notifier, ...] | None:
        """Return notifiers through the doorbell register; the device does not know whether the
        peer is there.
        """
        return self._registers.notifiers(peer)

    def refresh(self) -> None:
        """Do nothing: the device does not report arrivals and departures."""

    def close(self) -> None:
        """Release the device."""
        self._undo.close()


def _open_group(group: Path) -> int:
    """Open the VFIO group. The pumps of a dead endpoint may hold it for a moment."""
    path = f"/dev/vfio/{group.resolve().name}"
    deadline = Deadline.after(_BUSY_SECONDS)
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            if deadline.passed:
                raise LocalError(f"another process uses {path}") from None
        time.sleep(0.01)
