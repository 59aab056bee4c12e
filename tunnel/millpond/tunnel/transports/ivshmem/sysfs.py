# SPDX-License-Identifier: Apache-2.0
"""Edge: find and open the ivshmem device in sysfs, inside the virtual machine."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.tunnel.ring.barrier import WEAKLY_ORDERED
from millpond.tunnel.transports.ivshmem.device_protocol import IvshmemDevice
from millpond.tunnel.transports.ivshmem.polling import PolledDevice
from millpond.tunnel.transports.ivshmem.vfio import VfioDevice, VfioMissing

log = logging.getLogger(__name__)

_DEVICES = Path("/sys/bus/pci/devices")
_IVSHMEM = ("0x1af4", "0x1110")
_DRIVER = Path("/sys/bus/pci/drivers/vfio-pci")
_CPUS = Path("/proc/cpuinfo")
_MODPROBE_SECONDS = 30.0


def open_device(address: str) -> IvshmemDevice:
    """Open the ivshmem device at a PCI address, or the only one: with interrupts if the kernel has vfio-pci
    and an IOMMU, otherwise polled. Raises LocalError.
    """
    device = _find(address)
    try:
        combining = _combining(device)
        memory = _map_memory(device / ("resource2_wc" if combining else "resource2"))
        weakly_ordered = combining or WEAKLY_ORDERED
        try:
            _bind_to_vfio(device)
            return VfioDevice(device, memory, weakly_ordered=weakly_ordered)
        except VfioMissing as error:
            log.warning("no interrupts from %s, it will be polled: %s", device.name, error)
            _unbind_from_vfio(device)
            return PolledDevice(device, memory, weakly_ordered=weakly_ordered)
    except OSError as error:
        raise LocalError(f"cannot use {device.name}: {error}") from None


def _find(address: str) -> Path:
    found = [device for device in sorted(_DEVICES.glob("*")) if _identity(device) == _IVSHMEM]
    chosen = [device for device in found if address in ("", device.name)]
    if len(chosen) == 1:
        return chosen[0]
    there = ", ".join(device.name for device in found) or "none"
    raise LocalError(f"there is no ivshmem device {address}, or more than one: {there}")


def _identity(device: Path) -> tuple[str, str]:
    return ((device / "vendor").read_text().strip(), (device / "device").read_text().strip())


def _combining(device: Path) -> bool:
    """Whether to map BAR 2 write-combining, the only way to have unaligned accesses on ARM.

    On x86 such memory is weakly ordered where the hypervisor honours what the guest wants of it. On AMD's it
    does, but a locked instruction orders all (their manual, volume 1, 3.9.2), and uncached memory would be
    slow. On Intel's it does not order loads (volume 3, 8.1.2.2), but KVM gives cached memory as a rule.
    """
    if not (device / "resource2_wc").exists():
        return False
    return WEAKLY_ORDERED or bool(re.search("AuthenticAMD|HygonGenuine", _CPUS.read_text()))


def _map_memory(path: Path) -> memoryview:
    """Map BAR 2 through sysfs: vfio would map it as device memory, with no unaligned accesses on ARM."""
    bar = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(bar, os.fstat(bar).st_size))
    except OSError as error:
        locked = ": a kernel that is locked down, as under Secure Boot, gives no program PCI memory"
        hint = locked if error.errno == errno.EPERM else ""
        raise LocalError(f"cannot map {path}: {error.strerror}{hint}") from None
    finally:
        os.close(bar)


def _unbind_from_vfio(device: Path) -> None:
    """Unbind the device from vfio-pci: a device with a driver cannot be enabled by hand."""
    if (device / "driver").exists():
        (device / "driver_override").write_text("\n")
        (device / "driver/unbind").write_text(device.name)


def _bind_to_vfio(device: Path) -> None:
    """Bind the device to vfio-pci. Raises VfioMissing."""
    if not _DRIVER.exists():
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                ["/sbin/modprobe", "vfio-pci"], check=False, capture_output=True, timeout=_MODPROBE_SECONDS
            )
    if not (device / "iommu_group").exists():
        raise VfioMissing("the machine has no IOMMU")
    if not _DRIVER.exists():
        raise VfioMissing("the kernel has no vfio-pci")
    driver = device / "driver"
    try:
        if driver.exists() and driver.resolve().name != "vfio-pci":
            (driver / "unbind").write_text(device.name)
        if not driver.exists():
            (device / "driver_override").write_text("vfio-pci")
            Path("/sys/bus/pci/drivers_probe").write_text(device.name)
    except OSError as error:  # so the kernel reports an IOMMU that lacks a feature vfio needs
        raise VfioMissing(f"vfio-pci did not take the device: {error.strerror}") from None
    if not driver.exists():
        raise VfioMissing("vfio-pci did not take the device")
